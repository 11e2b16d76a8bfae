"""What a recording holds, found without decompressing it: for a writer that continues it."""

import contextlib
import os
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import mcap.records

from offloop.bus.errors import ProtocolError
from offloop.bus.protocol.frames import END, decode_event, parse_topic
from offloop.bus.recording import records
from offloop.bus.recording.records import CheckRecord, Chunk, ChunkHead, DamageError, Position

_FRONT = 64
_BLOCK = 1 << 20


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
        self._descriptor = descriptor
        self._file_size = os.fstat(descriptor).st_size
        self._pending: list[_Found] = []
        self.result = Scan()
        offset = len(records.MAGIC)
        self.result.end = offset
        while True:
            try:
                step = self._step(offset)
            except DamageError:
                following = next(self._check_records_from(offset), None)
                if following is None:
                    break
                begin, check, end = following
                if begin > offset:
                    self._pending.clear()
                # Only its head may be damaged: where that says it ends is not looked at.
                self._take_check_record(check, end)
                offset = self.result.end = end
                continue
            if step is None:
                break
            offset = self.result.end = step
        self._take_tail()

    def _read(self, offset: int, size: int) -> bytes:
        return os.pread(self._descriptor, max(0, min(size, self._file_size - offset)), offset)

    def _step(self, offset: int) -> int | None:
        """Takes the record at ``offset``; returns where the next one begins, or ``None`` at the end of the data.

        Raises:
            DamageError: there is none, or not a whole one.
        """
        front = self._read(offset, _FRONT)
        if len(front) < records.HEAD.size:
            raise DamageError("the file ends")
        opcode, length = records.HEAD.unpack_from(front)
        end: int = offset + records.HEAD.size + length
        if length > records.MAX_RECORD or end > self._file_size:
            raise DamageError("the file ends within a record")
        if opcode == records.OP_DATA_END:
            if length != 4:
                raise DamageError("the end of the data has not the length that it has")
            return None
        if opcode == records.OP_CHUNK:
            found = _Found(offset, ChunkHead.decode(front), {})
            if found.end != end:
                raise DamageError("a chunk has not the length that it claims")
            self._pending.append(found)
        elif opcode == records.OP_MESSAGE_INDEX:
            channel, count = records.read_message_index(front)
            if self._pending:
                self._pending[-1].indexes[channel] = (offset, count)
        elif opcode == records.OP_CHECK:
            self._take_check_record(records.read_check_record(self._read(offset, end - offset)), end)
        elif opcode == records.OP_METADATA:
            name, values = records.read_metadata(self._read(offset, end - offset)[records.HEAD.size :])
            if name == records.PROFILE:
                self.result.metadata = values
        elif opcode != records.OP_HEADER:
            raise DamageError("it is not a record of a recording")
        return end

    def _take_check_record(self, check: CheckRecord, end: int) -> None:
        found = self.result
        found.chunks += [chunk.scanned() for chunk in self._pending]
        self._pending.clear()
        found.metadata = check.metadata
        found.topics.update(check.topics)
        found.positions = check.positions
        found.before = found.total = check.total
        found.part = end

    def _check_records_from(self, offset: int) -> Iterator[tuple[int, CheckRecord, int]]:
        """Whole check records that begin at ``offset`` or behind it, whatever their opcode and length are:
        where each begins, the check record, and where it ends."""
        for sign, begin in records.find_signs(self._read, offset):
            if sign == records.CHECK_SIGN:
                with contextlib.suppress(DamageError):
                    size = records.CHECK_FRONT + CheckRecord.payload_size(self._read(begin, records.CHECK_FRONT))
                    yield begin, CheckRecord.decode(self._read(begin, size)), begin + size

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
