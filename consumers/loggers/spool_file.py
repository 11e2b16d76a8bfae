"""What a spool keeps on the disk: records that were logged, how far they were sent, and files to be sent."""

import contextlib
import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgpack

from bus.errors import ConfigurationError

__all__ = ["Mark", "Place", "SpoolDirectory"]

_LENGTH = struct.Struct(">I")
_MARK = "sent"
_FILES = "files"


class Place(NamedTuple):
    """A place between two records."""

    bytes: int = 0
    """Counted from the first record that there ever was."""
    records: int = 0
    """Number of the record that follows, from 0."""


class Mark(NamedTuple):
    """How far has been sent, so that a process that begins here sends nothing twice."""

    base: int
    """Bytes of records that are gone, because all of them were sent."""
    place: Place
    """Where to read on."""
    sent: int
    """How many records were sent. More than are before ``place`` when the consumer went back behind what it had sent:
    it logs them once more, and they are left out."""
    destination: dict[str, Any]
    """``state_dict()`` of who was sent them."""


class SpoolDirectory:
    """The directory of one spool: ``records-BASE``, the mark in ``sent``, and ``files/``.

    Records are appended by one thread and read by another; each is a length of four bytes, most significant first, and
    MessagePack. It is created by :meth:`create` or found again by :meth:`go_on`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mark = Mark(0, Place(), 0, {})
        self.end = Place()
        """Where the next record is appended."""
        self._file: BinaryIO | None = None

    @classmethod
    def create(cls, parent: Path | None, prefix: str) -> "SpoolDirectory":
        """Makes a new one in ``parent``, or among the system's temporary files where that cannot be written."""
        path = None
        if parent is not None:
            with contextlib.suppress(OSError):
                parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path = tempfile.mkdtemp(prefix=f"{prefix}-", dir=parent)
        made = cls(Path(path or tempfile.mkdtemp(prefix=f"offloop-{prefix}-")))
        (made.path / _FILES).mkdir()
        made._write_mark(made.mark)
        made._open_records()
        return made

    @classmethod
    def go_on(cls, path: Path, committed: Place) -> "SpoolDirectory":
        """Opens one again, and takes back what was appended after ``committed``.

        Raises:
            ConfigurationError: it is gone, or lacks records that were committed.
        """
        found = cls(path)
        try:
            packed = msgpack.unpackb((path / _MARK).read_bytes(), strict_map_key=False)
            found.mark = Mark(packed[0], Place(*packed[1]), packed[2], packed[3])
            found._open_records()
        except (OSError, ValueError, TypeError, IndexError) as error:
            raise found._problem(f"cannot be read: {error}") from None
        # What is gone was sent, and is not sent again however far back the consumer begins.
        found.end = Place(max(committed.bytes, found.mark.base), committed.records)
        if os.fstat(found._opened.fileno()).st_size < found.end.bytes - found.mark.base:
            raise found._problem(f"is shorter than the {committed.records} entries that this consumer has logged")
        os.ftruncate(found._opened.fileno(), found.end.bytes - found.mark.base)
        if found.end.records < found.mark.place.records:
            found._write_mark(found.mark._replace(place=found.end))
        return found

    def append(self, record: Any) -> None:
        """Adds a record; the system has it when this returns."""
        packed: bytes = msgpack.packb(record, default=_plain, unicode_errors="replace")
        self._opened.write(_LENGTH.pack(len(packed)) + packed)
        self._opened.flush()
        self.end = Place(self.end.bytes + _LENGTH.size + len(packed), self.end.records + 1)

    def read(self, place: Place) -> tuple[Any, Place]:
        """The record there, and the place after it."""
        with self._records_path.open("rb") as file:
            file.seek(place.bytes - self.mark.base)
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            packed = file.read(length)
        return msgpack.unpackb(packed, strict_map_key=False), Place(
            place.bytes + _LENGTH.size + length, place.records + 1
        )

    def keep_file(self, source: Path) -> Path:
        """A hard link of the file, or else a copy, until :meth:`drop_file`."""
        kept = self.file(f"{self.end.records}-{source.name}")
        kept.unlink(missing_ok=True)
        try:
            # Of a symbolic link the file: a link to the link may lead nowhere from here.
            os.link(source.resolve(), kept)
        except OSError:
            shutil.copyfile(source, kept)
        return kept

    def file(self, name: str) -> Path:
        """Where the kept file of that name is."""
        return self.path / _FILES / name

    def drop_file(self, name: str) -> None:
        """Deletes a kept file."""
        self.file(name).unlink(missing_ok=True)

    def sync(self) -> None:
        """Returns when everything that was appended is on the disk."""
        os.fsync(self._opened.fileno())

    def set_sent(self, place: Place, destination: dict[str, Any]) -> None:
        """Keeps that everything before the place was sent, and the state that the destination is in."""
        self._write_mark(Mark(self.mark.base, place, max(self.mark.sent, place.records), destination))

    def forget_sent(self) -> None:
        """Deletes what is kept, when everything was sent, and begins a new file of records."""
        old, base = self._records_path, self.end.bytes
        if base == self.mark.base:
            return
        self._opened.close()
        self._file = (self.path / f"records-{base}").open("ab")
        self._write_mark(self.mark._replace(base=base, place=self.end))
        old.unlink()
        for kept in (self.path / _FILES).iterdir():
            kept.unlink()

    def close(self) -> None:
        """Closes the file; everything stays."""
        if self._file is not None:
            self._file.close()

    def remove(self) -> None:
        """Deletes the directory."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    @property
    def _records_path(self) -> Path:
        return self.path / f"records-{self.mark.base}"

    @property
    def _opened(self) -> BinaryIO:
        assert self._file is not None  # opened by both ways to make one
        return self._file

    def _open_records(self) -> None:
        for stale in self.path.glob("records-*"):
            if stale != self._records_path:
                stale.unlink()
        self._file = self._records_path.open("ab")

    def _write_mark(self, mark: Mark) -> None:
        temporary = self.path / f".{_MARK}.new"
        temporary.write_bytes(msgpack.packb(mark, default=_plain))
        os.replace(temporary, self.path / _MARK)
        self.mark = mark

    def _problem(self, what: str) -> ConfigurationError:
        self.close()
        return ConfigurationError(
            f"{self.path} {what}: put it back to go on, or another '--name' begins anew and sends everything again"
        )


def _plain(value: Any) -> Any:
    """What a hyperparameter of another type is stored as."""
    item = getattr(value, "item", None)
    if item is not None:
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            return item()
    return str(value)
