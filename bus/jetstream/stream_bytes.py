"""Bytes of a recording in a stream, for :class:`~offloop.bus.recording.reader.RecordingReader`.

A task of the connection reads stored messages ahead of the reader, from the leader of the stream. Live messages on the
subject only signal that more is stored. Messages are placed by their header ``Ol-Offset`` and never by sequence
numbers, because lost messages are stored again with other numbers."""

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any

from offloop.bus.errors import OffloopError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import PASSING
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.jetstream.stored import Stored, get, last_range
from offloop.bus.recording.records import Hole

_AHEAD_BYTES = 4 << 20  # bytes to read ahead of the reader
_BEHIND_BYTES = 32 << 20  # bytes to keep behind the reader
_BATCH = 64  # most messages requested at once
_LOOK_SECONDS = 1.0  # interval of look-ups of the stream's end without a signal
_AGAIN_SECONDS = 0.25
_STORE_SECONDS = 0.01
"""First pause before a signalled message is looked up again, if it is not stored yet. The pause doubles each time."""
_STORED_SECONDS = 1.0  # how long a signalled message may take to be stored, and a missing one to appear


class StreamBytes:
    """A recording in a stream."""

    def __init__(self, connection: NatsConnection, run: str, attempt: int) -> None:
        self._connection = connection
        self._client = connection.client
        self._run = run
        self._attempt = attempt
        self._stream = names.stream_of(run)
        self._subjects = names.recording_subject(run, attempt)
        self._lock = threading.Lock()
        self._start = 0
        self._data = bytearray()
        self._wanted = _AHEAD_BYTES  # offset up to which the buffer may be filled
        self._place = 0  # Number of jumps of the reader. Data requested before a jump are dropped.
        self._asked, self._reached = 1, 0  # numbers of requested and of completed look-ups of the end
        self.hole: Hole | None = None
        self.refusal: str = ""  # why no further data come, if so
        self.newest: bytes = b""  # the last stored message; it ends with the newest check record
        self._wake = asyncio.Event()
        self._sequence: int | None = None  # sequence number of the message placed last; ``None`` if it must be searched
        self._sequence_place = 0
        self._passed, self._passed_at = 0, 0.0
        self._doubted, self._doubted_at = -1, 0.0
        self._future = connection.begin(self._fill())

    # -- the reader's side --------------------------------------------------------------------------------------------

    @property
    def at_end(self) -> bool:
        """Everything stored at the last look-up is here, or no further data come."""
        return self._reached >= self._asked or bool(self.refusal)

    @property
    def is_coming(self) -> bool:
        """More of the requested bytes are on their way."""
        return self.hole is None and not self.at_end

    def read_at(self, offset: int, size: int) -> bytes:
        """Return the buffered part of a range; the rest is read ahead."""
        with self._lock:
            behind = offset - self._start
            if not 0 <= behind <= len(self._data):
                self._move(offset)
                behind = 0
            elif behind > _BEHIND_BYTES:
                del self._data[:behind]
                self._start, behind = offset, 0
            wanted = offset + size + _AHEAD_BYTES
            if wanted > self._wanted:
                if self._start + len(self._data) >= self._wanted:
                    self._look_up()
                self._wanted = wanted
            return bytes(self._data[behind : behind + size])

    def forget(self, offset: int) -> None:
        """Drop the bytes after an offset, and look up what is stored there."""
        with self._lock:
            kept = max(0, offset - self._start)
            if kept < len(self._data) or self.hole is not None:
                data, start = self._data[:kept], self._start
                self._move(start)
                self._data = data
            else:
                self._asked += 1
                self._look_up()

    def _move(self, offset: int) -> None:
        self._start, self._data, self.hole = offset, bytearray(), None
        self._wanted = offset + _AHEAD_BYTES
        self._place += 1
        self._asked += 1
        self._look_up()

    def _look_up(self) -> None:
        self._connection.soon(self._wake.set)

    def close(self) -> None:
        self._future.cancel()

    # -- in the connection's thread -----------------------------------------------------------------------------------

    async def _fill(self) -> None:
        subscription: Any = None
        pause = _STORE_SECONDS
        try:
            while True:
                self._wake.clear()
                try:
                    if subscription is None:
                        subscription = await self._client.subscribe(self._subjects, cb=self._note_passing)
                    is_behind = await self._fill_from_stream()
                except PASSING:
                    is_behind, pause = True, _AGAIN_SECONDS
                except OffloopError as error:
                    self.refusal = str(error)
                if self.refusal:
                    return
                wait = pause if is_behind else _LOOK_SECONDS
                pause = min(2 * pause, _AGAIN_SECONDS) if is_behind else _STORE_SECONDS
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), wait)
        finally:
            if subscription is not None and self._connection.is_connected:
                with suppress(*PASSING):
                    await subscription.unsubscribe()

    async def _note_passing(self, message: Any) -> None:
        if message.subject.startswith(self._subjects[:-1]):  # see names.is_request
            offset = (message.headers or {}).get(names.OFFSET, "")
            if offset.isdecimal():
                self._passed, self._passed_at = int(offset) + len(message.data), time.monotonic()
                self._wake.set()

    async def _fill_from_stream(self) -> bool:
        """Read stored messages as far as there is room; return whether to try again soon."""
        asked, place, known = self._asked, self._place, self._connection.known
        if place != self._sequence_place:
            self._sequence, self._sequence_place = None, place
        last, _ = await last_range(self._client, self._stream, self._subjects)
        end = 0
        if last is not None and last.offset is not None:
            end, self.newest = last.offset + len(last.data), last.data
            while (at := self._at(place)) is not None:
                # Messages after the last placed one may replace its end.
                if at >= end and (self._sequence is None or last.sequence <= self._sequence):
                    break
                if not await self._read_on(place, at, last):
                    return True
            if at is None:
                return self._place != place
            if end == at:
                self._sequence = last.sequence
        at = self._start + len(self._data)
        copied = known.copied(self._run, self._attempt)
        if at < copied and end < copied:
            return not self._name_hole(place, at, copied)
        if not end and not copied and not known.is_going_on(self._run):
            self.refusal = f"the stream {self._stream} has no recording of that attempt"
        self._reached = max(self._reached, asked)
        return self._passed > end and time.monotonic() - self._passed_at < _STORED_SECONDS

    def _at(self, place: int) -> int | None:
        """Return the offset to read next; ``None`` if the buffer is full or the reader has jumped."""
        with self._lock:
            if place != self._place:
                return None
            at = self._start + len(self._data)
            return at if at < self._wanted and self.hole is None else None

    async def _read_on(self, place: int, at: int, last: Stored) -> bool:
        """Read the next messages; return whether any was placed."""
        has_placed = False
        for message in await self._following(last):
            if message is None or message.subject != last.subject or message.offset is None:
                continue
            if message.offset > at:
                break
            at = self._put(place, message.offset, message.data)
            self._sequence, has_placed = message.sequence, True
        if has_placed:
            return True
        found, following = await self._search(last.subject, at)
        if found is not None and found.offset is not None:
            self._put(place, found.offset, found.data)
            self._sequence = found.sequence
            return True
        return self._name_hole(place, at, last.offset or 0 if following is None else following)

    async def _following(self, last: Stored) -> "list[Stored] | list[Stored | None]":
        before = self._sequence
        if before is None or before >= last.sequence:
            return []
        if before == last.sequence - 1:
            return [last]
        count = min(_BATCH, max(1, _AHEAD_BYTES // max(1, len(last.data))), last.sequence - before)
        numbers = range(before + 1, before + 1 + count)
        return await asyncio.gather(*(get(self._client, self._stream, seq=number) for number in numbers))

    async def _search(self, subject: str, offset: int) -> tuple[Stored | None, int | None]:
        """Return the message with the byte at an offset, and the offset of the next message if there is none.

        Later messages have later bytes."""
        last, _ = await last_range(self._client, self._stream, subject)
        low, high = 1, 0 if last is None else last.sequence
        best = following = None
        while low <= high:
            middle = (low + high) // 2
            found = await get(self._client, self._stream, subject, middle)
            while found is not None and found.offset is None:
                found = await get(self._client, self._stream, subject, found.sequence + 1)
            if found is not None and found.offset is not None and found.offset <= offset:
                best, low = found, found.sequence + 1
            else:
                following = following if found is None else found.offset
                high = middle - 1
        if best is not None and best.offset is not None and best.offset + len(best.data) > offset:
            return best, following
        return None, following

    def _put(self, place: int, offset: int, data: bytes) -> int:
        """Place a range in the buffer; return the buffer's end."""
        with self._lock:
            end = self._start + len(self._data)
            if place != self._place or offset > end or offset + len(data) <= self._start:
                return end
            begin = max(offset, self._start)
            data = data[begin - offset :]
            there = self._data[begin - self._start :]
            if there[: len(data)] == data[: len(there)]:
                self._data += data[len(there) :]
            else:
                # Another broker has replaced the end of a closed file.
                self._data[begin - self._start :] = data
            return self._start + len(self._data)

    def _name_hole(self, place: int, at: int, end: int) -> bool:
        """Declare bytes lost that the stream lacks; return whether that is certain."""
        # A leader elected just now may lack the newest messages for a moment.
        if self._doubted != at:
            self._doubted, self._doubted_at = at, time.monotonic()
        if time.monotonic() - self._doubted_at < _STORED_SECONDS:
            return False
        with self._lock:
            if place == self._place:
                again = (
                    f"'offloop server remove {self._run} --stream {self._connection.address}', then 'offloop server "
                    f"bridge {self._run}' on its host, copies all of it again"
                )
                self.hole = Hole(end, f"the stream {self._stream} has lost them; {again}")
        return True
