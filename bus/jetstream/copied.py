"""A recording as its copy in JetStream has it."""

import bisect
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from bus.errors import RecordingError
from bus.jetstream import names

if TYPE_CHECKING:
    from nats.js.client import JetStreamContext

_FETCHED = 64
_FETCH_SECONDS = 2.0
_KEPT_BYTES = 64 << 20


class _Part(NamedTuple):
    """A message, and which bytes of the recording it holds."""

    offset: int
    end: int
    sequence: int


class CopiedRecording:
    """The recording of one host in a stream, read from anywhere in it. Messages are trusted for what they say of their
    place, never for their numbers: what servers had forgotten comes again under others."""

    def __init__(self, jetstream: "JetStreamContext", stream: str, subject: str) -> None:
        self._jetstream = jetstream
        self._stream = stream
        self._subject = subject
        self._parts: list[_Part] = []
        self._cache: OrderedDict[int, bytes] = OrderedDict()
        self._cached = 0
        self._consumer: Any = None
        self.end = 0
        """Bytes that are known to be in the stream."""
        self.hole: tuple[int, int] | None = None
        """The first bytes that the stream lacks, before others that it has."""

    async def look(self) -> int:
        """Looks up how far the copy goes; returns :attr:`end`."""
        from nats.js.errors import NotFoundError

        try:
            message = await self._jetstream.get_last_msg(self._stream, self._subject)
        except NotFoundError:
            self.end = 0
            return 0
        headers = message.headers or {}
        with suppress(KeyError, ValueError):
            self.end = int(headers[names.OFFSET]) + len(message.data or b"")
        return self.end

    def tell(self, end: int) -> None:
        """Takes note that the copy goes so far."""
        self.end = max(self.end, end)

    async def read(self, offset: int, size: int) -> bytes:
        """Bytes of the recording from there on, at most so many; none where the copy ends.

        Raises:
            RecordingError: the stream lacks them.
        """
        while offset >= self._known:
            if self._known >= self.end:
                return b""
            await self._fetch()
            if self.hole is not None:
                first, end = self.hole
                raise RecordingError(
                    f"the stream {self._stream} lacks bytes {first:,} to {end:,} of the recording, which its host has"
                )
        place = bisect.bisect_right(self._parts, offset, key=lambda part: part.offset) - 1
        part = self._parts[place]
        data = await self._data(part)
        return data[offset - part.offset :][:size]

    @property
    def _known(self) -> int:
        return self._parts[-1].end if self._parts else 0

    async def _fetch(self) -> None:
        """Fetches the next messages."""
        from nats.errors import TimeoutError as NatsTimeoutError
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
        from nats.js.errors import APIError

        if self._consumer is None:
            first = self._parts[-1].sequence + 1 if self._parts else 1
            config = ConsumerConfig(
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=first,
                ack_policy=AckPolicy.NONE,
                inactive_threshold=60.0,
                mem_storage=True,
                num_replicas=1,
            )
            self._consumer = await self._jetstream.pull_subscribe(self._subject, stream=self._stream, config=config)
        try:
            messages = await self._consumer.fetch(_FETCHED, timeout=_FETCH_SECONDS)
        except (NatsTimeoutError, APIError):
            # Servers that were away may have forgotten it, and a copy that was forgotten may have become shorter.
            await self._forget_consumer()
            await self.look()
            return
        for message in messages:
            self._take(message.metadata.sequence.stream, message.headers or {}, message.data)

    async def _forget_consumer(self) -> None:
        consumer, self._consumer = self._consumer, None
        with suppress(Exception):
            await consumer.unsubscribe()

    def _take(self, sequence: int, headers: dict[str, str], data: bytes) -> None:
        try:
            offset = int(headers[names.OFFSET])
        except (KeyError, ValueError):
            return
        if offset > self._known:
            self.hole = (self._known, offset)
            return
        # The end of a closed file gives way to what another broker wrote in its place.
        while self._parts and self._parts[-1].offset >= offset:
            self._drop(self._parts.pop())
        if self._parts and self._parts[-1].end > offset:
            self._parts[-1] = self._parts[-1]._replace(end=offset)
        if data:
            self._parts.append(_Part(offset, offset + len(data), sequence))
            self._keep(sequence, data)
            self.end = max(self.end, offset + len(data))

    def _drop(self, part: _Part) -> None:
        data = self._cache.pop(part.sequence, None)
        self._cached -= len(data or b"")

    def _keep(self, sequence: int, data: bytes) -> None:
        self._cache[sequence] = data
        self._cached += len(data)
        while self._cached > _KEPT_BYTES and len(self._cache) > 1:
            _, old = self._cache.popitem(last=False)
            self._cached -= len(old)

    async def _data(self, part: _Part) -> bytes:
        data = self._cache.get(part.sequence)
        if data is None:
            message = await self._jetstream.get_msg(self._stream, part.sequence)
            data = message.data or b""
            self._keep(part.sequence, data)
        return data[: part.end - part.offset]

    async def close(self) -> None:
        """Ends what the servers keep for it."""
        if self._consumer is not None:
            await self._forget_consumer()
