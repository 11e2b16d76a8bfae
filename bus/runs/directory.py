"""Run directories: location, content, and live runs. ``docs/protocol.md`` describes the layout."""

import contextlib
import itertools
import logging
import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from offloop.bus.errors import RunDirectoryError, RunNotFoundError, close_matches
from offloop.bus.files import open_directory, open_file
from offloop.bus.protocol.frames import MAX_RUN_NAME, check_run_name
from offloop.bus.protocol.run_state import Pause
from offloop.bus.runs import lock as run_lock
from offloop.bus.runs.run_file import BROKER_FILE as BROKER_FILE
from offloop.bus.runs.run_file import RUN_FILE as RUN_FILE
from offloop.bus.runs.run_file import Attempt as Attempt
from offloop.bus.runs.run_file import BrokerRecord, RunRecord, read_record, what_is_left

_log = logging.getLogger("offloop")

LOCK_FILE = "broker.lock"
SOCKET_FILES = ("broker.sock", "feed.sock")
_IS_RECORDING = re.compile(r"recording-\d+\.mcap").fullmatch

IMPORTED_FROM = "imported_from"  # entry of a run's description with the kind and path of an imported log


@dataclass(frozen=True)
class RunInfo:
    """A run on disk."""

    name: str
    """Name of its directory."""
    path: Path
    live: bool
    """True if a broker serves it now."""
    attempts: tuple[Attempt, ...]
    control_endpoint: str | None
    """Address of the live broker for publishers and leases."""
    event_feed: str | None
    """Address of the live broker's event feed."""
    id: str | None = None
    """Random id that distinguishes runs of the same name, from ``run.json`` and the recordings."""
    recorded_as: str = ""
    """Name in the newest recording; differs after the directory was renamed."""

    @property
    def last(self) -> Attempt:
        """The newest attempt."""
        return self.attempts[-1]

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Task, model and number of parameters that differ from the previous attempt: name to values before and now."""
        if len(self.attempts) < 2:
            return {}
        before, now = map(_trained, self.attempts[-2:])
        return {name: (before[name], now[name]) for name in now if name in before and before[name] != now[name]}

    @property
    def recording(self) -> Path:
        """Recording of the newest attempt."""
        return self.last.recording

    @property
    def started(self) -> float:
        """Start of the newest attempt, in seconds since 1970."""
        return self.last.started

    @property
    def away(self) -> bool:
        """True if its broker was killed and its trainer is alive, which starts another broker."""
        return not self.live and self.last.status == "lost" and self.last.has_publisher

    @property
    def paused(self) -> Pause | None:
        """Start of the pause; ``None`` unless paused by a command."""
        return self.last.paused if self.last.status == "running" or self.away else None

    @property
    def status(self) -> str:
        """Status of the newest attempt: ``live``, ``paused``, or its ending."""
        if self.last.status == "running" or self.away:
            return "paused" if self.paused else "live"
        return self.last.status


def changed_in_words(changed: Mapping[str, Sequence[Any]]) -> str:
    return ", ".join(f"{name} {now} (before: {before})" for name, (before, now) in changed.items())


def _trained(attempt: Attempt) -> dict[str, Any]:
    config = attempt.info.get("config")
    values = {**attempt.info, "task": config.get("task") if isinstance(config, dict) else None}
    return {name: values[name] for name in ("task", "model", "parameters") if values.get(name) is not None}


def runs_dir(value: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of runs: ``value``, else ``$OFFLOOP_RUNS_DIR``, else ``runs`` in the current directory."""
    return Path(value or os.environ.get("OFFLOOP_RUNS_DIR") or "runs")


def absolute_runs_dir(value: str | os.PathLike[str] | None = None) -> Path:
    """Return the absolute folder of runs. Raises RunDirectoryError if the current folder was removed."""
    root = runs_dir(value)
    try:
        return root.absolute()
    except FileNotFoundError:
        raise RunDirectoryError(
            f"the current folder was removed, so runs cannot be written to {str(root)!r} in it: change to a folder "
            "that exists, or name an absolute one with runs_dir",
            path=root,
        ) from None


def host_name() -> str:
    return os.environ.get("OFFLOOP_HOST") or socket.gethostname()


def in_words(root: Path) -> str:
    return f"the folder {root}" if root.is_absolute() or root.parts[:1] == ("..",) else f"the folder ./{root}"


def new_run_id() -> str:
    return secrets.token_hex(8)


def new_run_name(prefix: str, where: str | os.PathLike[str] | None = None) -> str:
    """Return an unused name: the prefix, the local time, and random digits for scripts that start several runs."""
    while True:
        name = check_run_name(f"{prefix}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}")
        if not (runs_dir(where) / name).exists():
            return name


def numbered_names(name: str) -> Iterator[str]:
    """Yield candidates for the name of a new run: ``name``, ``name-2``, ``name-3``."""
    yield name
    for number in itertools.count(2):
        ending = f"-{number}"
        yield name[: MAX_RUN_NAME - len(ending)] + ending


def is_name_for(found: str, name: str) -> bool:
    """Return whether ``found`` is ``name``, or ``name`` with a number."""
    number = found.rpartition("-")[2]
    return found == name or (number.isdigit() and found == name[: MAX_RUN_NAME - len(number) - 1] + f"-{number}")


def is_taken(path: Path) -> bool:
    """Return whether the directory contains parts of a run, so that no new run can have it."""
    try:
        names = os.listdir(path)
    except OSError:
        # An unreadable folder is reported when a run is made.
        return os.path.lexists(path)
    return any(name == RUN_FILE or _IS_RECORDING(name) for name in names) or is_locked(path)


def free_name(root: Path, name: str, launch: str | None = None) -> str:
    """Return the name of a run that starts now: the first free one, or that of the run which ``launch`` restarts."""
    return next(one for one in numbered_names(check_run_name(name)) if is_own_name(root / one, launch))


def is_own_name(path: Path, launch: str | None) -> bool:
    """Return whether a starting run can have this directory: free, or its last attempt has the same ``launch``."""
    if not is_taken(path):
        return True
    with contextlib.suppress(RunDirectoryError):
        return launch is not None and read_run(path).last.info.get("launch") == launch
    return False


def check_named(where: str | os.PathLike[str] | None) -> None:
    """Raise RunDirectoryError if the user has named a folder of runs that does not exist."""
    if where and not os.path.lexists(where):
        raise RunDirectoryError(f"no such folder: {where}; name an existing folder of runs", path=Path(where))


def names_in(root: Path) -> list[str]:
    try:
        return os.listdir(root)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise RunDirectoryError(f"{root} is a file; runs live in a folder: name another one", path=root) from None
    except OSError as error:
        raise RunDirectoryError(f"the runs directory {root} cannot be read: {error.strerror}", path=root) from None


def list_runs(where: str | os.PathLike[str] | None = None) -> list[RunInfo]:
    """Return every run in a runs directory, the newest first; empty if the directory does not exist.

    Unreadable runs are logged and left out. Raises RunDirectoryError if the directory cannot be read."""
    root = runs_dir(where)
    paths = [root / name for name in names_in(root) if os.path.exists(root / name / RUN_FILE)]
    found = []
    for path in paths:
        try:
            found.append(read_run(path))
        except RunDirectoryError as error:
            # One damaged run must not hide the others.
            _log.warning("%s", error)
    return sorted(found, key=lambda run: run.started, reverse=True)


def find_run(name: str | os.PathLike[str], where: str | os.PathLike[str] | None = None) -> RunInfo:
    """Return the run with that name or directory. Raises RunNotFoundError, which lists the existing runs."""
    root = runs_dir(where)
    for path in (root / name, Path(name)):
        if (path / RUN_FILE).is_file():
            return read_run(path)
    if os.sep in str(name) and Path(name).is_dir():
        raise RunNotFoundError(
            f"{Path(name)} is not a run: it has no {RUN_FILE}; 'offloop runs' lists the runs", run=str(name)
        )
    if Path(name).is_file():
        raise RunNotFoundError(
            f"no run {str(name)!r} in {in_words(root)}, only a file of that name: this takes the name or the folder of "
            "a run, not a recording",
            run=str(name),
        )
    known = [run.name for run in list_runs(root)]
    more = " and more" if len(known) > 5 else ""
    exist = f"{close_matches(str(name), known)}there are {', '.join(known[:5])}{more}" if known else "there is none yet"
    raise RunNotFoundError(
        f"no run {str(name)!r} in {in_words(root)}: {exist}; 'offloop runs' lists them, "
        "'--runs-dir' or OFFLOOP_RUNS_DIR looks elsewhere",
        run=str(name),
    )


def read_run(path: Path) -> RunInfo:
    """Read a run's directory. Raises RunDirectoryError if ``run.json`` is missing, unreadable or damaged."""
    record = broker = None
    locked = False
    with _opened(path) as directory:
        while directory is not None:
            locked = _is_locked_in(directory)
            # A broker writes the run's ending before it removes its addresses. Read in the other order, a run that ends
            # now would be neither live nor ended.
            broker = read_record(path / BROKER_FILE, directory, BrokerRecord) if locked else None
            record = read_record(path / RUN_FILE, directory, RunRecord)
            if _is_locked_in(directory) == locked:
                break
    if record is None or not record.attempts:
        what = "is missing" if record is None else "has no attempt"
        raise RunDirectoryError(f"{path / RUN_FILE} {what}{what_is_left(path)}", path=path / RUN_FILE)
    attempts = tuple(
        msgspec.structs.replace(attempt, status="lost") if attempt.status == "running" and not locked else attempt
        for attempt in record.attempts
    )
    broker = broker or BrokerRecord()
    # A broker about to begin the next attempt does not serve the preceding one.
    live = broker.attempt == attempts[-1].number
    name = os.path.basename(os.path.abspath(path))
    return RunInfo(name, path, live, attempts, broker.control_endpoint, broker.event_feed, record.id, record.name)


def is_over(path: Path) -> bool:
    """Return whether no broker serves the run, and none will continue its newest attempt."""
    try:
        run = read_run(path)
    except RunDirectoryError:
        return True
    return not run.live and not run.away


def is_being_recorded(recording: Path) -> bool:
    """Return whether it is the recording of a live run, or of one whose broker is being replaced."""
    with contextlib.suppress(RunDirectoryError):
        run = read_run(recording.parent)
        return (run.live or run.away) and run.recording == recording
    return False


def is_locked(path: Path) -> bool:
    """Return whether a broker holds the run's lock, which the system releases with the broker's process."""
    with contextlib.suppress(RunDirectoryError), _opened(path) as directory:
        return directory is not None and _is_locked_in(directory)
    return False


def read_last_record(path: Path) -> RunRecord | None:
    """Return ``run.json``, however old; ``None`` without one. Raises RunDirectoryError."""
    with _opened(path) as directory:
        return None if directory is None else read_record(path / RUN_FILE, directory, RunRecord)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    try:
        directory = open_directory(path)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}", path=path) from None
    try:
        yield directory
    finally:
        os.close(directory)


def _is_locked_in(directory: int) -> bool:
    try:
        descriptor = open_file(LOCK_FILE, dir_fd=directory)
    except OSError:
        return False
    try:
        return run_lock.is_held(descriptor)
    finally:
        os.close(descriptor)
