"""Records of a recording: MCAP (https://mcap.dev/spec) plus the check record, see ``docs/protocol.md``."""

import functools
import os
import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol, TypeAlias

import mcap.records
import msgspec
import zstandard
from mcap.data_stream import RecordBuilder

from offloop.bus.errors import RecordingError
from offloop.bus.files import NotAFileError, open_file

PROFILE = "offloop"
FRONT_BYTES = 4096
BLOCK_BYTES = 1 << 20
MAGIC = b"\x89MCAP0\r\n"
MAX_RECORD = 32 * 1024 * 1024
"""Limit of a record's bytes, in the file and decompressed: twice a frame, so that a chunk fits."""
MAX_CHECK = 16 * 1024 * 1024
MAX_RANKS = MAX_TOPICS = 0xFFFF
MAX_NAME = 1024  # limit of a text's bytes; topics have at most 256
MESSAGES_PER_BYTE = 4
"""Each numbered message takes at least a byte, however well compressed. More messages per byte cannot be events."""

HEAD = struct.Struct("<BQ")  # opcode and length, at the start of every record
MESSAGE = struct.Struct("<BQHIQQ")
"""The head of a message's record, then channel, sequence, log time and publish time; the data follow."""
MESSAGE_FRONT = struct.Struct("<BQH")  # the head of a message's record, and its channel

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
_HEAD_BYTES = 64
_SKIPPED = (OP_HEADER, OP_METADATA, OP_MESSAGE_INDEX)

# Each is at a fixed distance from the start of its record. After damage a reader finds the next record by them,
# even if that record's opcode and length are damaged.
SIGNS = re.compile(b"|".join(re.escape(sign) for sign in (b"".join(_ZSTD), CHECK_SIGN)))
_SIGN_OFFSETS = {b"".join(_ZSTD): 37, CHECK_SIGN: HEAD.size}
SIGN_BYTES = 8


class _Zstandard(threading.local):
    """One decompressor for each thread: two threads in one crash the process."""

    def __init__(self) -> None:
        self.decompress = zstandard.ZstdDecompressor().decompress


_zstandard = _Zstandard()


class DamageError(Exception):
    """Malformed or damaged bytes in a recording."""


class Position(NamedTuple):
    """Last event of one rank."""

    seq: int
    base_seq: int
    time: int  # time of the event, in nanoseconds since 1970
    ended: bool  # the rank's ``$end`` is recorded


def find_signs(read: Callable[[int, int], bytes], begin: int, end: int | None = None) -> Iterator[tuple[bytes, int]]:
    """Yield signs of check records and chunks with the offsets of their records. ``read`` gets offset and size."""
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
        # A sign may cross the end of a block.
        offset += len(block) - SIGN_BYTES + 1


# -- check records -----------------------------------------------------------------------------------------------------


_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class CheckRecord(msgspec.Struct, array_like=True, frozen=True):
    """Check record after a chunk: contents of the file before it, and the progress of each rank.

    The bytes between two check records are a *file part*: a chunk, nothing, or the front of the file. The check record
    after them belongs to the part."""

    start: int  # offset at which its part begins
    before: int  # number of messages in the file before the part
    total: int  # number of messages in the file, including the part
    checksum: int  # CRC-32 of the part's bytes
    metadata: dict[_Text, _Text]  # copy of the metadata record at the front
    topics: Annotated[dict[int, _Text], msgspec.Meta(max_length=MAX_TOPICS)]  # channels first used in the part
    positions: Annotated[dict[int, Position], msgspec.Meta(max_length=MAX_RANKS)]
    """Position of each rank after the part."""

    def encode(self) -> bytes:
        payload = msgspec.msgpack.encode(self)
        length = _CHECK.size - HEAD.size + len(payload)
        return _CHECK.pack(OP_CHECK, length, CHECK_SIGN, _payload_checksum(payload), len(payload)) + payload

    @classmethod
    def size(cls, front: bytes) -> int:
        if len(front) < _CHECK.size:
            raise DamageError("it is too short for a check record")
        _, _, sign, _, size = _CHECK.unpack_from(front)
        if sign != CHECK_SIGN or size > MAX_CHECK:
            raise DamageError("it is not a check record")
        return int(size) + _CHECK.size

    @classmethod
    def decode(cls, record: bytes) -> "CheckRecord":
        """Decode a check record, or raise DamageError. Opcode and length are ignored, so damage there loses nothing."""
        size = cls.size(record)
        payload = record[_CHECK.size : size]
        if len(record) < size or _CHECK.unpack_from(record)[3] != _payload_checksum(payload):
            raise DamageError("the check record's checksum is wrong")
        try:
            return _decode_check(payload)
        except (ValueError, RecursionError) as error:
            raise DamageError(f"the check record cannot be read ({error})") from None


_decode_check = msgspec.msgpack.Decoder(CheckRecord).decode


def _payload_checksum(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_U32.pack(len(payload))))


# -- chunks -----------------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """A chunk with intact bytes."""

    data: bytes  # channels and messages, uncompressed
    data_size: int  # size in bytes, compressed
    checksum: int  # CRC-32 of the uncompressed bytes, or 0 for none

    @classmethod
    def size(cls, front: bytes) -> int:
        return _CHUNK.size + cls._head(front)[2]

    @classmethod
    def decode(cls, record: bytes) -> "Chunk":
        """Decode a chunk, or raise DamageError. Opcode and length are ignored, so damage there loses nothing."""
        size, checksum, data_size = cls._head(record)
        packed = memoryview(record)[_CHUNK.size : _CHUNK.size + data_size]
        if len(packed) < data_size:
            raise DamageError("it ends before its messages do")
        try:
            # The library allocates as much memory as a frame claims.
            if zstandard.frame_content_size(packed) not in (size, -1):
                raise DamageError("its messages do not have the stated size")
            data = _zstandard.decompress(packed, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise DamageError(f"its messages cannot be decompressed: {error}") from None
        if len(data) != size or (checksum and zlib.crc32(data) != checksum):
            raise DamageError("its checksum is wrong")
        return cls(data, data_size, checksum)

    @staticmethod
    def _head(front: bytes) -> tuple[int, int, int]:
        if len(front) < _CHUNK.size:
            raise DamageError("it is too short for a chunk")
        *_, size, checksum, algorithm_size, algorithm, data_size = _CHUNK.unpack_from(front)
        if (algorithm_size, algorithm) != _ZSTD:
            raise DamageError("it is not compressed with zstd, as the chunks of recordings are")
        if max(size, data_size) > MAX_RECORD:
            raise DamageError(f"a chunk claims more than {MAX_RECORD} bytes")
        return size, checksum, data_size


def encode_chunk(data: bytes | bytearray, packed: bytes, start_time: int, end_time: int) -> bytes:
    """Encode a chunk's record: ``data`` are its channels and messages, ``packed`` is the same compressed."""
    length = _CHUNK.size - HEAD.size + len(packed)
    return (
        _CHUNK.pack(OP_CHUNK, length, start_time, end_time, len(data), zlib.crc32(data), *_ZSTD, len(packed)) + packed
    )


# -- channels, front and back -----------------------------------------------------------------------------------------


def encode(record: mcap.records.McapRecord) -> bytes:
    builder = RecordBuilder()
    record.write(builder)
    return bytes(builder.end())


FRONT = MAGIC + encode(mcap.records.Header(profile=PROFILE, library=PROFILE))  # first bytes of every recording
BACK = encode(mcap.records.DataEnd(0)) + encode(mcap.records.Footer(0, 0, 0)) + MAGIC
"""Last bytes of a closed recording. It has no index: tools read the file from start to end."""


def channel_record(identity: int, topic: str) -> mcap.records.Channel:
    return mcap.records.Channel(id=identity, topic=topic, message_encoding="msgpack", metadata={}, schema_id=0)


@functools.lru_cache(64)  # most chunks repeat the same channels
def read_channel(content: bytes) -> tuple[int, str]:
    """Return number and topic of a channel, or raise DamageError."""
    try:
        identity, _, size = _CHANNEL.unpack_from(content)
        topic = content[_CHANNEL.size : _CHANNEL.size + size].decode()
    except (struct.error, UnicodeDecodeError):
        raise DamageError("a channel cannot be read") from None
    if size > MAX_NAME or _CHANNEL.size + size > len(content):
        raise DamageError(f"a channel claims a topic of {size} bytes")
    return identity, topic


# -- records in a file ------------------------------------------------------------------------------------------------


class Hole(NamedTuple):
    """A range of bytes that is lost for good."""

    end: int  # offset after the last lost byte
    why: str


class ByteSource(Protocol):
    """The bytes of a recording."""

    @property
    def hole(self) -> Hole | None:
        """The known loss directly after the available bytes, if any."""

    @property
    def is_coming(self) -> bool:
        """More of the requested bytes are on their way."""

    def read_at(self, offset: int, size: int) -> bytes:
        """Return at most ``size`` bytes; fewer, or none, where they do not exist yet."""

    def forget(self, offset: int) -> None:
        """Drop any cached copy from ``offset`` on: the bytes may have been replaced."""

    def close(self) -> None:
        """Release resources. Can be called more than once."""


class FileSource:
    """A recording in a file; a symbolic link only with ``follow``. Raises RecordingError if it cannot be opened."""

    is_coming = False
    hole = None

    def __init__(self, path: Path, *, follow: bool = True) -> None:
        self.path = path
        try:
            self._descriptor = open_file(path, follow=follow)
        except FileNotFoundError:
            raise RecordingError(f"there is no recording {path}; 'offloop runs' lists the runs", path=path) from None
        except NotAFileError:
            raise RecordingError(f"{path} is not a recording: it is not a file", path=path) from None
        except OSError as error:
            raise RecordingError(f"the recording {path} cannot be opened: {error.strerror}", path=path) from None

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read_at(self, offset: int, size: int) -> bytes:
        """Return at most ``size`` bytes; fewer at the end of the file. Raise RecordingError if the disk fails."""
        try:
            return os.pread(self._descriptor, size, offset)
        except OSError as error:
            raise RecordingError(
                f"the recording {self.path} cannot be read: {error.strerror}", path=self.path
            ) from None

    def forget(self, offset: int) -> None:
        """Do nothing: no copy is cached."""

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class EndsWithinError(DamageError):
    """A record is incomplete: it ends after the available bytes."""


class RecordHead(NamedTuple):
    """A record with a plausible length; a check record is intact."""

    offset: int
    end: int
    opcode: int
    front: bytes = b""  # its first bytes
    what: CheckRecord | Chunk | None = None  # its decoded contents, if they were read and are intact

    @property
    def check(self) -> CheckRecord | None:
        return self.what if isinstance(self.what, CheckRecord) else None


def head_at(source: ByteSource, offset: int) -> RecordHead:
    """Return the record at an offset, or raise DamageError. Except for check records, its end may not exist yet."""
    front = source.read_at(offset, _HEAD_BYTES)
    if len(front) < HEAD.size:
        raise EndsWithinError("the head of a record")
    opcode, length = HEAD.unpack_from(front)
    size = HEAD.size + length
    if length > MAX_RECORD:
        raise DamageError(f"a record claims {length} bytes, at most {MAX_RECORD} are allowed")
    if len(front) < min(size, _HEAD_BYTES):
        raise EndsWithinError(f"a record of {size} bytes")
    check = None
    if opcode == OP_CHECK:
        check = CheckRecord.decode(read_record(source, offset, size, front))
        is_sound = CheckRecord.size(front) == size
    elif opcode == OP_CHUNK:
        is_sound = Chunk.size(front) == size
    elif opcode == OP_DATA_END:
        is_sound = length == 4
    else:
        has_sign = any(front.startswith(sign, offset) for sign, offset in _SIGN_OFFSETS.items())
        is_sound = (opcode in _SKIPPED or opcode > OP_CHECK) and not has_sign
    if not is_sound:
        raise DamageError(f"a record of kind {opcode} and {length} bytes is malformed")
    return RecordHead(offset, offset + size, opcode, front, check)


def read_record(source: ByteSource, offset: int, size: int, front: bytes) -> bytes:
    """Return a record's bytes, or raise EndsWithinError if some are missing or it does not begin with ``front``."""
    record = source.read_at(offset, size)
    if len(record) < size or not record.startswith(front[:size]):
        raise EndsWithinError(f"a record of {size} bytes")
    return record


def sound_records(source: ByteSource, begin: int, end: int | None = None) -> Iterator[RecordHead]:
    """Yield check records and chunks with correct checksums, whatever their opcodes and lengths are."""
    for sign, offset in find_signs(source.read_at, begin, end):
        kind: type[CheckRecord | Chunk] = CheckRecord if sign == CHECK_SIGN else Chunk
        with suppress(DamageError):
            front = source.read_at(offset, _HEAD_BYTES)
            size = kind.size(front)
            what = kind.decode(read_record(source, offset, size, front))
            yield RecordHead(offset, offset + size, OP_CHECK if sign == CHECK_SIGN else OP_CHUNK, front, what)


def walk(file: FileSource, offset: int = len(MAGIC)) -> Iterator[RecordHead]:
    """Yield a file's complete records from ``offset`` on. Damage is skipped up to the next check record."""
    size, opcode = file.size, OP_HEADER
    while opcode != OP_DATA_END:
        try:
            head = head_at(file, offset)
        except DamageError:
            head = RecordHead(offset, size + 1, 0)
        if head.end > size:
            found = next((one for one in sound_records(file, offset) if one.check), None)
            if found is None:
                return
            head = found
        yield head
        offset, opcode = head.end, head.opcode


def next_check_record(recording: Path, offset: int) -> RecordHead | None:
    """Return the first check record after ``offset``, where a file part begins; ``None`` if there is none."""
    with closing(FileSource(recording)) as file:
        return next((head for head in walk(file, offset) if head.check), None)
