"""Base of destinations that write a file."""

import contextlib
import fcntl
import os
import stat
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from offloop.bus.errors import ClosedError, ConfigurationError
from offloop.bus.files import open_file, sync
from offloop.consumers.api.logger import LoggerDestination, RunContext

_BLOCK = 1024 * 1024


class FileDestination(LoggerDestination):
    """Writes text to one file, by default ``metrics.NAME`` in the run's directory.

    The second attempt of a run writes ``metrics-2.NAME``, and so on. The output of an event is written at once, so
    other programs can follow the file. A file with content is refused without ``overwrite``, except by a consumer that
    resumes: it truncates the file to the committed part. A file has one writer at a time. In the run's directory only a
    regular file is written, and no symbolic link is followed."""

    name = ""  # its short name, for messages

    elsewhere = "path=FILE"  # the option that makes it write another file, for messages

    blank = ""

    def __init__(self, path: str | None = None, overwrite: bool = False) -> None:
        self._chosen = None if path is None else Path(path)
        self._path: Path | None = None
        self._overwrite = overwrite
        self._file: BinaryIO | None = None
        self._bytes = 0
        self._checksum = 0
        self._goes_on = False
        self._entry_is_safe = False

    def open(self, context: RunContext) -> None:
        self._path = self._chosen or self._default_path(context)
        self.where: str = str(self._path)
        try:
            if not self._goes_on:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | (0 if self._goes_on else os.O_CREAT)
            if self._chosen is None:
                self._file = _open(self._path, flags)
            else:
                # A file named by the user may be a pipe or a device.
                self._file = open(os.open(self._path, flags | os.O_CLOEXEC, 0o666), "wb")  # noqa: SIM115  closed by close()
            # Another writer may have replaced the file before it unlocked this one.
            if not (lock(self._file.fileno()) and os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())):
                raise self._problem("is being written by another process:")
            if self._goes_on:
                self.roll_back(self._bytes, self._checksum)
            else:
                self.begin()
        except OSError as error:
            if self._goes_on and isinstance(error, FileNotFoundError):
                raise self._mismatch("is gone") from None
            raise self._problem(f"cannot be written: {error.strerror};") from None
        self._goes_on = False

    def write(self, text: str) -> None:
        self._append(text.encode())

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def state_dict(self) -> dict[str, Any]:
        os.fsync(self._opened.fileno())
        if not self._entry_is_safe:
            sync(self.opened_path.parent)
            self._entry_is_safe = True
        return {"bytes": self._bytes, "checksum": self._checksum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._bytes, self._checksum = int(state["bytes"]), int(state["checksum"])
        self._goes_on = True

    def begin(self) -> None:
        """Empty the open file, and write ``blank``. Raises ConfigurationError if it may not be replaced."""
        self._bytes = self._checksum = 0
        blank = self.blank.encode()
        status = os.fstat(self._opened.fileno())
        if stat.S_ISREG(status.st_mode):
            # A process that was killed before its first row leaves a blank file.
            is_blank = status.st_size <= len(blank) and self.opened_path.read_bytes() in (b"", blank)
            if not is_blank and not self._overwrite:
                raise self._problem(f"exists: '-o {self.name}.overwrite=true' replaces it,")
            os.ftruncate(self._opened.fileno(), 0)
        elif not self._overwrite:
            raise self._problem(f"is not a regular file: '-o {self.name}.overwrite=true' writes to it anyway,")
        self.write(self.blank)

    def roll_back(self, length: int, checksum: int) -> None:
        """Cut the open file to its first ``length`` bytes. Raises ConfigurationError for other content."""
        self._verify(_checksum_of(self.opened_path, length), (length, checksum))
        os.ftruncate(self._opened.fileno(), length)

    def replace_file(self, pieces: Iterable[str], expected: tuple[int, int] | None = None) -> None:
        """Replace the open file in one atomic write, and continue in the new one.

        Raises ConfigurationError if its length and checksum are not the ``expected`` ones."""
        # Of a symbolic link, such as /dev/stdout, the target is replaced.
        path, old = self.opened_path.resolve(), self._opened
        temporary = path.with_name(f".{path.name}.new")
        file = _open(temporary, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file.fileno(), 0)
            written = checksum = 0
            for data in map(str.encode, pieces):
                written += file.write(data)
                checksum = zlib.crc32(data, checksum)
            if expected is not None:
                self._verify((written, checksum), expected)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            # On a full disk, half a file takes room, and closing it tries to write the other half.
            temporary.unlink()
            with contextlib.suppress(OSError):
                file.close()
            raise
        old.close()
        self._file, self._bytes, self._checksum = file, written, checksum
        self._entry_is_safe = False

    @property
    def _opened(self) -> BinaryIO:
        if self._file is None:
            raise ClosedError(self._not_open)
        return self._file

    @property
    def _not_open(self) -> str:
        return f"{self.name} was given rows while its file was not open: call open() first"

    @property
    def opened_path(self) -> Path:
        """Path of the open file. Raises ClosedError before :meth:`open` and after :meth:`close`."""
        if self._file is None or self._path is None:
            raise ClosedError(self._not_open)
        return self._path

    def _append(self, data: bytes) -> None:
        append_whole(self._opened.fileno(), data, self._bytes)
        self._bytes += len(data)
        self._checksum = zlib.crc32(data, self._checksum)

    def _verify(self, found: tuple[int, int], expected: tuple[int, int]) -> None:
        if found[0] != expected[0]:
            raise self._mismatch(f"is shorter than the {expected[0]} bytes")
        if found[1] != expected[1]:
            raise self._mismatch(f"does not begin with the {expected[0]} bytes")

    def _mismatch(self, what: str) -> ConfigurationError:
        self.close()
        rest = ", which this consumer has written" if what == "is gone" else " that this consumer has written"
        return ConfigurationError(
            f"{self._path} {what}{rest}: put it back to resume, or start anew with another '--name' "
            f"and '-o {self.name}.{self.elsewhere}'"
        )

    def _problem(self, what: str) -> ConfigurationError:
        self.close()
        return ConfigurationError(f"{self._path} {what} '-o {self.name}.{self.elsewhere}' writes elsewhere")

    def _default_path(self, context: RunContext) -> Path:
        if context.run_dir is None:
            raise ConfigurationError(
                f"{self.name} has no run directory to write to: name a file with '-o {self.name}.{self.elsewhere}'"
            )
        # An attempt keeps the files of earlier attempts.
        suffix = f"-{context.attempt}" if context.attempt > 1 else ""
        return context.run_dir / f"metrics{suffix}.{self.name}"


def append_whole(descriptor: int, data: bytes, size: int) -> None:
    """Append the data to a file of ``size`` bytes. After an OSError nothing of it was written."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        # A full disk takes a part. Pipes cannot be cut.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


def _open(path: Path, flags: int) -> BinaryIO:
    return open(open_file(path, flags, 0o666), "wb")


def lock(descriptor: int) -> bool:
    """Lock an open file or directory until this process ends; return False if another process has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _checksum_of(path: Path, length: int) -> tuple[int, int]:
    read = checksum = 0
    with path.open("rb") as file:
        while data := file.read(min(_BLOCK, length - read)):
            read += len(data)
            checksum = zlib.crc32(data, checksum)
    return read, checksum
