"""What JetStream has of a run: a recording, and the windows of its hosts."""

import asyncio
import bisect
import itertools
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from offloop.bus.errors import RecordingError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import passing_errors, pulled

if TYPE_CHECKING:
    from nats.js.api import RawStreamMsg
    from nats.js.client import JetStreamContext

_FETCHED = 64
_FETCH_SECONDS = 2.0
_MOST_OTHERS = 1000
"""How many messages back a range is looked for."""
_KEPT_BYTES = 64 << 20
_KEPT_WINDOWS = 32 << 20
_AGAIN_SECONDS = 1.0
_SEARCH_SECONDS = 2.0
"""How long what the leader lacks is not looked for again."""


class HoleError(RecordingError):
    """The stream lacks bytes ``begin`` to ``end`` of a recording, and has later ones."""

    def __init__(self, stream: str, begin: int, end: int) -> None:
        super().__init__(f"the stream {stream} lacks bytes {begin:,} to {end:,} of the recording")
        self.stream = stream
        self.end = end


class _Part(NamedTuple):
    """A message, and which bytes of the recording it holds."""

    offset: int
    end: int
    sequence: int


class _Parts:
    """Which messages hold which bytes of a recording, in order: a day of a live run has half a million of them."""

    def __init__(self) -> None:
        self._offsets, self._ends, self._sequences = array("Q"), array("Q"), array("Q")

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, place: int) -> _Part:
        return _Part(self._offsets[place], self._ends[place], self._sequences[place])

    def place(self, offset: int) -> int:
        """Which is the last that begins at an offset or before; -1 for none."""
        return bisect.bisect_right(self._offsets, offset) - 1

    def insert(self, place: int, part: _Part) -> None:
        """Puts one in front of another one, or of the end."""
        for column, value in zip((self._offsets, self._ends, self._sequences), part, strict=True):
            column.insert(place, value)

    def shorten_last(self, end: int) -> None:
        """Has the last one end there."""
        self._ends[-1] = end

    def pop(self) -> _Part:
        """Takes the last one out."""
        return _Part(self._offsets.pop(), self._ends.pop(), self._sequences.pop())


class CopiedRecording:
    """The recording of one host in a stream, read from anywhere in it. Messages are trusted for what they say of their
    place, never for their numbers: what servers had forgotten comes again under others."""

    def __init__(self, jetstream: "JetStreamContext", stream: str, subject: str) -> None:
        self._jetstream = jetstream
        self._stream = stream
        self._subject = subject
        # In order, no two with the same bytes; where servers have lost something there are holes between them.
        self._parts = _Parts()
        self._cache: OrderedDict[int, bytes] = OrderedDict()
        self._cached = 0
        self._consumer: Any = None
        self._reading = asyncio.Lock()
        self._searched: dict[int, float] = {}
        self.end = 0
        """Bytes that are known to be in the stream."""

    async def look(self) -> int:
        """Looks up how far the copy goes; returns :attr:`end`."""
        from nats.js.errors import NotFoundError

        try:
            message, _ = await last_range(self._jetstream, self._stream, self._subject)
        except NotFoundError:
            self.end = 0
            return 0
        offset = offset_of(message.headers)
        if offset is not None:
            self.end = offset + len(message.data or b"")
        return self.end

    def tell(self, end: int) -> None:
        """Takes note that the copy goes so far."""
        self.end = max(self.end, end)

    async def read(self, offset: int, size: int) -> bytes:
        """Bytes of the recording from there on, at most so many; none where the copy ends.

        Raises:
            HoleError: the stream lacks them, and has later ones.
        """
        async with self._reading:
            while offset >= self._known:
                if self._known >= self.end:
                    return b""
                await self._fetch()
            place = self._parts.place(offset)
            if place < 0 or self._parts[place].end <= offset:
                await self._fill(offset)
                place = self._parts.place(offset)
            if place < 0 or self._parts[place].end <= offset:
                raise HoleError(self._stream, offset, self._parts[place + 1].offset)
            return await self._joined(place, offset, size)

    async def _joined(self, place: int, offset: int, size: int) -> bytes:
        """What a part and those behind it hold: the messages of a run that was copied live are small."""
        found = bytearray()
        for number in range(place, len(self._parts)):
            part = self._parts[number]
            at = offset + len(found)
            if part.offset > at or len(found) >= size:
                break
            try:
                data = await self._data(part)
            except HoleError:
                if not found:
                    raise
                break
            found += data[at - part.offset :][: size - len(found)]
        return bytes(found)

    @property
    def _known(self) -> int:
        return self._parts[-1].end if self._parts else 0

    async def _fetch(self) -> None:
        """Fetches the next messages."""
        from nats.errors import TimeoutError as NatsTimeoutError
        from nats.js.errors import APIError

        if self._consumer is None:
            after = self._parts[-1].sequence if self._parts else 0
            self._consumer = await pulled(self._jetstream, self._stream, self._subject, after)
        try:
            messages = await self._consumer.fetch(_FETCHED, timeout=_FETCH_SECONDS)
        except (NatsTimeoutError, APIError):
            # Servers that were away may have forgotten it, its server may have stayed behind the others, and a copy
            # that was forgotten may have become shorter, with other numbers.
            await self._forget_consumer()
            if self._known < await self.look():
                await self._fill(self._known)
            return
        for message in messages:
            self._take(message.metadata.sequence.stream, message.headers, message.data)

    async def _forget_consumer(self) -> None:
        consumer, self._consumer = self._consumer, None
        with suppress(Exception):
            await consumer.unsubscribe()

    def _take(self, sequence: int, headers: dict[str, str] | None, data: bytes) -> None:
        """Takes a message as it comes."""
        offset = offset_of(headers)
        if offset is None:
            return
        # The end of a closed file gives way to what another broker wrote in its place.
        while self._parts and self._parts[-1].offset >= offset:
            self._drop(self._parts.pop())
        if self._parts and self._parts[-1].end > offset:
            self._parts.shorten_last(offset)
        if data:
            self._parts.insert(len(self._parts), _Part(offset, offset + len(data), sequence))
            self._keep(offset, data)
            self.end = max(self.end, offset + len(data))

    def _drop(self, part: _Part) -> None:
        data = self._cache.pop(part.offset, None)
        self._cached -= len(data or b"")

    def _keep(self, offset: int, data: bytes) -> None:
        # Not by its number: where servers differ, one number is that of different messages.
        self._cached += len(data) - len(self._cache.get(offset, b""))
        self._cache[offset] = data
        while self._cached > _KEPT_BYTES and len(self._cache) > 1:
            _, old = self._cache.popitem(last=False)
            self._cached -= len(old)

    async def _data(self, part: _Part) -> bytes:
        data = self._cache.get(part.offset)
        if data is None:
            found = await self._message(part.sequence, part.offset)
            if found is None or found[0].end < part.end:
                found = await self._search(part.offset)
            if found is None:
                raise HoleError(self._stream, part.offset, part.end)
            other, data = found
            data = data[part.offset - other.offset :]
            self._keep(part.offset, data)
        return data[: part.end - part.offset]

    # -- what the leader of the stream's servers has ------------------------------------------------------------------

    async def _fill(self, offset: int) -> None:
        """Looks with the leader for what a server that stayed behind did not give."""
        now = time.monotonic()
        if now - self._searched.get(offset, -_SEARCH_SECONDS) < _SEARCH_SECONDS:
            return
        found = await self._search(offset)
        for _ in range(_FETCHED):
            if found is None:
                self._searched = {offset: now}
                return
            part, data = found
            place = self._parts.place(offset)
            is_last = place + 1 == len(self._parts)
            limit = part.end if is_last else self._parts[place + 1].offset
            # A part of its own, from here to what is known.
            data = data[offset - part.offset : limit - part.offset]
            self._parts.insert(place + 1, _Part(offset, offset + len(data), part.sequence))
            self._keep(offset, data)
            offset += len(data)
            if offset >= limit and not is_last:
                return
            found = await self._message(part.sequence + 1, offset, following=True)

    async def _message(self, sequence: int, offset: int, following: bool = False) -> tuple[_Part, bytes] | None:
        """The message of that number, or that comes next, if it begins at an offset."""
        found = await self._get(sequence, following)
        return found if found is not None and found[0].offset == offset else None

    async def _get(self, sequence: int, following: bool) -> tuple[_Part, bytes] | None:
        from nats.js.errors import NotFoundError

        try:
            if following:
                message = await self._jetstream.get_msg(self._stream, sequence, subject=self._subject, next=True)
            else:
                message = await self._jetstream.get_msg(self._stream, sequence)
        except NotFoundError:
            return None
        offset, data = offset_of(message.headers), message.data or b""
        if offset is None or message.subject != self._subject:
            return None
        return _Part(offset, offset + len(data), message.seq or sequence), data

    async def _search(self, offset: int) -> tuple[_Part, bytes] | None:
        """The message with the byte at an offset: later messages have later bytes."""
        state = (await self._jetstream.stream_info(self._stream)).state
        low, high = state.first_seq, state.last_seq
        best = None
        while low <= high:
            middle = (low + high) // 2
            found = await self._get(middle, following=True)
            if found is not None and found[0].offset <= offset:
                best, low = found, found[0].sequence + 1
            else:
                high = middle - 1
        return best if best is not None and best[0].end > offset else None

    async def close(self) -> None:
        """Ends what the servers keep for it."""
        if self._consumer is not None:
            await self._forget_consumer()


class CopiedRun:
    """What a stream has of a run; what was read stays at hand until it is closed."""

    def __init__(self, jetstream: "JetStreamContext", run: str) -> None:
        self._jetstream = jetstream
        self._run = run
        self._recordings: dict[int, CopiedRecording] = {}
        self._windows: CopiedWindows | None = None
        self._following: asyncio.Task[None] | None = None
        self.used = time.monotonic()
        """When something of it was asked for last."""

    async def recording(self, attempt: int) -> "CopiedRecording":
        """The recording of an attempt.

        Raises:
            RecordingError: the stream has none of it.
        """
        recording = self._recordings.get(attempt)
        if recording is None:
            stream = names.stream_of(self._run)
            subject = await self._subject(stream, names.recording_subject(self._run, attempt, "*"))
            recording = self._recordings[attempt] = CopiedRecording(self._jetstream, stream, subject)
            await recording.look()
        return recording

    async def _subject(self, stream: str, pattern: str) -> str:
        """The subject of a recording in a stream; the servers alone know which host it is of."""
        from nats.js.errors import NotFoundError

        try:
            found = (await self._jetstream.stream_info(stream, subjects_filter=pattern)).state.subjects
        except NotFoundError:
            found = None
        if not found:
            raise RecordingError(f"the stream {stream} has no recording of that attempt")
        return min(found)

    @property
    def windows(self) -> "CopiedWindows":
        """The windows of its hosts, which are taken as they come from the first time on."""
        if self._windows is None:
            self._windows = CopiedWindows(self._jetstream, self._run)
            self._following = asyncio.create_task(self._windows.follow())
        return self._windows

    def tell(self, ends: Mapping[int, int]) -> None:
        """Takes note of how far the copies of attempts go."""
        for attempt, recording in self._recordings.items():
            recording.tell(ends.get(attempt, 0))

    async def close(self) -> None:
        """Ends what the servers keep for it."""
        if self._following is not None:
            self._following.cancel()
        for recording in self._recordings.values():
            await recording.close()


async def last_range(jetstream: "JetStreamContext", stream: str, subject: str) -> tuple["RawStreamMsg", int]:
    """The last message of a subject that is a range of a file, and the number of the last message of any kind: to a
    request a reader can have the servers answer there.

    Raises:
        nats.js.errors.NotFoundError: there is none.
    """
    from nats.js.errors import NotFoundError

    last = found = await jetstream.get_last_msg(stream, subject)
    number = last.seq or 0
    for before in range(number - 1, max(0, number - _MOST_OTHERS), -1):
        if offset_of(found.headers) is not None:
            break
        with suppress(NotFoundError):
            message = await jetstream.get_msg(stream, before)
            found = message if message.subject == subject else found
    return found, number


def offset_of(headers: dict[str, str] | None) -> int | None:
    """Where the range in a message begins; ``None`` where it does not say."""
    try:
        offset = int((headers or {})[names.OFFSET])
    except (KeyError, ValueError):
        return None
    return offset if offset >= 0 else None


class CopiedWindows:
    """The windows of all hosts of a run as they come into a stream: the last one of each host first."""

    def __init__(self, jetstream: "JetStreamContext", run: str) -> None:
        self._jetstream = jetstream
        self._stream, self._subject = names.stream_of(run), names.all_windows(run)
        self._kept: deque[tuple[int, bytes]] = deque()
        self._size = 0
        # Of each subject how far it is known: what servers had forgotten comes again.
        self._known: dict[str, int] = {}
        self.count = 0
        """How many have come."""

    def since(self, count: int, attempt: int, most: int) -> tuple[list[bytes], int]:
        """The windows of an attempt behind the first ``count`` that came, as far as they are kept and until they are
        ``most`` bytes; and how many have been passed then."""
        found: list[bytes] = []
        begin = self.count - len(self._kept)
        # Who has counted more read from one that was closed: all that is kept is new then.
        place = max(count, begin) if count <= self.count else begin
        for number, data in itertools.islice(self._kept, place - begin, None):
            if most <= 0:
                break
            place += 1
            if number == attempt:
                found.append(data)
                most -= len(data)
        return found, place

    async def follow(self) -> None:
        """Takes what comes, until it is cancelled."""
        while True:
            with suppress(*passing_errors()):
                await self._follow()
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _follow(self) -> None:
        from nats.errors import TimeoutError as NatsTimeoutError

        consumer = await pulled(self._jetstream, self._stream, self._subject, None)
        try:
            while True:
                try:
                    messages = await consumer.fetch(_FETCHED, timeout=_FETCH_SECONDS)
                except NatsTimeoutError:
                    # Nothing has come; or the servers have forgotten the consumer.
                    await consumer.consumer_info()
                    continue
                for message in messages:
                    self._take(message.subject, message.headers or {}, message.data)
        finally:
            with suppress(Exception):
                await consumer.unsubscribe()

    def _take(self, subject: str, headers: dict[str, str], data: bytes) -> None:
        try:
            attempt, offset = int(subject.split(".")[-2]), int(headers[names.OFFSET])
        except (KeyError, ValueError, IndexError):
            return
        if offset < self._known.get(subject, 0):
            return
        self._known[subject] = offset + len(data)
        self._kept.append((attempt, data))
        self._size += len(data)
        self.count += 1
        while self._size > _KEPT_WINDOWS and len(self._kept) > 1:
            self._size -= len(self._kept.popleft()[1])
