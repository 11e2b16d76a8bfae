"""Windows of all hosts of a run, for a reader on another machine."""

import asyncio
from collections import deque
from contextlib import suppress

from nats.aio.msg import Msg

from offloop.bus.errors import ProtocolError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import PASSING
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.jetstream.stored import Stored, last_of_each, list_subjects
from offloop.bus.protocol.host_windows import HostWindow, decode_window

_MOST_UNREAD = 20_000
_AGAIN_SECONDS = 1.0


class StreamWindows:
    """Windows of all hosts of an attempt as they arrive, starting with each host's last one.

    Each comes once: windows that servers had lost and that were sent again are recognized by their offsets."""

    def __init__(self, connection: NatsConnection, run: str, attempt: int) -> None:
        self._client = connection.client
        self._stream = names.windows_stream_of(run)
        self._subjects = names.windows_subject(run, attempt)
        self._unread: deque[bytes] = deque(maxlen=_MOST_UNREAD)
        self._known: dict[str, int] = {}  # known size of each subject's file
        self._following = connection.begin(self._follow())

    def take(self) -> list[HostWindow]:
        found = []
        while self._unread:
            with suppress(ProtocolError):
                found.append(decode_window(self._unread.popleft()))
        return found

    def close(self) -> None:
        self._following.cancel()

    # In the connection's thread:

    async def _follow(self) -> None:
        subscription = await self._client.subscribe(self._subjects, cb=self._hear)
        seen = -1
        try:
            while True:
                with suppress(*PASSING):
                    if (connection := self._client.stats["reconnects"]) != seen:
                        subjects = await list_subjects(self._client, self._stream, self._subjects)
                        for one in await last_of_each(self._client, self._stream, subjects):
                            self._note(one)
                        seen = connection
                await asyncio.sleep(_AGAIN_SECONDS)
        finally:
            with suppress(*PASSING):
                await subscription.unsubscribe()

    async def _hear(self, message: Msg) -> None:
        if message.subject.startswith(self._subjects.rstrip("*")):  # see names.is_request
            self._note(Stored(message.subject, 0, message.headers or {}, message.data))

    def _note(self, message: Stored) -> None:
        offset = message.offset
        if offset is not None and offset >= self._known.get(message.subject, 0):
            self._known[message.subject] = offset + len(message.data)
            self._unread.append(message.data)
