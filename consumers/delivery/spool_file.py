"""Files of a spool: logged records, the position of the sending, and files to send."""

import contextlib
import os
import shutil
import struct
import tempfile
from bisect import bisect_right
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgpack

from offloop.bus.errors import ConfigurationError
from offloop.consumers.api.optional import np
from offloop.consumers.loggers.files import append_whole

_LENGTH = struct.Struct(">I")
_POSITION = "position"
_FILES = "files"
_RECORDS = "records-"
_ARRAY = 1
_FILE_BYTES = 16 * 1024 * 1024


class Offset(NamedTuple):
    bytes: int = 0  # counted from the first record ever written
    records: int = 0  # number of the next record, from 0


class SpoolPosition(NamedTuple):
    """Progress of the sending, so that a resuming process sends nothing twice."""

    base: int  # bytes of deleted records, all of which were sent
    offset: Offset  # position of the next record to read
    sent: int
    """Number of sent records. More than before ``offset`` when the consumer went back: it logs them again, and they
    are left out."""
    destination: dict[str, Any]  # state_dict() of the destination


class SpoolDirectory:
    """The directory of one spool: the files ``records-BASE``, the position in ``position``, and ``files/``.

    One thread appends records and another reads them; they hold a lock for everything else. A record is a length of
    four bytes, most significant first, and MessagePack. The first one of a file is at ``BASE``, as :class:`Offset`
    counts; a file of 16 MiB is followed by another, and deleted when all of it was sent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position: SpoolPosition = SpoolPosition(0, Offset(), 0, {})
        self.end: Offset = Offset()
        self._file: BinaryIO | None = None
        self._bases: list[int] = []

    @classmethod
    def create(cls, parent: Path | None, prefix: str) -> "SpoolDirectory":
        """Create a directory in ``parent``, or among the system's temporary files where that cannot be written."""
        path = None
        if parent is not None:
            with contextlib.suppress(OSError):
                parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                # Absolute: the consumer may continue in another working directory.
                path = tempfile.mkdtemp(prefix=f"{prefix}-", dir=parent.absolute())
        made = cls(Path(path or tempfile.mkdtemp(prefix=f"offloop-{prefix}-")))
        (made.path / _FILES).mkdir()
        made._write_position(made.position)
        made._append_to(0)
        return made

    @classmethod
    def go_on(cls, path: Path, committed: Offset) -> "SpoolDirectory":
        """Open a directory again, without what was appended after ``committed``.

        Raises ConfigurationError: it is gone, or lacks committed records."""
        found = cls(path)
        try:
            packed = msgpack.unpackb((path / _POSITION).read_bytes(), strict_map_key=False)
            found.position = SpoolPosition(packed[0], Offset(*packed[1]), packed[2], packed[3])
            # Deleted records were sent, and are not sent again however far back the consumer begins.
            found.end = Offset(max(committed.bytes, found.position.base), committed.records)
            reached = found._find_records()
            if reached >= found.end.bytes:
                found._append_to(found._bases.pop() if found._bases else found.end.bytes)
                os.ftruncate(found._opened.fileno(), found.end.bytes - found._bases[-1])
        except (OSError, ValueError, TypeError, IndexError) as error:
            raise found._problem(f"cannot be read: {error}") from None
        if reached < found.end.bytes:
            raise found._problem(f"is shorter than the {committed.records} entries that this consumer has logged")
        if found.end.records < found.position.offset.records:
            found._write_position(found.position._replace(offset=found.end))
        return found

    def append(self, record: Any) -> None:
        """Add a record; the system has it when this returns. After an OSError nothing was added."""
        packed: bytes = msgpack.packb(record, default=_plain, unicode_errors="replace")
        if self.end.bytes - self._bases[-1] >= _FILE_BYTES:
            self.sync()
            self._append_to(self.end.bytes)
        data = _LENGTH.pack(len(packed)) + packed
        append_whole(self._opened.fileno(), data, self.end.bytes - self._bases[-1])
        self.end = Offset(self.end.bytes + len(data), self.end.records + 1)

    def read(self, offset: Offset) -> tuple[Any, Offset]:
        base = self._bases[self._number_of_file(offset)]
        with self._records(base).open("rb") as file:
            file.seek(offset.bytes - base)
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            packed = file.read(length)
        record = msgpack.unpackb(packed, strict_map_key=False, ext_hook=_array)
        return record, Offset(offset.bytes + _LENGTH.size + length, offset.records + 1)

    def keep_file(self, source: Path) -> Path:
        """Keep a hard link to the file, or a copy."""
        kept = self.path / _FILES / f"{self.end.records}-{source.name}"
        kept.unlink(missing_ok=True)
        try:
            # A link to a symbolic link may lead nowhere from here.
            os.link(source.resolve(), kept)
        except OSError:
            shutil.copyfile(source, kept)
        return kept

    def sync(self) -> None:
        os.fsync(self._opened.fileno())

    def set_sent(self, offset: Offset, destination: dict[str, Any]) -> None:
        """Store the sent offset and the destination's state; delete files of records that are not read any more."""
        first = self._number_of_file(offset)
        gone, left = self._bases[:first], self._bases[first:]
        self._write_position(SpoolPosition(left[0], offset, max(self.position.sent, offset.records), destination))
        self._bases = left
        for base in gone:
            self._records(base).unlink()

    def forget_sent(self) -> None:
        if self._bases[-1] < self.end.bytes:
            self._append_to(self.end.bytes)
        self.set_sent(self.end, self.position.destination)
        for kept in (self.path / _FILES).iterdir():
            kept.unlink()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def remove(self) -> None:
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    @property
    def _opened(self) -> BinaryIO:
        assert self._file is not None  # opened by both ways to make one
        return self._file

    def _records(self, base: int) -> Path:
        return self.path / f"{_RECORDS}{base}"

    def _number_of_file(self, offset: Offset) -> int:
        return bisect_right(self._bases, offset.bytes) - 1

    def _append_to(self, base: int) -> None:
        file = self._records(base).open("ab")
        self.close()
        self._file = file
        self._bases.append(base)

    def _find_records(self) -> int:
        reached = self.position.base
        for base in sorted(int(file.name.removeprefix(_RECORDS)) for file in self.path.glob(f"{_RECORDS}*")):
            if base < self.position.base or base > self.end.bytes:
                self._records(base).unlink()
            elif base == reached:
                self._bases.append(base)
                reached += self._records(base).stat().st_size
        return reached

    def _write_position(self, position: SpoolPosition) -> None:
        # Known to this process even if the disk refuses it: what it has sent, it does not send again.
        self.position = position
        temporary = self.path / f".{_POSITION}.new"
        temporary.write_bytes(msgpack.packb(position, default=_plain))
        os.replace(temporary, self.path / _POSITION)

    def _problem(self, what: str) -> ConfigurationError:
        self.close()
        return ConfigurationError(
            f"{self.path} {what}: put it back to continue, or another '--name' begins anew and sends everything again"
        )


def _plain(value: Any) -> Any:
    if getattr(value, "ndim", 0) and hasattr(value, "tobytes"):
        return msgpack.ExtType(_ARRAY, msgpack.packb((value.dtype.str, value.shape, value.tobytes())))
    item = getattr(value, "item", None)
    if item is not None:
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            return item()
    return str(value)


def _array(_: int, packed: bytes) -> Any:
    kind, shape, data = msgpack.unpackb(packed)
    return np.frombuffer(data, dtype=kind).reshape(shape)
