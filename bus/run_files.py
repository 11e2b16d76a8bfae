"""Small files in the folders of runs and checkpoints, read and replaced as a whole."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from offloop.bus.errors import RunDirectoryError
from offloop.bus.files import check_owner, lock_directory, open_directory, read_file, replace_file

_log = logging.getLogger("offloop")

Content = TypeVar("Content")


@contextlib.contextmanager
def opened_to_write(run: Path, name: str) -> Iterator[int]:
    """Open a folder to write a file of that name. Errors of the file system become RunDirectoryError."""
    try:
        directory = open_directory(run)
        try:
            yield directory
        finally:
            os.close(directory)
    except OSError as error:
        path = run / name
        raise RunDirectoryError(f"{path} cannot be written: {error.strerror or error}", path=path) from None


class JsonFile(Generic[Content]):
    """The file ``name`` of each folder: a value of the type ``form``, of at most ``max_bytes``."""

    def __init__(self, name: str, form: type[Content], max_bytes: int = 1 << 20) -> None:
        self.name = name
        self._max_bytes = max_bytes
        self._decode = msgspec.json.Decoder(form).decode

    def read(self, run: Path) -> Content | None:
        """Return the value; ``None`` without a file. Raises RunDirectoryError if it cannot be read."""
        path = run / self.name
        try:
            return self._decode(read_file(path, self._max_bytes))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RunDirectoryError(f"{path} cannot be read: {error.strerror or error}", path=path) from None
        except (ValueError, RecursionError) as error:
            raise RunDirectoryError(
                f"{path} is damaged: {error}; move it to another place or delete it", path=path
            ) from None

    def find(self, run: Path) -> Content | None:
        """Return the value; ``None`` without a file, and for an unreadable one, which is logged."""
        try:
            return self.read(run)
        except RunDirectoryError as error:
            _log.warning("%s", error)
            return None

    def write(self, run: Path, value: Content) -> None:
        """Replace the file. For a single writer. Raises RunDirectoryError if it cannot be written."""
        with opened_to_write(run, self.name) as directory:
            self._replace(directory, value)

    def update(self, run: Path, change: Callable[[Content | None], Content], patience: float = 10.0) -> Content:
        """Replace the value by ``change(value)`` and return it. Safe for several processes."""
        with opened_to_write(run, self.name) as directory:
            check_owner(directory)
            lock_directory(directory, patience)
            value = change(self.read(run))
            self._replace(directory, value)
        return value

    def try_update(self, run: Path, change: Callable[[Content | None], Content], patience: float = 10.0) -> None:
        try:
            self.update(run, change, patience)
        except RunDirectoryError as error:
            _log.warning("%s", error)

    def _replace(self, directory: int, value: Content) -> None:
        try:
            content = msgspec.json.format(msgspec.json.encode(value))
        except UnicodeEncodeError:
            raise OSError(None, "a text in it is not UTF-8") from None
        if len(content) > self._max_bytes:
            raise OSError(None, f"it would have {len(content):,} bytes, and {self._max_bytes:,} are allowed")
        replace_file(directory, self.name, content.decode())
