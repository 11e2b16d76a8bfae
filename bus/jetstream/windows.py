"""The windows of all hosts of a run, as a reader elsewhere gets them."""

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from offloop.bus.errors import ProtocolError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import passing_errors
from offloop.bus.jetstream.stored import Stored, get, list_subjects
from offloop.bus.protocol.host_windows import HostWindow, decode_window

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from offloop.bus.jetstream.client import NatsClient

_KEPT_BYTES = 32 << 20
_BATCH = 64
_AGAIN_SECONDS = 1.0


class StreamWindows:
    """The windows of all hosts of a run as they come: the last one of each host first. Of a host each comes once: one
    that the servers had lost and that is sent again is known by its offset."""

    def __init__(self, client: "NatsClient", run: str) -> None:
        self._client = client
        self._run = run
        self._prefix = names.all_windows(run).rstrip("*.")
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
        connection = -1
        await self._client.subscribe(names.all_windows(self._run), cb=self._hear)
        while True:
            with suppress(*passing_errors()):
                if self._client.stats["reconnects"] != connection:
                    number = self._client.stats["reconnects"]
                    await self._look_up()
                    connection = number
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _look_up(self) -> None:
        stream = names.windows_stream_of(self._run)
        subjects = await list_subjects(self._client, stream, names.all_windows(self._run))
        for begin in range(0, len(subjects), _BATCH):
            batch = subjects[begin : begin + _BATCH]
            found = await asyncio.gather(*(get(self._client, stream, last_by_subj=subject) for subject in batch))
            for one in found:
                if isinstance(one, Stored):
                    self._take(one.subject, one.offset, one.data)

    async def _hear(self, message: "Msg") -> None:
        if message.subject.startswith(self._prefix):  # servers deliver to any subject that a reader names
            offset = (message.headers or {}).get(names.OFFSET, "")
            self._take(message.subject, int(offset) if offset.isdecimal() else None, message.data)

    def _take(self, subject: str, offset: int | None, data: bytes) -> None:
        attempt = subject.split(".")[-2]
        if offset is None or not attempt.isdecimal() or offset < self._known.get(subject, 0):
            return
        self._known[subject] = offset + len(data)
        self._kept.append((int(attempt), data))
        self._size += len(data)
        self._count += 1
        while self._size > _KEPT_BYTES and len(self._kept) > 1:
            self._size -= len(self._kept.popleft()[1])
