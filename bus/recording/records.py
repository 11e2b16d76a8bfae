"""The records that a recording is made of: MCAP (https://mcap.dev/spec) with one record of our own, the check record.
``docs/protocol.md`` has the details. First as bytes, then in a file, by their heads and by their checksums."""

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
_HEAD_BYTES = 64
_SKIPPED = (OP_HEADER, OP_METADATA, OP_MESSAGE_INDEX)

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


class Chunk(NamedTuple):
    """A chunk whose bytes are known to be good."""

    data: bytes
    """Uncompressed: channels and messages."""
    data_size: int
    """Bytes, compressed."""
    checksum: int
    """CRC-32 of the uncompressed bytes; 0 when there is none."""

    @classmethod
    def size(cls, front: bytes) -> int:
        """Bytes of a chunk's record that begins like this. Raises DamageError: it is not a chunk of ours."""
        return _CHUNK.size + cls._head(front)[2]

    @classmethod
    def decode(cls, record: bytes) -> "Chunk":
        """Reads a chunk; its opcode and the record's length are not looked at, so that damage there costs nothing.

        Raises DamageError: it is not a chunk, its checksum does not hold, or it claims to hold too much."""
        size, checksum, data_size = cls._head(record)
        packed = memoryview(record)[_CHUNK.size : _CHUNK.size + data_size]
        if len(packed) < data_size:
            raise DamageError("it ends before its messages do")
        try:
            # The library takes what a frame claims for how much memory it needs.
            if zstandard.frame_content_size(packed) not in (size, -1):
                raise DamageError("its messages are not as long as it says")
            data = _zstandard.decompress(packed, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise DamageError(f"its messages cannot be decompressed: {error}") from None
        if len(data) != size or (checksum and zlib.crc32(data) != checksum):
            raise DamageError("its checksum does not hold")
        return cls(data, data_size, checksum)

    @staticmethod
    def _head(front: bytes) -> tuple[int, int, int]:
        """Bytes uncompressed, their checksum, and bytes compressed."""
        if len(front) < _CHUNK.size:
            raise DamageError("it is too short for a chunk")
        *_, size, checksum, algorithm_size, algorithm, data_size = _CHUNK.unpack_from(front)
        if (algorithm_size, algorithm) != _ZSTD:
            raise DamageError("it is not compressed with zstd, as the chunks of recordings are")
        if max(size, data_size) > MAX_RECORD:
            raise DamageError(f"a chunk claims more than {MAX_RECORD} bytes")
        return size, checksum, data_size


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


# -- records in a file ------------------------------------------------------------------------------------------------


class Hole(NamedTuple):
    """Bytes that are lost for good."""

    end: int
    """Offset behind the last of them."""
    why: str


class ByteSource(Protocol):
    """The bytes of a recording."""

    @property
    def hole(self) -> Hole | None:
        """The bytes that are lost behind those that are here, where some are known to be."""

    @property
    def is_coming(self) -> bool:
        """More of what was asked for is on its way."""

    def read_at(self, offset: int, size: int) -> bytes:
        """The bytes from ``offset`` on, at most ``size``; fewer, or none, where they are not there yet."""

    def forget(self, offset: int) -> None:
        """Reads from ``offset`` on anew, where a copy is kept: it may be of bytes that have been replaced since."""

    def close(self) -> None:
        """Releases what it holds. Can be called more than once."""


class FileSource:
    """A recording in a file.

    With ``follow`` it may be a symbolic link.

    Raises RecordingError: the file is missing, cannot be opened, or is a directory."""

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
        """Bytes of the file."""
        return os.fstat(self._descriptor).st_size

    def read_at(self, offset: int, size: int) -> bytes:
        """The bytes from ``offset`` on, at most ``size``; fewer where the file ends.

        Raises RecordingError: the disk does not give them."""
        try:
            return os.pread(self._descriptor, size, offset)
        except OSError as error:
            raise RecordingError(
                f"the recording {self.path} cannot be read: {error.strerror}", path=self.path
            ) from None

    def forget(self, offset: int) -> None:
        """Does nothing: no copy is kept."""

    def close(self) -> None:
        """Closes the file. Can be called more than once."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class EndsWithinError(DamageError):
    """A record ends behind the end of what is there."""


class RecordHead(NamedTuple):
    """A record whose length is that of what it holds; a check record is intact."""

    offset: int
    end: int
    opcode: int
    front: bytes = b""
    """Its first bytes."""
    what: CheckRecord | Chunk | None = None
    """What it holds, where that has been read: its checksum holds."""

    @property
    def check(self) -> CheckRecord | None:
        """The check record, if it is one."""
        return self.what if isinstance(self.what, CheckRecord) else None


def head_at(source: ByteSource, offset: int) -> RecordHead:
    """The record that begins at an offset; other than a check record it may end behind what is there.

    Raises DamageError: no record of a recording begins there; EndsWithinError: too little of it is there."""
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
        is_sound = (opcode in _SKIPPED or opcode > OP_CHECK) and not has_sign(front)
    if not is_sound:
        raise DamageError(f"a record of kind {opcode} and {length} bytes is malformed")
    return RecordHead(offset, offset + size, opcode, front, check)


def read_record(source: ByteSource, offset: int, size: int, front: bytes) -> bytes:
    """The bytes of a record that begins with ``front``.

    Raises EndsWithinError: they are not all there, or another record has taken their place meanwhile."""
    record = source.read_at(offset, size)
    if len(record) < size or not record.startswith(front[:size]):
        raise EndsWithinError(f"a record of {size} bytes")
    return record


def sound_records(source: ByteSource, begin: int, end: int | None = None) -> Iterator[RecordHead]:
    """The check records and chunks from ``begin`` on whose checksums hold, whatever their opcodes and lengths are."""
    for sign, offset in find_signs(source.read_at, begin, end):
        kind: type[CheckRecord | Chunk] = CheckRecord if sign == CHECK_SIGN else Chunk
        with suppress(DamageError):
            front = source.read_at(offset, _HEAD_BYTES)
            size = kind.size(front)
            what = kind.decode(read_record(source, offset, size, front))
            yield RecordHead(offset, offset + size, OP_CHECK if sign == CHECK_SIGN else OP_CHUNK, front, what)


def walk(file: FileSource, offset: int = len(MAGIC)) -> Iterator[RecordHead]:
    """The records of a file from one on that begins at ``offset``, up to the end of the data or of what is whole.
    Behind damage comes the next check record."""
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
    """The first check record of a recording behind ``offset``, where a part begins; ``None`` where there is none.

    Raises RecordingError: the recording cannot be read."""
    with closing(FileSource(recording)) as file:
        return next((head for head in walk(file, offset) if head.check), None)
