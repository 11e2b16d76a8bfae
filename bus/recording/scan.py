"""A recording by the heads of its records, without decompressing it: for a writer that continues it, its bridge, and
for readers that begin within it."""

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

import mcap.records

from offloop.bus.errors import ProtocolError
from offloop.bus.protocol.frames import END, decode_event, parse_topic
from offloop.bus.recording import records
from offloop.bus.recording.reader import FileSource
from offloop.bus.recording.records import CheckRecord, Chunk, ChunkHead, DamageError, Position

_FRONT = 64
_BLOCK = 1 << 20


class RecordHead(NamedTuple):
    """A record whose length is that of what it holds; a check record is intact."""

    offset: int
    opcode: int
    end: int
    front: bytes
    """Its first bytes."""
    check: CheckRecord | None = None


_Read: TypeAlias = Callable[[int, int], bytes]
"""Gives the bytes at an offset, at most so many."""


def walk(read: _Read, size: int, offset: int = len(records.MAGIC)) -> Iterator[RecordHead]:
    """The records of a file of that size from one on that begins at ``offset``, up to the end of the data or of what is
    whole. Behind damage comes the next check record, whatever has become of its opcode and length."""
    opcode = records.OP_HEADER
    while opcode != records.OP_DATA_END:
        try:
            head = _head_at(read, offset, size)
        except DamageError:
            found = next(_check_records_from(read, offset), None)
            if found is None:
                return
            head = found
        yield head
        offset, opcode = head.end, head.opcode


def next_check_record(recording: Path, offset: int) -> RecordHead | None:
    """The first check record of a recording behind ``offset``, where a part begins; ``None`` where there is none.

    Raises:
        RecordingError: the recording cannot be read.
    """
    with contextlib.closing(FileSource(recording)) as file:
        return next((head for head in walk(file.read_at, file.size, offset) if head.check), None)


_WITHIN = (records.OP_HEADER, records.OP_METADATA)


def _head_at(read: _Read, offset: int, size: int) -> RecordHead:
    front = read(offset, _FRONT)
    if len(front) < records.HEAD.size:
        raise DamageError("the file ends")
    opcode, length = records.HEAD.unpack_from(front)
    end: int = offset + records.HEAD.size + length
    if length > records.MAX_RECORD or end > size:
        raise DamageError("the file ends within a record")
    check = None
    if opcode == records.OP_DATA_END:
        if length != 4:
            raise DamageError("the end of the data has not the length that it has")
    elif opcode == records.OP_CHUNK:
        if records.CHUNK_FRONT + ChunkHead.decode(front).data_size != end - offset:
            raise DamageError("a chunk has not the length that it claims")
    elif opcode == records.OP_MESSAGE_INDEX:
        records.read_message_index(front)
    elif opcode == records.OP_CHECK:
        check = records.read_check_record(read(offset, end - offset))
    elif opcode not in _WITHIN:
        raise DamageError("it is not a record of a recording")
    return RecordHead(offset, opcode, end, front, check)


def _check_records_from(read: _Read, offset: int) -> Iterator[RecordHead]:
    for sign, begin in records.find_signs(read, offset):
        if sign == records.CHECK_SIGN:
            with contextlib.suppress(DamageError):
                front = read(begin, records.CHECK_FRONT)
                size = records.CHECK_FRONT + CheckRecord.payload_size(front)
                check = CheckRecord.decode(read(begin, size))
                yield RecordHead(begin, records.OP_CHECK, begin + size, front, check)


class ScannedChunk(NamedTuple):
    """One chunk for the summary."""

    entry: mcap.records.ChunkIndex
    counts: dict[int, int]
    """Messages of each channel."""


class Scan:
    """What :func:`scan` finds; everything but ``end`` and what follows it here is as in :class:`CheckRecord`."""

    def __init__(self) -> None:
        self.metadata: dict[str, str] = {}
        self.topics: dict[int, str] = {}
        self.new_topics: dict[int, str] = {}
        """Those that no check record names."""
        self.positions: dict[int, Position] = {}
        self.chunks: list[ScannedChunk] = []
        self.part = 0
        """Offset behind the last check record."""
        self.before = self.total = 0
        self.end = 0
        """Offset behind the last whole record, where writing can continue."""
        self.checksum = 0
        """CRC-32 of the bytes between the last check record and there."""
        self.indexes = b""
        """Message indexes that the last chunk lacks: they belong at ``end``."""


class _Found(NamedTuple):
    """A chunk that no check record has confirmed yet."""

    offset: int
    head: ChunkHead
    indexes: dict[int, tuple[int, int]]
    """Of each channel, the offset of its message index and the number of messages."""

    @property
    def end(self) -> int:
        return self.offset + records.CHUNK_FRONT + self.head.data_size

    def scanned(self) -> ScannedChunk:
        offsets = {channel: offset for channel, (offset, _) in self.indexes.items()}
        counts = {channel: count for channel, (_, count) in self.indexes.items()}
        length = sum(records.INDEX_FRONT + 16 * count for count in counts.values())
        return ScannedChunk(records.chunk_index(self.head, self.offset, offsets, length), counts)


def scan(descriptor: int) -> Scan:
    """Walks over the heads of a recording's records. Chunks in front of a check record are taken as it says;
    those behind the last one are decompressed, and kept when they are good. Damage in between costs its chunk."""
    return _Scanner(descriptor).result


class _Scanner:
    def __init__(self, descriptor: int) -> None:
        self._read: _Read = lambda offset, size: os.pread(descriptor, size, offset)
        self._pending: list[_Found] = []
        self.result = Scan()
        self.result.end = len(records.MAGIC)
        for head in walk(self._read, os.fstat(descriptor).st_size):
            if head.offset > self.result.end:
                self._pending.clear()
            if head.opcode != records.OP_DATA_END:
                self._take(head)
                self.result.end = head.end
        self._take_tail()

    def _take(self, head: RecordHead) -> None:
        if head.check is not None:
            self._take_check_record(head.check, head.end)
        elif head.opcode == records.OP_CHUNK:
            self._pending.append(_Found(head.offset, ChunkHead.decode(head.front), {}))
        elif head.opcode == records.OP_MESSAGE_INDEX and self._pending:
            channel, count = records.read_message_index(head.front)
            self._pending[-1].indexes[channel] = (head.offset, count)
        elif head.opcode == records.OP_METADATA:
            with contextlib.suppress(DamageError):
                content = self._read(head.offset, head.end - head.offset)[records.HEAD.size :]
                name, values = records.read_metadata(content)
                if name == records.PROFILE:
                    self.result.metadata = values

    def _take_check_record(self, check: CheckRecord, end: int) -> None:
        found = self.result
        found.chunks += [chunk.scanned() for chunk in self._pending]
        self._pending.clear()
        found.metadata = check.metadata
        found.topics.update(check.topics)
        found.positions = check.positions
        found.before = found.total = check.total
        found.part = end

    def _take_tail(self) -> None:
        """Checks what follows the last check record."""
        found, pending = self.result, self._pending
        for number, chunk in enumerate(pending):
            try:
                indexes = self._take_messages(Chunk.decode(self._read(chunk.offset, chunk.end - chunk.offset)))
            except DamageError:
                found.end = chunk.offset
                break
            if set(indexes) != set(chunk.indexes) and number == len(pending) - 1:
                found.end = chunk.end
                found.indexes, offsets = records.encode_message_indexes(indexes.items(), chunk.end)
                counts = {channel: len(entries) // 2 for channel, entries in indexes.items()}
                index = records.chunk_index(chunk.head, chunk.offset, offsets, len(found.indexes))
                found.chunks.append(ScannedChunk(index, counts))
            else:
                found.chunks.append(chunk.scanned())
        found.chunks = [chunk for chunk in found.chunks if self._knows_topics(chunk)]
        offset = found.part
        # A file that is shorter than what every recording begins with has no block there.
        while block := self._read(offset, min(_BLOCK, found.end - offset)):
            found.checksum = zlib.crc32(block, found.checksum)
            offset += len(block)

    def _knows_topics(self, chunk: ScannedChunk) -> bool:
        """Whether all topics of a chunk are known; looked up in it when the check record that named them is damaged."""
        found, entry = self.result, chunk.entry
        if chunk.counts.keys() <= found.topics.keys():
            return True
        try:
            self._take_channels(Chunk.decode(self._read(entry.chunk_start_offset, entry.chunk_length)))
        except DamageError:
            return False
        return chunk.counts.keys() <= found.topics.keys()

    def _take_channels(self, chunk: Chunk) -> None:
        found, data = self.result, chunk.data
        for channel, _, content, end in records.read_messages(chunk):
            if channel < 0:
                identity, topic = records.read_channel(data[content:end])
                if identity not in found.topics:
                    found.topics[identity] = found.new_topics[identity] = topic

    def _take_messages(self, chunk: Chunk) -> dict[int, list[int]]:
        """Counts the messages of a chunk that no check record counts; returns its message indexes."""
        found, data = self.result, chunk.data
        indexes: dict[int, list[int]] = {}
        self._take_channels(chunk)
        for channel, begin, content, end in records.read_messages(chunk):
            if channel < 0:
                continue
            indexes.setdefault(channel, []).extend((records.message_time(data, begin), begin))
            found.total += 1
            self._take_position(found.topics.get(channel, ""), data[content:end])
        return indexes

    def _take_position(self, topic: str, body: bytes) -> None:
        try:
            parsed, event = parse_topic(topic.encode()), decode_event(body)
        except ProtocolError:
            return  # not of this version: it has no position
        ended = parsed.name == END
        self.result.positions[parsed.rank] = Position(event.seq, event.base_seq, event.time, ended)
