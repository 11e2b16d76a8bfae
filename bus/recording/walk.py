"""The bytes of a recording, and the records in them by their heads and by their checksums."""

import os
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from offloop.bus.errors import RecordingError
from offloop.bus.files import NotAFileError, open_file
from offloop.bus.recording import records
from offloop.bus.recording.records import MAGIC, CheckRecord, Chunk, ChunkHead, DamageError

_HEAD_BYTES = 64
_SKIPPED = (records.OP_HEADER, records.OP_METADATA, records.OP_MESSAGE_INDEX)


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
    opcode: int
    end: int
    front: bytes
    """Its first bytes."""
    check: CheckRecord | None = None


def head_at(source: ByteSource, offset: int) -> RecordHead:
    """The record that begins at an offset; other than a check record it may end behind what is there.

    Raises DamageError: no record of a recording begins there; EndsWithinError: too little of it is there."""
    front = source.read_at(offset, _HEAD_BYTES)
    if len(front) < records.HEAD.size:
        raise EndsWithinError("the head of a record")
    opcode, length = records.HEAD.unpack_from(front)
    size = records.HEAD.size + length
    if length > records.MAX_RECORD:
        raise DamageError(f"a record claims {length} bytes, at most {records.MAX_RECORD} are allowed")
    if len(front) < min(size, _HEAD_BYTES):
        raise EndsWithinError(f"a record of {size} bytes")
    check = None
    if opcode == records.OP_CHECK:
        check = CheckRecord.decode(read_record(source, offset, size, front))
        is_sound = CheckRecord.size(front) == size
    elif opcode == records.OP_CHUNK:
        is_sound = ChunkHead.decode(front).record_size == size
    elif opcode == records.OP_DATA_END:
        is_sound = length == 4
    else:
        is_sound = (opcode in _SKIPPED or opcode > records.OP_CHECK) and not records.has_sign(front)
    if not is_sound:
        raise DamageError(f"a record of kind {opcode} and {length} bytes is malformed")
    return RecordHead(offset, opcode, offset + size, front, check)


def read_record(source: ByteSource, offset: int, size: int, front: bytes) -> bytes:
    """The bytes of a record that begins with ``front``.

    Raises EndsWithinError: they are not all there, or another record has taken their place meanwhile."""
    record = source.read_at(offset, size)
    if len(record) < size or not record.startswith(front[:size]):
        raise EndsWithinError(f"a record of {size} bytes")
    return record


class Sound(NamedTuple):
    """A record whose checksum holds."""

    offset: int
    end: int
    what: CheckRecord | Chunk


def sound_records(source: ByteSource, begin: int, end: int | None = None) -> Iterator[Sound]:
    """The check records and chunks from ``begin`` on whose checksums hold, whatever their opcodes and lengths are."""
    for sign, offset in records.find_signs(source.read_at, begin, end):
        kind: type[CheckRecord | Chunk] = CheckRecord if sign == records.CHECK_SIGN else Chunk
        with suppress(DamageError):
            front = source.read_at(offset, _HEAD_BYTES)
            size = kind.size(front)
            yield Sound(offset, offset + size, kind.decode(read_record(source, offset, size, front)))


def walk(file: FileSource, offset: int = len(MAGIC)) -> Iterator[RecordHead]:
    """The records of a file from one on that begins at ``offset``, up to the end of the data or of what is whole.
    Behind damage comes the next check record."""
    size, opcode = file.size, records.OP_HEADER
    while opcode != records.OP_DATA_END:
        try:
            head = head_at(file, offset)
        except DamageError:
            head = RecordHead(offset, 0, size + 1, b"")
        if head.end > size:
            for begin, end, found in sound_records(file, offset):
                if isinstance(found, CheckRecord):
                    head = RecordHead(begin, records.OP_CHECK, end, b"", found)
                    break
            else:
                return
        yield head
        offset, opcode = head.end, head.opcode


def next_check_record(recording: Path, offset: int) -> RecordHead | None:
    """The first check record of a recording behind ``offset``, where a part begins; ``None`` where there is none.

    Raises RecordingError: the recording cannot be read."""
    with closing(FileSource(recording)) as file:
        return next((head for head in walk(file, offset) if head.check), None)
