"""The stored progress of a named consumer, locked against a second one of that name: in a file, or in NATS."""

import contextlib
import fcntl
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from offloop.bus.errors import BrokerError, ConfigurationError, InvalidRunNameError, RecordingError, RunDirectoryError
from offloop.bus.files import open_file, sync
from offloop.bus.protocol.frames import check_run_name
from offloop.consumers.delivery.commit import MAX_BYTES, Committed, unseal


def check_name(name: str) -> str:
    try:
        return check_run_name(name)
    except InvalidRunNameError as error:
        raise ConfigurationError(str(error).replace("a run name", "a consumer's name")) from None


class StateStore(ABC):
    """The stored progress of the consumer ``name`` of one attempt of a run, as a context manager."""

    def __init__(self, name: str, run_name: str, attempt: int, place: object) -> None:
        self.name = check_name(name)
        self._run = (run_name, attempt)
        self._place = place

    @cached_property
    def found(self) -> Committed | None:
        return self.load()

    def load(self) -> Committed | None:
        """Return the last committed progress, or None.

        Raises RecordingError, ConfigurationError or RunDirectoryError."""
        packed = self._read()
        if packed is None:
            return None
        try:
            committed = unseal(packed, Committed)
        except RecordingError as error:
            raise RecordingError(
                f"the state of consumer {self.name!r} in {self._place} {error}; another '--name' begins anew, with "
                "files of its own"
            ) from None
        found = (committed.run_name, committed.attempt)
        if found != self._run:
            raise ConfigurationError(
                f"{self._place} is of run {found[0]!r}, attempt {found[1]}, not of {self._run[0]!r}, attempt "
                f"{self._run[1]}: choose another '--name' or '--state-dir'"
            )
        return committed

    def commit(self, committed: Committed) -> None:
        """Replace the progress in one atomic write. Raises RunDirectoryError, ReplacedError or ConfigurationError."""
        self._write(committed.pack())

    @abstractmethod
    def _read(self) -> bytes | None: ...

    @abstractmethod
    def _write(self, packed: bytes) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class StateFile(StateStore):
    """A store in ``DIRECTORY/NAME-ATTEMPT.state``, with a lock until :meth:`close` or the end of the process.

    A commit replaces the whole file and syncs it to the disk. Raises ConfigurationError or RunDirectoryError."""

    def __init__(self, directory: Path, name: str, run_name: str, attempt: int) -> None:
        self.path = directory / f"{name}-{attempt}.state"
        super().__init__(name, run_name, attempt, self.path)
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

    def _read(self) -> bytes | None:
        with self._explained():
            return read_state(self.path)

    def _write(self, packed: bytes) -> None:
        with self._explained():
            write_state(self.path, packed)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunDirectoryError(
                f"the state of consumer {self.name!r} cannot be kept in {self.path}: {error.strerror}; "
                "'--state-dir DIR' keeps it elsewhere"
            ) from None


class StateBucket(StateStore):
    """A store in a key-value bucket of the NATS servers at ``address``, for any machine.

    ``say`` receives what the user waits for. Raises ConfigurationError or BrokerError."""

    def __init__(
        self, address: str, name: str, run_name: str, attempt: int, say: Callable[[str], None] = print
    ) -> None:
        from offloop.bus.jetstream.nats_connection import NatsConnection
        from offloop.bus.jetstream.positions import HeldPosition

        super().__init__(name, run_name, attempt, f"the bucket of {address}")
        self._position = HeldPosition(NatsConnection.at(address), run_name, name, attempt, say)

    def _read(self) -> bytes | None:
        return self._position.found or None

    def _write(self, packed: bytes) -> None:
        try:
            self._position.write(packed)
        except BrokerError as error:
            raise RunDirectoryError(f"the state of consumer {self.name!r} cannot be kept: {error}") from None

    def close(self) -> None:
        self._position.close()


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
