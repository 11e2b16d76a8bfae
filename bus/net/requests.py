"""A question to a broker, and its answer."""

import os
import time
from typing import Any

from offloop.bus.errors import BrokerError
from offloop.bus.net.channels import Channel, SocketChannel
from offloop.bus.types.timeouts import Timeouts


def ask_broker(address: str, kind: str, content: dict[str, Any]) -> dict[str, Any]:
    """Asks a broker of this machine.

    Raises:
        BrokerError: no broker answers, or the broker refuses.
    """
    return ask(SocketChannel(address), kind, content)


def ask(channel: Channel, kind: str, content: dict[str, Any]) -> dict[str, Any]:
    """Asks one question by a channel, and closes that.

    Raises:
        BrokerError: no broker answers, or the broker refuses.
    """
    with RequestClient(channel) as client:
        return client(kind, content)


class RequestClient:
    """Several questions by one channel, each asked when the one before is answered. Closes the channel at the end of
    its ``with`` block."""

    def __init__(self, channel: Channel, timeouts: Timeouts | None = None) -> None:
        self._channel = channel
        self._patience = (timeouts or Timeouts.default).answer

    def __call__(self, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        """Asks a question and waits for its answer.

        Raises:
            BrokerError: no broker answers, or the broker refuses.
        """
        asked = os.urandom(8).hex()
        self._channel.send(kind, {**content, "id": asked})
        deadline = time.monotonic() + self._patience
        while self._channel.wait(deadline - time.monotonic()):
            answer = self._channel.receive()
            if answer is None or answer.content.get("id") != asked:
                continue
            if answer.kind == "refused":
                raise BrokerError(str(answer.content.get("reason", "the broker refused without a reason")))
            return answer.content
        raise BrokerError(f"{self._channel.peer} does not answer: it may be busy or gone")

    def __enter__(self) -> "RequestClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
