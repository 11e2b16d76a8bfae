"""The records that a recording is made of, as bytes: what the writer and the reader of recordings share. The format is
MCAP (https://mcap.dev/spec) with one record of our own, the check record; ``docs/protocol.md`` has the details."""

import functools
import io
import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import mcap.records
import msgpack
import zstandard
from mcap.data_stream import ReadDataStream, RecordBuilder
from mcap.exceptions import EndOfFile
from mcap.opcode import Opcode

PROFILE = "offloop"
FRONT_BYTES = 4096
BLOCK_BYTES = 1 << 20
MAGIC = b"\x89MCAP0\r\n"
MAX_RECORD = 32 * 1024 * 1024
"""Bytes of a record, in the file and decompressed: twice a frame, so that a chunk and its indexes fit."""
MAX_CHECK = 16 * 1024 * 1024
MAX_RANKS = MAX_TOPICS = 0xFFFF
MAX_STRINGS = 1 << 16
"""Bytes of a record of strings: a header, a channel, metadata."""
MAX_NAME = 1024
"""Bytes of a text: topics have at most 256."""
_MESSAGES_PER_BYTE = 4
"""Numbered messages take at least a byte each, however well they are compressed: more of them cannot be events."""

HEAD = struct.Struct("<BQ")
"""Opcode and length, in front of every record."""
MESSAGE = struct.Struct("<BQHIQQ")
"""The head of a message's record, then channel, sequence, log time and publish time; the data follow."""
_MESSAGE_FIELDS = MESSAGE.size - HEAD.size
_MESSAGE_BYTES = MESSAGE.size
_FRONT = HEAD.size + 2

_CHUNK = struct.Struct("<BQQQQI4s4sQ")
_CHUNK_FIELDS = _CHUNK.size - HEAD.size
_ZSTD = (b"\4\0\0\0", b"zstd")
_CHECK = struct.Struct("<BQ8sII")
CHECK_SIGN = b"\xf1offloop"
_CHECK_ELEMENTS = 7
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_INDEX = struct.Struct("<BQHI")

OP_HEADER, OP_FOOTER, OP_SCHEMA, OP_CHANNEL, OP_MESSAGE, OP_CHUNK, OP_MESSAGE_INDEX = 1, 2, 3, 4, 5, 6, 7
OP_ATTACHMENT, OP_METADATA, OP_DATA_END = 9, 12, 15
OP_CHECK = 0x80
OP_PADDING = 0x81

# Both stand at a fixed distance behind the beginning of their record, so a reader that has lost its way finds the next
# record by them, whatever has become of the record's opcode and length.
SIGNS = re.compile(b"|".join(re.escape(sign) for sign in (b"".join(_ZSTD), CHECK_SIGN)))
_SIGN_OFFSETS = {b"".join(_ZSTD): 37, CHECK_SIGN: HEAD.size}
SIGN_BYTES = 8


class _Zstandard(threading.local):
    """A decompressor for each thread: two threads in one crash the process."""

    def __init__(self) -> None:
        self.decompress = zstandard.ZstdDecompressor().decompress


_zstandard = _Zstandard()


class DamageError(Exception):
    """Something in a record that cannot be."""


class Position(NamedTuple):
    """How far the events of one rank have come."""

    seq: int
    base_seq: int
    time: int
    """Of the last event, in nanoseconds since 1970."""
    ended: bool
    """Whether the rank's ``$end`` is among them."""


def find_signs(
    read: Callable[[int, int], bytes],
    begin: int,
    end: int | None = None,
    skip: Callable[[int], int] = lambda offset: offset,
) -> Iterator[tuple[bytes, int]]:
    """The signs of check records and chunks, and where their records begin; ``read`` gives the bytes at an offset, at
    most so many, and ``skip`` the next offset at which there may be other bytes than zeros."""
    offset, most = begin, FRONT_BYTES
    while end is None or offset < end:
        size = most if end is None else min(most, end - offset)
        block = read(offset, size)
        for sign in SIGNS.finditer(block):
            start = offset + sign.start() - _SIGN_OFFSETS[sign[0]]
            if start >= begin:
                yield sign[0], start
        if len(block) < most:
            return
        most = min(2 * most, BLOCK_BYTES)
        # A sign may lie across the end of a block.
        offset = skip(offset + len(block) - SIGN_BYTES + 1)


# -- check records -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckRecord:
    """The check record behind each chunk: what is to be found before it, and how far the ranks have come.

    The bytes from the end of one to the beginning of the next are a *file part*: a chunk and its indexes, nothing, or
    the front of the file. The check record ends it."""

    start: int
    """Offset at which its part begins: that of the chunk, if there is one."""
    before: int
    """Messages in the file in front of the part."""
    total: int
    """Messages in the file, with those of the part."""
    checksum: int
    """CRC-32 of the part's bytes."""
    metadata: dict[str, str]
    """As in the metadata record at the front."""
    topics: dict[int, str]
    """Channels that are used for the first time in the part."""
    positions: dict[int, Position]
    """Of each rank, the position after the part."""

    def encode(self) -> bytes:
        """Its bytes."""
        positions = {rank: tuple(position) for rank, position in self.positions.items()}
        values = (self.start, self.before, self.total, self.checksum, self.metadata, self.topics, positions)
        payload: bytes = msgpack.packb(values)
        length = _CHECK.size - HEAD.size + len(payload)
        return _CHECK.pack(OP_CHECK, length, CHECK_SIGN, _payload_checksum(payload), len(payload)) + payload

    @classmethod
    def payload_size(cls, front: bytes) -> int:
        """How many bytes follow ``front``, the first :data:`CHECK_FRONT` bytes of a check record.

        Raises:
            DamageError: it is not a check record.
        """
        if len(front) < _CHECK.size:
            raise DamageError("it is too short for a check record")
        _, _, sign, _, size = _CHECK.unpack(front)
        if sign != CHECK_SIGN or size > MAX_CHECK:
            raise DamageError("it is not a check record")
        return int(size)

    @classmethod
    def decode(cls, record: bytes) -> "CheckRecord":
        """Reads a check record; its opcode and length are not looked at, so that damage there costs nothing.

        Raises:
            DamageError: it is not a check record, or its checksum does not hold.
        """
        size = cls.payload_size(record[: _CHECK.size])
        payload = record[_CHECK.size : _CHECK.size + size]
        if len(payload) < size or _CHECK.unpack_from(record)[3] != _payload_checksum(payload):
            raise DamageError("the check record's checksum does not hold")
        try:
            values = msgpack.unpackb(
                payload,
                strict_map_key=False,
                max_array_len=MAX_NAME,
                max_map_len=MAX_TOPICS,
                max_str_len=MAX_NAME,
                max_bin_len=0,
                max_ext_len=0,
                list_hook=_Counter(MAX_RANKS + _CHECK_ELEMENTS),
            )
            start, before, total, checksum, metadata, topics, positions = values[:_CHECK_ELEMENTS]
            if not all(type(number) is int for number in (start, before, total, checksum)):
                raise DamageError("the check record's numbers are not numbers")
            return cls(
                start,
                before,
                total,
                checksum,
                {str(key): str(value) for key, value in metadata.items()},
                {int(channel): str(topic) for channel, topic in topics.items()},
                {int(rank): Position(*position) for rank, position in positions.items()},
            )
        except (ValueError, TypeError, AttributeError, RecursionError, msgpack.UnpackException) as error:
            raise DamageError(f"the check record cannot be read ({error})") from None


CHECK_FRONT = _CHECK.size
"""Bytes of a check record in front of its payload."""


class _Counter:
    """Makes ``unpackb`` stop at too many lists: an empty one takes a byte in the file and 56 in memory."""

    def __init__(self, most: int) -> None:
        self._left = most

    def __call__(self, container: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError("too many lists")
        return container


def read_check_record(record: bytes) -> CheckRecord:
    """Reads a check record whose record has the length that it claims.

    Raises:
        DamageError: it is none, or is damaged.
    """
    if len(record) != CHECK_FRONT + CheckRecord.payload_size(record[:CHECK_FRONT]):
        raise DamageError("its length is not that of what it holds")
    return CheckRecord.decode(record)


def _payload_checksum(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_U32.pack(len(payload))))


# -- chunks -----------------------------------------------------------------------------------------------------------


class ChunkHead(NamedTuple):
    """What stands in front of a chunk's compressed messages."""

    start_time: int
    end_time: int
    size: int
    """Bytes, uncompressed."""
    checksum: int
    """CRC-32 of the uncompressed bytes; 0 when there is none."""
    data_size: int
    """Bytes, compressed."""

    @classmethod
    def decode(cls, front: bytes) -> "ChunkHead":
        """Reads the first :data:`CHUNK_FRONT` bytes of a chunk's record, but for its opcode and length.

        Raises:
            DamageError: it is not a chunk of ours.
        """
        if len(front) < _CHUNK.size:
            raise DamageError("it is too short for a chunk")
        _, _, start, end, size, checksum, *compression, data_size = _CHUNK.unpack_from(front)
        if tuple(compression) != _ZSTD:
            raise DamageError("it is not compressed with zstd, as the chunks of recordings are")
        if max(size, data_size) > MAX_RECORD:
            raise DamageError(f"a chunk claims more than {MAX_RECORD} bytes")
        return cls(start, end, size, checksum, data_size)


CHUNK_FRONT = _CHUNK.size
"""Bytes of a chunk's record in front of its compressed messages."""


class Chunk(NamedTuple):
    """A chunk whose bytes are known to be good."""

    head: ChunkHead
    data: bytes
    """Uncompressed: channels and messages."""

    @property
    def length(self) -> int:
        """Bytes of the whole record in the file."""
        return _CHUNK.size + self.head.data_size

    @classmethod
    def decode(cls, record: bytes) -> "Chunk":
        """Reads a chunk; its opcode and the record's length are not looked at, so that damage there costs nothing.

        Raises:
            DamageError: it is not a chunk, its checksum does not hold, or it claims to hold too much.
        """
        head = ChunkHead.decode(record)
        packed = memoryview(record)[_CHUNK.size : _CHUNK.size + head.data_size]
        if len(packed) < head.data_size:
            raise DamageError("it ends before its messages do")
        try:
            # The library takes what a frame claims for how much memory it needs.
            if zstandard.frame_content_size(packed) not in (head.size, -1):
                raise DamageError("its messages are not as long as it says")
            data = _zstandard.decompress(packed, max_output_size=head.size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise DamageError(f"its messages cannot be decompressed: {error}") from None
        if len(data) != head.size or (head.checksum and zlib.crc32(data) != head.checksum):
            raise DamageError("its checksum does not hold")
        return cls(head, data)


def encode_chunk(data: bytes | bytearray, packed: bytes, start_time: int, end_time: int) -> bytes:
    """A chunk's record: ``data`` are its channels and messages, ``packed`` the same compressed."""
    length = _CHUNK_FIELDS + len(packed)
    return (
        _CHUNK.pack(OP_CHUNK, length, start_time, end_time, len(data), zlib.crc32(data), *_ZSTD, len(packed)) + packed
    )


def read_messages(chunk: Chunk) -> Iterator[tuple[int, int, int, int]]:
    """Of each message in a chunk: its channel, the offset of its record, of its data, and of the end of both.

    A channel's record comes first, as channel -1.

    Raises:
        DamageError: a record is longer than the chunk, or there are more than so few compressed bytes can hold.
    """
    data, left = chunk.data, _MESSAGES_PER_BYTE * chunk.head.data_size
    unpack_head, unpack_channel, head_size = HEAD.unpack_from, _U16.unpack_from, HEAD.size
    offset, end = 0, len(data)
    # Opcode, length and channel of the last message: nearly always the next one's too.
    front, size, channel = b"", 0, 0
    while offset < end:
        if data[offset : offset + _FRONT] == front and offset + size <= end and left > 0:
            left -= 1
            offset += size
            yield channel, offset - size, offset - size + _MESSAGE_BYTES, offset
            continue
        if offset + head_size > end:
            raise DamageError("a chunk ends within a message")
        opcode, length = unpack_head(data, offset)
        begin = offset
        offset += head_size + length
        if offset > end:
            raise DamageError("a message is longer than its chunk")
        left -= 1
        if left < 0:
            raise DamageError(f"{chunk.head.data_size} compressed bytes hold too many messages to be numbered")
        if opcode == OP_MESSAGE:
            if length < _MESSAGE_FIELDS:
                raise DamageError("a message is too short")
            front, size, channel = (
                data[begin : begin + _FRONT],
                offset - begin,
                unpack_channel(data, begin + head_size)[0],
            )
            yield channel, begin, begin + _MESSAGE_BYTES, offset
        elif opcode == OP_CHANNEL:
            yield -1, begin, begin + head_size, offset


def message_time(data: bytes, offset: int) -> int:
    """The time of the message whose record begins at ``offset``."""
    return int(MESSAGE.unpack_from(data, offset)[4])


# -- channels, metadata, indexes --------------------------------------------------------------------------------------


def encode(record: mcap.records.McapRecord) -> bytes:
    """Any record of the library's."""
    builder = RecordBuilder()
    record.write(builder)
    return bytes(builder.end())


def channel_record(identity: int, topic: str) -> mcap.records.Channel:
    """The channel of a topic."""
    return mcap.records.Channel(id=identity, topic=topic, message_encoding="msgpack", metadata={}, schema_id=0)


def encode_message_indexes(indexes: Iterable[tuple[int, list[int]]], offset: int) -> tuple[bytes, dict[int, int]]:
    """The index records of a chunk, which begin in the file at ``offset``; ``indexes`` are of each channel time and
    offset of one message after the other. Also gives where each channel's begins, for the chunk's own index."""
    records, offsets, length = [], {}, 0
    for identity, entries in indexes:
        offsets[identity] = offset + length
        size = 8 * len(entries)
        records.append(_INDEX.pack(OP_MESSAGE_INDEX, 6 + size, identity, size))
        records.append(struct.pack(f"<{len(entries)}Q", *entries))
        length += _INDEX.size + size
    return b"".join(records), offsets


def chunk_index(
    head: ChunkHead, offset: int, index_offsets: dict[int, int], index_length: int
) -> mcap.records.ChunkIndex:
    """What the summary at the end of the file says of the chunk at ``offset``."""
    return mcap.records.ChunkIndex(
        chunk_length=CHUNK_FRONT + head.data_size,
        chunk_start_offset=offset,
        compression="zstd",
        compressed_size=head.data_size,
        message_end_time=head.end_time,
        message_index_length=index_length,
        message_index_offsets=index_offsets,
        message_start_time=head.start_time,
        uncompressed_size=head.size,
    )


def encode_footer(summary: bytes, summary_start: int, offsets_start: int) -> bytes:
    """The footer, with the checksum of the summary that begins at ``summary_start``."""
    front = struct.pack("<BQQQ", OP_FOOTER, 20, summary_start, offsets_start)
    return front + _U32.pack(zlib.crc32(front, zlib.crc32(summary)))


def read_message_index(front: bytes) -> tuple[int, int]:
    """Channel and number of messages of a message index, from the first :data:`INDEX_FRONT` bytes of its record.

    Raises:
        DamageError: it is none.
    """
    if len(front) < _INDEX.size:
        raise DamageError("it is too short for an index")
    _, length, identity, size = _INDEX.unpack_from(front)
    if length != 6 + size or size % 16:
        raise DamageError("an index has not the length that it claims")
    return identity, size // 16


INDEX_FRONT = _INDEX.size
"""Bytes of a message index in front of its entries."""


@functools.lru_cache(64)  # chunk after chunk has the same ones
def read_channel(content: bytes) -> tuple[int, str]:
    """Number and topic of a channel.

    Raises:
        DamageError: it is none.
    """
    channel = _decode(mcap.records.Channel, content)
    return channel.id, channel.topic


def read_metadata(content: bytes) -> tuple[str, dict[str, str]]:
    """Name and content of a metadata record.

    Raises:
        DamageError: it is none.
    """
    metadata = _decode(mcap.records.Metadata, content)
    return metadata.name, metadata.metadata


def check_header(content: bytes) -> None:
    """Raises :class:`DamageError` when it is not the header of a recording."""
    profile = _decode(mcap.records.Header, content).profile
    if profile != PROFILE:
        raise DamageError(f"its profile is {profile!r}")


def _decode(kind: Any, content: bytes) -> Any:
    """A record of one of the library's kinds."""
    if len(content) > MAX_STRINGS:
        raise DamageError(f"it has {len(content)} bytes, at most {MAX_STRINGS} are allowed")
    stream = ReadDataStream(io.BytesIO(content))
    try:
        record = kind.read(stream)
    except (EndOfFile, UnicodeDecodeError, struct.error):
        raise DamageError("its strings cannot be read") from None
    if stream.count != len(content):
        raise DamageError("a record has not the length that its content has")
    return record


def opcode_name(opcode: int) -> str:
    """What people call such a record."""
    if opcode == OP_CHECK:
        return "check record"
    try:
        return Opcode(opcode).name.lower().replace("_", " ")
    except ValueError:
        return "record"
