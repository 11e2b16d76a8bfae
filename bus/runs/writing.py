"""A run's directory locked and written by its broker."""

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from offloop.bus.errors import BrokerError, ConfigurationError, RunDirectoryError, RunIsLiveError
from offloop.bus.files import (
    check_owner,
    make_private,
    open_directory,
    open_file,
    plain_name,
    replace_file,
    replace_file_in_reserve,
    reserve_space,
)
from offloop.bus.protocol.frames import check_run_name
from offloop.bus.protocol.order import Ending, Gap
from offloop.bus.protocol.run_state import Pause, Reached
from offloop.bus.runs import lock as run_lock
from offloop.bus.runs.directory import (
    BROKER_FILE,
    LOCK_FILE,
    RUN_FILE,
    SOCKET_FILES,
    free_name,
    is_locked,
    is_taken,
    new_run_id,
    read_last_record,
)
from offloop.bus.runs.run_file import MAX_BYTES_AT_BEGIN, MAX_TEXT, RunRecord, read_values
from offloop.bus.strict_json import plain

_RESERVE_FILE = ".run.json.reserve"
_RESERVE_BYTES = 1 << 16  # reserved growth of run.json for the ending of an attempt on a full disk
_SOCKET_PATH_LIMIT = 107
_END_SECONDS = 15.0  # less than a publisher waits for its broker


class NextAttempt(NamedTuple):
    number: int
    run_id: str | None  # see RunInfo.id; None for a run that is new here


def next_attempt(root: Path, name: str) -> NextAttempt:
    """Return this host's next attempt of a run, for hosts to agree on one. Raises RunIsLiveError, RunDirectoryError."""
    path = root / check_run_name(name)
    if not _await_end(path):
        raise _is_live(root, name)
    record = read_last_record(path)
    known = () if record is None else (attempt.number for attempt in record.attempts)
    return NextAttempt(_next_attempt(path, known)[0], None if record is None else record.id)


def _await_end(path: Path) -> bool:
    """Return whether no broker holds a run; wait for the broker of a training that was killed to end its attempt."""
    until = time.monotonic() + _END_SECONDS
    while is_locked(path):
        if time.monotonic() > until or not _has_died(path):
            return False
        time.sleep(0.05)
    return True


def _has_died(path: Path) -> bool:
    record = read_last_record(path)
    if record is None or not record.attempts or not record.attempts[-1].publishers:
        return False
    return not record.attempts[-1].has_publisher and not record.attempts[-1].is_published_elsewhere


def _next_attempt(path: Path, known: Iterable[int]) -> tuple[int, Path]:
    number = 1 + max(known, default=0)
    # A broker killed at its start leaves an unlisted recording.
    while os.path.lexists(recording := path / f"recording-{number}.mcap"):
        number += 1
    return number, recording


def _is_live(root: Path, name: str) -> RunIsLiveError:
    return RunIsLiveError(
        f"run {name!r} in {root} is live already: choose another run name, or wait until it ends", run=name
    )


class RunDirectory:
    """A run's directory, locked and written by its broker. Raises RunIsLiveError, RunDirectoryError."""

    def __init__(self, root: Path, name: str, run_id: str | None = None) -> None:
        self.path: Path = root / check_run_name(name)
        self.name = name
        self._lock = self._directory = -1
        self._began_at: float | None = None
        _await_end(self.path)
        try:
            with _explained(self.path):
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._directory = open_directory(self.path)
                check_owner(self._directory)
                make_private(self._directory)
                self._lock = open_file(LOCK_FILE, os.O_RDWR | os.O_CREAT, dir_fd=self._directory)
            if not run_lock.take(self._lock):
                raise _is_live(root, name)
            # The run has the directory's name, also after a move. An unreadable file is left unchanged.
            known = read_values(self.path / RUN_FILE, self._directory, RunRecord) or {}
            identity = known.get("id") or run_id or new_run_id()
            self._record = {"attempts": []} | known | {"id": identity, "name": name}
            # Addresses of a killed broker would mislead consumers.
            self._remove_traces()
        except BaseException:
            self._close()
            raise

    @classmethod
    def take_free(cls, root: Path, name: str, launch: str | None = None) -> "RunDirectory":
        """Take the directory for a run that starts now, see :func:`free_name`. Raises RunDirectoryError."""
        while True:
            path = root / free_name(root, name, launch)
            is_new = not is_taken(path)
            try:
                directory = cls(root, path.name)
            except RunIsLiveError:
                if not is_new:
                    raise
                # Another run has just taken it.
                continue
            if not is_new or directory.next_attempt()[0] == 1:
                return directory
            directory.release()

    @property
    def run_id(self) -> str:
        return str(self._record["id"])

    def next_attempt(self) -> tuple[int, Path]:
        return _next_attempt(self.path, (entry["attempt"] for entry in self._record["attempts"]))

    def begin_attempt(
        self,
        recording: Path,
        number: int,
        info: dict[str, Any],
        world_size: int,
        started: float | None = None,
        local_world_size: int | None = None,
    ) -> None:
        """Record that an attempt with an existing recording has begun, by default now and with all ranks."""
        began = time.time() if started is None else started
        entry = {"attempt": number, "recording": recording.name, "started": began, "ended": None} | {
            "status": "running",
            "error": None,
            "world_size": world_size,
            "local_world_size": world_size if local_world_size is None else local_world_size,
            "publishers": [],
            "info": info,
        }
        record = {**self._record, "attempts": [*self._record["attempts"], entry]}
        text = _as_text(record)
        if len(text) > MAX_BYTES_AT_BEGIN:
            raise RunDirectoryError(
                f"{self.path / RUN_FILE} would have {len(text):,} bytes with attempt {number}, and "
                f"{MAX_BYTES_AT_BEGIN:,} are allowed: choose another run name",
                path=self.path / RUN_FILE,
            )
        with _explained(self.path):
            self._reserve(record)
        self._write(RUN_FILE, record)
        self._record = record
        self._began_at = time.monotonic() if started is None else None

    def resume_attempt(self, number: int) -> tuple[Path, int, int, list[dict[str, Any]]]:
        """Mark an interrupted attempt as live; return recording, numbers of ranks and local ranks, publishers."""
        entry = self.resumable()
        if entry is None or entry["attempt"] != number:
            raise BrokerError(f"attempt {number} of run {self.name!r} cannot continue: {self.describe_status()}")
        try:
            recording = self.path / plain_name(entry["recording"])
        except ValueError as error:
            raise BrokerError(f"attempt {number} of run {self.name!r} cannot continue: {error}") from None
        self._began_at = None
        entry.update(status="running", error=None, ended=None)
        for name in ("reason", "reached", "gaps"):
            entry.pop(name, None)
        self._write(RUN_FILE, self._record)
        with contextlib.suppress(OSError):
            self._reserve(self._record)
        world_size = entry.get("world_size", 1)
        return recording, world_size, entry.get("local_world_size", world_size), list(entry.get("publishers", []))

    def resumable(self) -> dict[str, Any] | None:
        """Return the newest attempt in ``run.json`` if its broker ended before it."""
        attempts = self._record["attempts"]
        return attempts[-1] if attempts and attempts[-1].get("status") in ("running", "lost") else None

    def describe_status(self) -> str:
        attempts = self._record["attempts"]
        if not attempts:
            return "the run's directory was removed or recreated"
        return f"attempt {attempts[-1]['attempt']} is the newest and is {attempts[-1]['status']}"

    def note_publisher(self, publisher: dict[str, Any]) -> None:
        """Record the process of a rank: ``rank``, ``pid``, ``started``, ``host``, ``publisher_id``."""
        entry = self._record["attempts"][-1]
        others = [other for other in entry["publishers"] if other.get("rank") != publisher["rank"]]
        entry["publishers"] = [*others, publisher]
        self._write(RUN_FILE, self._record)

    def note_pause(self, pause: Pause | None) -> None:
        entry = self._record["attempts"][-1]
        entry.pop("paused", None)
        if pause is not None:
            entry["paused"] = msgspec.structs.asdict(pause)
        self._write(RUN_FILE, self._record)

    def announce(self, number: int, control_endpoint: str, event_feed: str) -> None:
        self._write(
            BROKER_FILE,
            {"control_endpoint": control_endpoint, "event_feed": event_feed, "pid": os.getpid(), "attempt": number},
        )

    def end_attempt(
        self,
        ending: Ending,
        trouble: str | None = None,
        reached: Reached | None = None,
        ended: float | None = None,
        gaps: Sequence[Gap] = (),
    ) -> None:
        """Record the ending, also on a full disk. ``trouble`` is a default of its error."""
        entry = self._record["attempts"][-1]
        entry.pop("paused", None)
        if ended is None:
            # The system's clock may have been set meanwhile.
            passed = None if self._began_at is None else time.monotonic() - self._began_at
            ended = max(time.time(), entry["started"]) if passed is None else entry["started"] + passed
        entry.update(ending.to_fields(), error=ending.error or trouble, ended=ended)
        for name in ("error", "reason"):
            if entry.get(name) is not None:
                entry[name] = entry[name][:MAX_TEXT]
        if reached is not None:
            entry["reached"] = msgspec.structs.asdict(reached)
        if gaps:
            entry["gaps"] = list(gaps)
        with _explained(self.path):
            replace_file_in_reserve(self._directory, RUN_FILE, _as_text(self._record), _RESERVE_FILE)

    def release(self) -> None:
        if self._lock < 0:
            return
        self._remove_traces()
        self._close()

    def _close(self) -> None:
        for descriptor in (self._lock, self._directory):
            if descriptor >= 0:
                os.close(descriptor)
        self._lock = self._directory = -1

    def _remove_traces(self) -> None:
        for name in (BROKER_FILE, *SOCKET_FILES, _RESERVE_FILE):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._directory)

    def _write(self, name: str, value: dict[str, Any]) -> None:
        with _explained(self.path):
            replace_file(self._directory, name, _as_text(value))

    def _reserve(self, record: dict[str, Any]) -> None:
        reserve_space(self._directory, _RESERVE_FILE, len(_as_text(record)) + _RESERVE_BYTES)


def _as_text(value: dict[str, Any]) -> str:
    return json.dumps(plain(value), indent=2) + "\n"


def check_writable(root: Path) -> None:
    """Make ``root`` if missing. Raises RunDirectoryError if no run can be made in it."""
    with _explained(root):
        root.mkdir(parents=True, exist_ok=True)
        if not os.access(root, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def socket_address(path: Path) -> str:
    """Return the address of a Unix socket. Raises ConfigurationError if the path is too long or not UTF-8."""
    encoded = os.fsencode(path.absolute())
    shown = encoded.decode("utf-8", "backslashreplace")
    if shown.encode() != encoded:
        raise ConfigurationError(
            f"the path {shown} is not UTF-8: choose another runs directory with '--runs-dir' or OFFLOOP_RUNS_DIR"
        )
    if len(encoded) > _SOCKET_PATH_LIMIT:
        raise ConfigurationError(
            f"the path {shown} has {len(encoded)} bytes, and a socket's path may have {_SOCKET_PATH_LIMIT}: "
            "choose a shorter run name or a shorter runs directory"
        )
    return f"ipc://{shown}"


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(
            f"the run directory {path} cannot be written: {error.strerror}; "
            "choose another place with '--runs-dir' or OFFLOOP_RUNS_DIR",
            path=path,
        ) from None
