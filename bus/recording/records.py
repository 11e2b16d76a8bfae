"""The records that a recording is made of, as bytes: MCAP (https://mcap.dev/spec) with one record of our own, the check
record. ``docs/protocol.md`` has the details."""

import functools
import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple, TypeAlias

import mcap.records
import msgspec
import zstandard
from mcap.data_stream import RecordBuilder

PROFILE = "offloop"
FRONT_BYTES = 4096
BLOCK_BYTES = 1 << 20
MAGIC = b"\x89MCAP0\r\n"
MAX_RECORD = 32 * 1024 * 1024
"""Bytes of a record, in the file and decompressed: twice a frame, so that a chunk fits."""
MAX_CHECK = 16 * 1024 * 1024
MAX_RANKS = MAX_TOPICS = 0xFFFF
MAX_NAME = 1024
"""Bytes of a text: topics have at most 256."""
MESSAGES_PER_BYTE = 4
"""Numbered messages take at least a byte each, however well they are compressed: more of them cannot be events."""

HEAD = struct.Struct("<BQ")
"""Opcode and length, in front of every record."""
MESSAGE = struct.Struct("<BQHIQQ")
"""The head of a message's record, then channel, sequence, log time and publish time; the data follow."""
MESSAGE_FRONT = struct.Struct("<BQH")
"""The head of a message's record and its channel."""

_CHUNK = struct.Struct("<BQQQQI4s4sQ")
_ZSTD = (b"\4\0\0\0", b"zstd")
_CHECK = struct.Struct("<BQ8sII")
CHECK_SIGN = b"\xf1offloop"
_CHANNEL = struct.Struct("<HHI")
_U32 = struct.Struct("<I")

OP_HEADER, OP_CHANNEL, OP_MESSAGE, OP_CHUNK, OP_MESSAGE_INDEX = 1, 4, 5, 6, 7
OP_METADATA, OP_DATA_END = 12, 15
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
    """Malformed or damaged bytes in a recording."""


class Position(NamedTuple):
    """The last event of one rank."""

    seq: int
    base_seq: int
    time: int
    """Of the last event, in nanoseconds since 1970."""
    ended: bool
    """The rank's ``$end`` has come."""


def has_sign(front: bytes) -> bool:
    """The sign of a check record or a chunk is at its place in a record that begins like this."""
    return any(front.startswith(sign, offset) for sign, offset in _SIGN_OFFSETS.items())


def find_signs(read: Callable[[int, int], bytes], begin: int, end: int | None = None) -> Iterator[tuple[bytes, int]]:
    """The signs of check records and chunks, and where their records begin; ``read`` gives the bytes at an offset, at
    most so many."""
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
        offset += len(block) - SIGN_BYTES + 1


# -- check records -----------------------------------------------------------------------------------------------------


_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class CheckRecord(msgspec.Struct, array_like=True, frozen=True):
    """The check record behind each chunk: the contents of the file before it, and how far the ranks have come.

    The bytes from the end of one to the beginning of the next are a *file part*: a chunk, nothing, or the front of the
    file. The check record ends it."""

    start: int
    """Offset at which its part begins: that of the chunk, if there is one."""
    before: int
    """Messages in the file in front of the part."""
    total: int
    """Messages in the file, with those of the part."""
    checksum: int
    """CRC-32 of the part's bytes."""
    metadata: dict[_Text, _Text]
    """As in the metadata record at the front."""
    topics: Annotated[dict[int, _Text], msgspec.Meta(max_length=MAX_TOPICS)]
    """Channels that are used for the first time in the part."""
    positions: Annotated[dict[int, Position], msgspec.Meta(max_length=MAX_RANKS)]
    """Of each rank, the position after the part."""

    def encode(self) -> bytes:
        """The whole record."""
        payload = msgspec.msgpack.encode(self)
        length = _CHECK.size - HEAD.size + len(payload)
        return _CHECK.pack(OP_CHECK, length, CHECK_SIGN, _payload_checksum(payload), len(payload)) + payload

    @classmethod
    def size(cls, front: bytes) -> int:
        """Bytes of a check record that begins like this. Raises DamageError: it is not a check record."""
        if len(front) < _CHECK.size:
            raise DamageError("it is too short for a check record")
        _, _, sign, _, size = _CHECK.unpack_from(front)
        if sign != CHECK_SIGN or size > MAX_CHECK:
            raise DamageError("it is not a check record")
        return int(size) + _CHECK.size

    @classmethod
    def decode(cls, record: bytes) -> "CheckRecord":
        """Reads a check record; its opcode and length are not looked at, so that damage there costs nothing.

        Raises DamageError: it is not a check record, or its checksum does not hold."""
        size = cls.size(record)
        payload = record[_CHECK.size : size]
        if len(record) < size or _CHECK.unpack_from(record)[3] != _payload_checksum(payload):
            raise DamageError("the check record's checksum does not hold")
        try:
            return _decode_check(payload)
        except (ValueError, RecursionError) as error:
            raise DamageError(f"the check record cannot be read ({error})") from None


_decode_check = msgspec.msgpack.Decoder(CheckRecord).decode


def _payload_checksum(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_U32.pack(len(payload))))


# -- chunks -----------------------------------------------------------------------------------------------------------


class ChunkHead(NamedTuple):
    """The fields in front of a chunk's compressed messages."""

    size: int
    """Bytes, uncompressed."""
    checksum: int
    """CRC-32 of the uncompressed bytes; 0 when there is none."""
    data_size: int
    """Bytes, compressed."""

    @classmethod
    def decode(cls, front: bytes) -> "ChunkHead":
        """Reads the first bytes of a chunk's record, but for its opcode and length.

        Raises DamageError: it is not a chunk of ours."""
        if len(front) < _CHUNK.size:
            raise DamageError("it is too short for a chunk")
        *_, size, checksum, algorithm_size, algorithm, data_size = _CHUNK.unpack_from(front)
        if (algorithm_size, algorithm) != _ZSTD:
            raise DamageError("it is not compressed with zstd, as the chunks of recordings are")
        if max(size, data_size) > MAX_RECORD:
            raise DamageError(f"a chunk claims more than {MAX_RECORD} bytes")
        return cls(size, checksum, data_size)

    @property
    def record_size(self) -> int:
        """Bytes of the chunk's whole record."""
        return _CHUNK.size + self.data_size


class Chunk(NamedTuple):
    """A chunk whose bytes are known to be good."""

    head: ChunkHead
    data: bytes
    """Uncompressed: channels and messages."""

    @classmethod
    def size(cls, front: bytes) -> int:
        """Bytes of a chunk's record that begins like this. Raises DamageError: it is not a chunk of ours."""
        return ChunkHead.decode(front).record_size

    @classmethod
    def decode(cls, record: bytes) -> "Chunk":
        """Reads a chunk; its opcode and the record's length are not looked at, so that damage there costs nothing.

        Raises DamageError: it is not a chunk, its checksum does not hold, or it claims to hold too much."""
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
    length = _CHUNK.size - HEAD.size + len(packed)
    return (
        _CHUNK.pack(OP_CHUNK, length, start_time, end_time, len(data), zlib.crc32(data), *_ZSTD, len(packed)) + packed
    )


# -- channels, front and back -----------------------------------------------------------------------------------------


def encode(record: mcap.records.McapRecord) -> bytes:
    """Any record of the library's."""
    builder = RecordBuilder()
    record.write(builder)
    return bytes(builder.end())


FRONT = MAGIC + encode(mcap.records.Header(profile=PROFILE, library=PROFILE))
"""The first bytes of every recording."""
BACK = encode(mcap.records.DataEnd(0)) + encode(mcap.records.Footer(0, 0, 0)) + MAGIC
"""The last bytes of a closed recording. It has no index: tools read it straight through."""


def channel_record(identity: int, topic: str) -> mcap.records.Channel:
    """The channel of a topic."""
    return mcap.records.Channel(id=identity, topic=topic, message_encoding="msgpack", metadata={}, schema_id=0)


@functools.lru_cache(64)  # chunk after chunk has the same ones
def read_channel(content: bytes) -> tuple[int, str]:
    """Number and topic of a channel. Raises DamageError: it is malformed."""
    try:
        identity, _, size = _CHANNEL.unpack_from(content)
        topic = content[_CHANNEL.size : _CHANNEL.size + size].decode()
    except (struct.error, UnicodeDecodeError):
        raise DamageError("a channel cannot be read") from None
    if size > MAX_NAME or _CHANNEL.size + size > len(content):
        raise DamageError(f"a channel claims a topic of {size} bytes")
    return identity, topic
