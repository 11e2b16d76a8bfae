"""A question to a broker, and its answer."""

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

from offloop.bus.errors import BrokerError
from offloop.bus.net.channels import Channel, open_channel, stream_at
from offloop.bus.net.nats_addresses import what_is_at
from offloop.bus.types.timeouts import Timeouts


def ask_broker(
    address: str,
    kind: str,
    content: dict[str, Any],
    timeouts: Timeouts | None = None,
) -> dict[str, Any]:
    """One question to a broker, and its answer.

    Raises:
        BrokerError: no broker answers, or the broker refuses.
    """
    with contextlib.closing(RequestClient(address, timeouts)) as ask:
        return ask(kind, content)


class RequestClient:
    """One connection to a broker for several questions, each asked when the one before is answered."""

    def __init__(self, address: str, timeouts: Timeouts | None = None) -> None:
        self._address = address
        self._timeouts = timeouts or Timeouts.default
        self._channel = open_channel(address)

    def __call__(self, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        """The answer to a question. Raises :class:`offloop.bus.errors.BrokerError` when no broker answers, or it
        refuses."""
        answer = request(self._channel, kind, content, self._timeouts.answer)
        if answer is None:
            raise BrokerError(
                f"{what_is_at(self._address)} does not answer: it may be busy or gone", address=self._address
            )
        return answer

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()


def list_stream_runs(address: str, name: str | None = None) -> list[dict[str, Any]]:
    """The runs in NATS servers, as ``docs/protocol.md`` describes them, the newest first; with ``name`` that one.

    Raises:
        BrokerError: the servers do not answer.
    """
    return stream_at(address).runs(name)


def list_stream_hosts(address: str, run: str) -> list[dict[str, Any]]:
    """What each host of a run that is read from a stream says of it, in the order of their ranks: as
    :func:`list_stream_runs`, with ``host`` and ``ranks``.

    Raises:
        BrokerError: the servers do not answer.
    """
    hosts = stream_at(address).runs(run, "*")
    newest = max((one["attempt"] for one in hosts), default=0)
    return sorted((one for one in hosts if one["attempt"] == newest), key=lambda one: one["ranks"])


def is_silent(listed: Mapping[str, Any]) -> bool:
    """Whether a run that is read from a stream may continue on its host, whose bridge says nothing."""
    return listed.get("status") in ("live", "paused") and not listed.get("live")


def request(channel: Channel, kind: str, content: dict[str, Any], patience: float) -> dict[str, Any] | None:
    """Asks by a channel and waits so many seconds for the answer, ``None`` when none comes. The answer has the ``id``
    of ``content``, or one made here.

    Raises :class:`offloop.bus.errors.BrokerError` when the broker refuses."""
    asked = content.get("id") or os.urandom(8).hex()
    channel.send(kind, {**content, "id": asked})
    deadline = time.monotonic() + patience
    while channel.wait(deadline - time.monotonic()):
        answer = channel.receive()
        if answer is None or answer.content.get("id") != asked:
            continue
        if answer.kind == "refused":
            raise BrokerError(str(answer.content.get("reason", "the broker refused without a reason")))
        return answer.content
    return None
