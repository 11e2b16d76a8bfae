"""The windows of all hosts of a run, as a reader elsewhere gets them."""

import asyncio
from collections import deque
from contextlib import suppress

from nats.aio.msg import Msg

from offloop.bus.errors import ProtocolError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import PASSING, NatsClient
from offloop.bus.jetstream.stored import Stored, last_of_each, list_subjects
from offloop.bus.protocol.host_windows import HostWindow, decode_window

_KEPT_BYTES = 32 << 20
_AGAIN_SECONDS = 1.0


class StreamWindows:
    """The windows of all hosts of a run as they come: the last one of each host first. Of a host each comes once: one
    that the servers had lost and that is sent again is known by its offset."""

    def __init__(self, client: NatsClient, run: str) -> None:
        self._client = client
        self._stream = names.windows_stream_of(run)
        self._subjects = names.windows_subject(run)
        self._kept: deque[tuple[int, bytes]] = deque()
        self._size = 0
        self._known: dict[str, int] = {}
        """Of each subject how far it is known."""
        self._count = 0
        """How many have come."""

    def since(self, count: int, attempt: int) -> tuple[list[HostWindow], int]:
        """The windows of an attempt behind the first ``count`` that came, as far as they are kept; and how many have
        come by now."""
        now = self._count
        kept = list(self._kept)  # in one step: the connection's thread adds to them
        found = []
        for number, data in kept[max(0, len(kept) - (now - count)) :]:
            if number == attempt:
                with suppress(ProtocolError):
                    found.append(decode_window(data))
        return found, now

    async def follow(self) -> None:
        """Keeps what comes, until it is cancelled."""
        seen = -1
        await self._client.subscribe(self._subjects, cb=self._hear)
        while True:
            with suppress(*PASSING):
                if (connection := self._client.stats["reconnects"]) != seen:
                    subjects = await list_subjects(self._client, self._stream, self._subjects)
                    for one in await last_of_each(self._client, self._stream, subjects):
                        self._take(one)
                    seen = connection
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _hear(self, message: Msg) -> None:
        if message.subject.startswith(self._subjects.rstrip("*.")):  # as in names.is_request
            self._take(Stored(message.subject, 0, message.headers or {}, message.data))

    def _take(self, message: Stored) -> None:
        attempt = message.subject.split(".")[-2]
        offset, data = message.offset, message.data
        if offset is None or not attempt.isdecimal() or offset < self._known.get(message.subject, 0):
            return
        self._known[message.subject] = offset + len(data)
        self._kept.append((int(attempt), data))
        self._size += len(data)
        self._count += 1
        while self._size > _KEPT_BYTES and len(self._kept) > 1:
            self._size -= len(self._kept.popleft()[1])
