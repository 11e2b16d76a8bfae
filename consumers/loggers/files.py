"""What destinations that write a file share."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TextIO

from bus.errors import ClosedError, ConfigurationError
from consumers.logger import LoggerDestination, RunPlace

__all__ = ["FileDestination"]


class FileDestination(LoggerDestination):
    """A destination that writes lines to one file, by default ``metrics.NAME`` in the run's directory
    (``metrics-2.NAME`` for the second attempt of a run, and so on).

    Every line is handed to the system as it is written, so other programs can follow the file. An existing file is
    refused unless ``overwrite`` is true.
    """

    name = ""
    """Its short name, for messages."""

    def __init__(self, path: str | None = None, overwrite: bool = False) -> None:
        self._path = None if path is None else Path(path)
        self._overwrite = overwrite
        self._file: TextIO | None = None

    def open(self, place: RunPlace) -> None:
        """Creates the file.

        Raises:
            ConfigurationError: there is one already, it cannot be created, or no path was given and the stream has no
            directory.
        """
        path = self._path or self._default_path(place)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open(path, "w" if self._overwrite else "x")
        except OSError as error:
            if isinstance(error, FileExistsError) and path.exists():
                problem = f"exists: '-o {self.name}.overwrite=true' replaces it,"
            else:
                problem = f"cannot be written: {error.strerror};"
            raise ConfigurationError(f"{path} {problem} '-o {self.name}.path=FILE' writes elsewhere") from None

    @property
    def file(self) -> TextIO:
        """The open file.

        Raises:
            ClosedError: before :meth:`open` and after :meth:`close`.
        """
        if self._file is None:
            raise ClosedError(f"{self.name} was given rows while its file was not open: call open() first")
        return self._file

    def close(self) -> None:
        """Closes the file; whatever was written stays."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def replace_file(self, write: Callable[[TextIO], None]) -> None:
        """Puts a file that ``write`` writes in the place of the open one, as a whole or not at all, and opens it to go
        on."""
        path = Path(self.file.name)
        temporary = path.with_name(f".{path.name}.new")
        with _open(temporary, "w", buffering=-1) as file:
            write(file)
        os.replace(temporary, path)
        self.file.close()
        self._file = _open(path, "a")

    def _default_path(self, place: RunPlace) -> Path:
        if place.run_dir is None:
            raise ConfigurationError(
                f"{self.name} has no run directory to write to: say where with '-o {self.name}.path=FILE'"
            )
        # A resumed run keeps what its earlier attempts logged.
        suffix = f"-{place.attempt}" if place.attempt > 1 else ""
        return place.run_dir / f"metrics{suffix}.{self.name}"


def _open(path: Path, mode: Literal["w", "x", "a"], buffering: int = 1) -> TextIO:
    # Line ends stay as written on every system, and line buffering puts each row where others can read it.
    return open(path, mode, buffering=buffering, encoding="utf-8", newline="")
