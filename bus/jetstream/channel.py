"""Channel of a reader to the hosts of runs; the host's side is :mod:`offloop.bus.jetstream.relay`."""

import asyncio
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

from nats.aio.msg import Msg

from offloop.bus.errors import BrokerError, ProtocolError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import PASSING
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.protocol.frames import Control, decode_control, encode_control, split_frame

_MOST_ANSWERS = 1000
_CHECK_SECONDS = 0.1  # between two checks whether the connection has failed
_NO_BRIDGE = (
    "this run has no bridge that answers: see with 'offloop runs' whether it is live, and start 'offloop server "
    "bridge' on its host"
)


class StreamChannel:
    """A Channel through the bridges of runs, which forward messages to brokers and return the answers."""

    def __init__(self, connection: NatsConnection) -> None:
        self.peer: str = f"NATS at {connection.address}"
        self._connection = connection
        self._inbox = connection.client.new_inbox()
        self._subscription: Any = None
        self._subscribing = asyncio.Lock()
        self._answers: deque[Control] = deque(maxlen=_MOST_ANSWERS)
        self._has_come = threading.Event()

    def send(self, kind: str, content: dict[str, Any]) -> bool:
        """Send a message to the host of the first rank. Without a bridge, a message with an id is refused."""
        with suppress(BrokerError):  # the connection has ended, which wait() reports
            self._connection.begin(self._send(kind, content))
        return True

    def receive(self) -> Control | None:
        with suppress(IndexError):
            return self._answers.popleft()
        return None

    def wait(self, seconds: float) -> bool:
        """Wait as a Channel. Raise BrokerError if the connection has failed, such as for a user without the role."""
        deadline = time.monotonic() + seconds
        while not self._answers and (left := deadline - time.monotonic()) > 0:
            self._connection.check()
            self._has_come.wait(min(left, _CHECK_SECONDS))
            self._has_come.clear()
        return bool(self._answers)

    def close(self, linger: float = 0.0) -> None:
        if self._subscription is not None and self._connection.is_connected:
            with suppress(BrokerError):
                self._connection.begin(self._unsubscribe())

    async def _unsubscribe(self) -> None:
        with suppress(*PASSING):
            await self._subscription.unsubscribe()

    async def _send(self, kind: str, content: dict[str, Any]) -> None:
        client = self._connection.client
        asked = content.get("id")
        try:
            async with self._subscribing:
                if self._subscription is None:
                    self._subscription = await client.subscribe(f"{self._inbox}.>", cb=self._take)
            may_command = await client.may_command()
            if kind == "command" and not may_command:
                self._refuse(
                    f"{client.who} may view runs there, not command them: the servers' operator gives it the role "
                    "command with 'offloop server nats-config'",
                    asked,
                )
                return
            subject = names.request_subject(content["run"], kind, may_command=may_command)
            asked = asked if isinstance(asked, str) else None
            reply = names.reply_subject(self._inbox, kind, asked)
            headers = None if asked is None else {"Ol-Id": asked}
            await client.publish(subject, encode_control(kind, content), reply=reply, headers=headers)
        except PASSING:
            pass  # the caller repeats it

    async def _take(self, message: Msg) -> None:
        if message.headers and message.headers.get("Status") == "503":
            # A demand is sent again and again, and at the start of a run its bridge follows in a moment.
            if (asked := names.split_reply(message.subject)[1]) is not None:
                self._refuse(_NO_BRIDGE, asked)
            return
        with suppress(ProtocolError):
            topic, body = split_frame(message.data)
            if topic is None:
                self._note(decode_control(body))

    def _refuse(self, reason: str, asked: object) -> None:
        content = {"reason": reason, "error": "BrokerError"}
        self._note(Control("refused", content if asked is None else {**content, "id": asked}))

    def _note(self, answer: Control) -> None:
        self._answers.append(answer)
        self._has_come.set()
