"""Where the index lies: a SQLite database beside the runs, or in memory where there can be none."""

import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from bus.index.entry import RunEntry
from bus.processes import with_reserve
from bus.recording.summary import Point

_log = logging.getLogger("offloop.index")

_VERSION = 2
_IN_MEMORY = ":memory:"
_TABLES = (
    "CREATE TABLE runs (run TEXT PRIMARY KEY, stamp TEXT NOT NULL, entry BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE series (run TEXT, metric TEXT, points BLOB NOT NULL, PRIMARY KEY (run, metric)) WITHOUT ROWID",
)

Decoded = TypeVar("Decoded")

_encode = msgspec.msgpack.encode
_decode_entry = msgspec.msgpack.Decoder(RunEntry).decode
_decode_points = msgspec.msgpack.Decoder(list[Point]).decode


class Database:
    """Entries of runs with a stamp of what they were made of, and their series.

    A file that is damaged or of another version is replaced by a new one. Where none can be opened, everything is kept
    in memory, and :attr:`problem` says why. Several processes may use one file; methods raise :class:`sqlite3.Error`
    when it is damaged, locked for long, or cannot be written."""

    def __init__(self, path: Path, busy_seconds: float = 5.0, problem: str | None = None) -> None:
        self._path, self._busy_seconds = path, busy_seconds
        self.problem = problem
        """Why everything is kept in memory; ``None`` while all is well. One that is known before is given."""
        self._connection = self._open() if problem is None else _connect(_IN_MEMORY, 0.0)
        self._identity = self._file()

    @property
    def is_current(self) -> bool:
        """Whether the file is still the one that was opened."""
        return self.problem is not None or self._file() == self._identity

    def entries(self) -> Iterator[tuple[str, str, RunEntry]]:
        """Of each run its name, the stamp, and the entry."""
        for run, stamp, entry in self._connection.execute("SELECT run, stamp, entry FROM runs"):
            yield run, stamp, _decoded(_decode_entry, entry)

    def stamp(self, run: str) -> str | None:
        """The stamp of a run's entry."""
        found = self._connection.execute("SELECT stamp FROM runs WHERE run = ?", (run,)).fetchone()
        return None if found is None else found[0]

    def entry(self, run: str) -> RunEntry:
        """A run's entry, which is there."""
        (entry,) = self._connection.execute("SELECT entry FROM runs WHERE run = ?", (run,)).fetchone()
        return _decoded(_decode_entry, entry)

    def series(self, run: str, metric: str) -> list[Point]:
        """A series; empty where there is none."""
        question = "SELECT points FROM series WHERE run = ? AND metric = ?"
        found = self._connection.execute(question, (run, metric)).fetchone()
        return [] if found is None else _decoded(_decode_points, found[0])

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """What is stored and removed meanwhile is there all at once."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def store(self, run: str, stamp: str, entry: RunEntry, series: Iterable[tuple[str, list[Point]]] | None) -> None:
        """Stores a run in the place of what was known of it; ``None`` leaves its series as they are."""
        self._connection.execute("INSERT OR REPLACE INTO runs VALUES (?, ?, ?)", (run, stamp, _encode(entry)))
        if series is None:
            return
        self._connection.execute("DELETE FROM series WHERE run = ?", (run,))
        rows = ((run, metric, _encode(points)) for metric, points in series)
        self._connection.executemany("INSERT INTO series VALUES (?, ?, ?)", rows)

    def remove(self, run: str) -> None:
        """Removes what is known of a run."""
        self._connection.execute("DELETE FROM runs WHERE run = ?", (run,))
        self._connection.execute("DELETE FROM series WHERE run = ?", (run,))

    def close(self, error: sqlite3.Error | None = None) -> None:
        """Closes it. After an error that says that the file is damaged, the next one begins with a new file."""
        self._connection.close()
        if error is not None and not isinstance(error, sqlite3.OperationalError):
            self._delete()

    def _open(self) -> sqlite3.Connection:
        for _ in range(2):
            try:
                connection = _connect(str(self._path), self._busy_seconds)
                self.problem = None
                return connection
            except sqlite3.OperationalError as error:
                # A folder that cannot be written, a full disk, another process that does not end.
                self.problem = f"the index {self._path} cannot be used: {error}"
                break
            except sqlite3.DatabaseError as error:
                _log.warning("the index %s is made again: %s", self._path, error)
                self.problem = f"the index {self._path} cannot be replaced: {error}"
                self._delete()
        else:
            _log.warning("%s", self.problem)
        return _connect(_IN_MEMORY, 0.0)

    def _delete(self) -> None:
        for end in ("", "-wal", "-shm", "-journal"):
            with contextlib.suppress(OSError):
                os.unlink(f"{self._path}{end}")

    def _file(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino


def _decoded(decode: Callable[[bytes], Decoded], stored: bytes) -> Decoded:
    try:
        return decode(stored)
    except msgspec.MsgspecError as error:
        raise sqlite3.DatabaseError(f"what is stored cannot be read: {error}") from None


def _connect(path: str, busy_seconds: float) -> sqlite3.Connection:
    if path != _IN_MEMORY:
        # Only its owner reads it, as it is with runs.
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection = with_reserve(
        # Its users see to it that one thread at a time does.
        lambda: sqlite3.connect(path, timeout=busy_seconds, isolation_level=None, check_same_thread=False)
    )
    try:
        # A machine that crashes may lose what was written last, and no more: the recordings are the record.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN IMMEDIATE")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if not version:
            for statement in _TABLES:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {_VERSION}")
        connection.execute("COMMIT")
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError(f"it has version {version}, this program makes version {_VERSION}")
    except BaseException:
        connection.close()
        raise
    return connection
