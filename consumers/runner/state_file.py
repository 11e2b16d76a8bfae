"""The stored progress of a named consumer, locked against a second one of that name."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Self

from offloop.bus.errors import ConfigurationError, InvalidRunNameError, RecordingError, RunDirectoryError
from offloop.bus.files import open_file, sync
from offloop.bus.protocol.frames import check_run_name
from offloop.consumers.delivery.commit import MAX_BYTES, Committed, unseal


def check_name(name: str) -> str:
    try:
        return check_run_name(name)
    except InvalidRunNameError as error:
        raise ConfigurationError(str(error).replace("a run name", "a consumer's name")) from None


class StateFile:
    """The stored progress of the consumer ``name`` of one attempt of a run, in ``DIRECTORY/NAME-ATTEMPT.state``.

    A context manager, with a lock until :meth:`close` or the end of the process. A commit replaces the whole file and
    syncs it to the disk. Raises ConfigurationError or RunDirectoryError."""

    def __init__(self, directory: Path, name: str, run_name: str, attempt: int, run_id: str | None = None) -> None:
        self.name: str = check_name(name)
        self.path: Path = directory / f"{name}-{attempt}.state"
        self._run = (run_name, attempt)
        self._run_id = run_id
        with self._explained():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = open_file(directory / f"{name}.lock", os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()
                raise ConfigurationError(
                    f"a consumer named {name!r} is at work on run {run_name!r} already: "
                    "stop that one, or choose another '--name'"
                ) from None
            except OSError:
                self.close()
                raise

    @cached_property
    def found(self) -> Committed | None:
        """The committed progress that this process has found, or None.

        Raises RecordingError, ConfigurationError or RunDirectoryError."""
        with self._explained():
            packed = read_state(self.path)
        if packed is None:
            return None
        try:
            committed = unseal(packed, Committed)
        except RecordingError as error:
            raise RecordingError(
                f"the state of consumer {self.name!r} in {self.path} {error}; another '--name' begins anew, with "
                "files of its own"
            ) from None
        found = (committed.run_name, committed.attempt)
        if found != self._run:
            raise ConfigurationError(
                f"{self.path} is of run {found[0]!r}, attempt {found[1]}, not of {self._run[0]!r}, attempt "
                f"{self._run[1]}: choose another '--name' or '--state-dir'"
            )
        if committed.run_id != self._run_id and None not in (committed.run_id, self._run_id):
            raise ConfigurationError(
                f"{self.path} is of another run that was named {found[0]!r}: choose another '--name' or '--state-dir'"
            )
        return committed

    def commit(self, committed: Committed) -> None:
        """Replace the progress in one atomic write. Raises RunDirectoryError or ConfigurationError."""
        packed = committed.pack()
        with self._explained():
            write_state(self.path, packed)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunDirectoryError(
                f"the state of consumer {self.name!r} cannot be kept in {self.path}: {error.strerror}; "
                "'--state-dir DIR' keeps it elsewhere"
            ) from None


def read_state(path: Path) -> bytes | None:
    """Return the content of a state's file; ``None`` without one. Raises OSError."""
    try:
        with open(open_file(path), "rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None


def write_state(path: Path, content: bytes) -> None:
    """Replace a file in one atomic write, and sync it. After an OSError the old content is still there."""
    temporary = path.with_name(f".{path.name}.new")
    descriptor = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    os.replace(temporary, path)
    sync(path.parent)
