"""Run directories: where runs live, what is in them, which are live. The layout is in ``docs/protocol.md``."""

import contextlib
import errno
import itertools
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import asdict, replace

from offloop.bus.errors import BrokerError, ConfigurationError, RunDirectoryError, RunIsLiveError, RunNotFoundError
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
from offloop.bus.protocol.frames import MAX_RUN_NAME, check_run_name
from offloop.bus.protocol.order import Ending, Gap
from offloop.bus.protocol.run_state import Pause, Reached
from offloop.bus.runs import lock as run_lock
from offloop.bus.runs.run_file import BROKER_FILE as BROKER_FILE
from offloop.bus.runs.run_file import (
    MAX_BYTES_AT_BEGIN,
    MAX_TEXT,
    BrokerRecord,
    RunRecord,
    read_record,
    read_values,
    what_is_left,
)
from offloop.bus.runs.run_file import RUN_FILE as RUN_FILE
from offloop.bus.runs.run_file import Attempt as Attempt
from offloop.bus.strict_json import plain

_log = logging.getLogger("offloop")

LOCK_FILE = "broker.lock"
SOCKET_FILES = ("broker.sock", "feed.sock")
_RESERVE_FILE = ".run.json.reserve"
_RESERVE_BYTES = 1 << 16
"""How much ``run.json`` may grow when its newest attempt ends on a full disk."""

_SOCKET_PATH_LIMIT = 107
_IS_RECORDING = re.compile(r"recording-\d+\.mcap").fullmatch
_REPLAY_OF = "replay_of"

IMPORTED_FROM = "imported_from"
"""What stands among the description of a run that was made from another tool's log: the kind of log, and its path."""


@dataclass(frozen=True)
class RunInfo:
    """A run as it is found on disk."""

    name: str
    """The name of its directory, by which it is found."""
    path: Path
    live: bool
    """A broker serves it at this moment."""
    attempts: tuple[Attempt, ...]
    control_endpoint: str | None
    """Address of the live broker for publishers and for leases."""
    event_feed: str | None
    """Address of the live broker's event feed."""
    id: str | None = None
    """Distinguishes it from every other run of that name: random, given when its first attempt begins, in ``run.json``
    and in its recordings."""
    recorded_as: str = ""
    """The name in the newest recording: another one if the directory has been renamed since."""

    @property
    def last(self) -> Attempt:
        """The newest attempt."""
        return self.attempts[-1]

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """What the newest attempt trains and the one before did not: of task, model and number of parameters those that
        differ, before and now."""
        if len(self.attempts) < 2:
            return {}
        before, now = map(_trained, self.attempts[-2:])
        return {name: (before[name], now[name]) for name in now if name in before and before[name] != now[name]}

    @property
    def recording(self) -> Path:
        """The newest attempt's recording."""
        return self.last.recording

    @property
    def started(self) -> float:
        """When the newest attempt began, in seconds since 1970."""
        return self.last.started

    @property
    def away(self) -> bool:
        """Whether nothing serves it at this moment although its trainer is alive: its broker was killed, and the
        trainer starts another."""
        return not self.live and self.last.status == "lost" and self.last.has_publisher

    @property
    def paused(self) -> Pause | None:
        """Since when the training is paused by a command; ``None`` for one that is not, or has ended."""
        return self.last.paused if self.last.status == "running" or self.away else None

    @property
    def status(self) -> str:
        """Status of the newest attempt: ``live``, ``paused``, or how it ended."""
        if self.last.status == "running" or self.away:
            return "paused" if self.paused else "live"
        return self.last.status


def changed_in_words(changed: Mapping[str, Sequence[Any]]) -> str:
    """:attr:`RunInfo.changed` for people."""
    return ", ".join(f"{name} {now} (before: {before})" for name, (before, now) in changed.items())


def _trained(attempt: Attempt) -> dict[str, Any]:
    config = attempt.info.get("config")
    values = {**attempt.info, "task": config.get("task") if isinstance(config, dict) else None}
    return {name: values[name] for name in ("task", "model", "parameters") if values.get(name) is not None}


def runs_dir(value: str | os.PathLike[str] | None = None) -> Path:
    """The folder of runs: ``value`` if given, else ``$OFFLOOP_RUNS_DIR``, else ``runs`` in the current directory."""
    return Path(value or os.environ.get("OFFLOOP_RUNS_DIR") or "runs")


def absolute_runs_dir(value: str | os.PathLike[str] | None = None) -> Path:
    """The absolute folder of runs, for writing.

    Raises:
        RunDirectoryError: that is in the current folder, which was removed."""
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
    """Name of this host among those of a run on several: ``$OFFLOOP_HOST`` if set, else the machine's name."""
    return os.environ.get("OFFLOOP_HOST") or socket.gethostname()


def in_words(root: Path) -> str:
    """The folder of runs as messages name it."""
    return f"the folder {root}" if root.is_absolute() or root.parts[:1] == ("..",) else f"the folder ./{root}"


def new_run_id() -> str:
    """An identity for a run: see :attr:`RunInfo.id`."""
    return secrets.token_hex(8)


def new_run_name(prefix: str, where: str | os.PathLike[str] | None = None) -> str:
    """A name that no run has yet: the prefix, the local time, and something random, because many a script starts
    several runs at once."""
    while True:
        name = check_run_name(f"{prefix}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}")
        if not (runs_dir(where) / name).exists():
            return name


def numbered_names(name: str) -> Iterator[str]:
    """The names that a new run may get that is to be called ``name``, in order: ``name``, ``name-2``, ``name-3``."""
    yield name
    for number in itertools.count(2):
        ending = f"-{number}"
        yield name[: MAX_RUN_NAME - len(ending)] + ending


def is_name_for(found: str, name: str) -> bool:
    """``found`` is ``name``, or ``name`` with a number."""
    number = found.rpartition("-")[2]
    return found == name or (number.isdigit() and found == name[: MAX_RUN_NAME - len(number) - 1] + f"-{number}")


def is_taken(path: Path) -> bool:
    """A new run cannot have this directory: something of another run is in it."""
    try:
        names = os.listdir(path)
    except OSError:
        # Where nothing can be made, it is reported when that is tried.
        return os.path.lexists(path)
    return any(name == RUN_FILE or _IS_RECORDING(name) for name in names) or is_locked(path)


def free_name(root: Path, name: str, launch: str | None = None) -> str:
    """The name that a run that starts now in ``root`` gets, unless another one takes it first: the first of
    :func:`numbered_names` that is not taken, or that of the run that ``launch`` starts again."""
    return next(one for one in numbered_names(check_run_name(name)) if is_own_name(root / one, launch))


def is_own_name(path: Path, launch: str | None) -> bool:
    """Whether a run that starts now can have this directory: it is not taken, or by the run whose newest attempt is of
    the same ``launch``, see :func:`offloop.bus.processes.restarted_launch`."""
    if not is_taken(path):
        return True
    with contextlib.suppress(RunDirectoryError):
        return launch is not None and read_run(path).last.info.get("launch") == launch
    return False


def names_in(root: Path) -> list[str]:
    """The names of what is in a runs directory; none when it does not exist.

    Raises:
        RunDirectoryError: the directory cannot be read.
    """
    try:
        return os.listdir(root)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise RunDirectoryError(
            f"{root} is a file; runs live in a directory: choose another with '--runs-dir'", path=root
        ) from None
    except OSError as error:
        raise RunDirectoryError(f"the runs directory {root} cannot be read: {error.strerror}", path=root) from None


def list_runs(where: str | os.PathLike[str] | None = None) -> list[RunInfo]:
    """Every run in a runs directory, the newest first; empty when the directory does not exist.

    Raises:
        RunDirectoryError: the directory cannot be read. A run that cannot be read is named in the log and left out.
    """
    root = runs_dir(where)
    paths = [root / name for name in names_in(root) if os.path.exists(root / name / RUN_FILE)]
    return sorted(_readable(paths), key=lambda run: run.started, reverse=True)


def _readable(paths: Iterable[Path]) -> Iterator[RunInfo]:
    for path in paths:
        try:
            yield read_run(path)
        except RunDirectoryError as error:
            # One damaged run must not hide the others.
            _log.warning("%s", error)


def find_run(name: str | os.PathLike[str], where: str | os.PathLike[str] | None = None) -> RunInfo:
    """The run of that name, or of that directory.

    Raises:
        RunNotFoundError: no run has that name; the message lists those that exist.
    """
    root = runs_dir(where)
    for path in (root / name, Path(name)):
        if (path / RUN_FILE).is_file():
            return read_run(path)
    known = [run.name for run in list_runs(root)]
    exist = f"there are {', '.join(known[:5])}{' and more' if len(known) > 5 else ''}" if known else "there is none yet"
    raise RunNotFoundError(
        f"no run {str(name)!r} in {in_words(root)}: {exist}; 'offloop runs' lists them, "
        "'--runs-dir' or OFFLOOP_RUNS_DIR looks elsewhere",
        run=str(name),
    )


def read_run(path: Path) -> RunInfo:
    """Reads one run's directory.

    Raises:
        RunDirectoryError: its ``run.json`` is missing, cannot be read or is damaged.
    """
    record = broker = None
    try:
        directory = open_directory(path)
    except FileNotFoundError:
        locked = False
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}", path=path) from None
    else:
        try:
            while True:
                locked = _is_locked_in(directory)
                # A broker that ends its run writes down how before it takes its addresses away: read in the other
                # order, a run that ends just now would be neither live nor over.
                broker = read_record(path / BROKER_FILE, directory, BrokerRecord) if locked else None
                record = read_record(path / RUN_FILE, directory, RunRecord)
                if _is_locked_in(directory) == locked:
                    break
        finally:
            os.close(directory)
    if record is None or not record.attempts:
        what = "is missing" if record is None else "has no attempt"
        raise RunDirectoryError(f"{path / RUN_FILE} {what}{what_is_left(path)}", path=path / RUN_FILE)
    attempts = tuple(
        replace(attempt, status="lost") if attempt.status == "running" and not locked else attempt
        for attempt in record.attempts
    )
    broker = broker or BrokerRecord()
    # A broker that is just about to begin the next attempt does not serve the one before.
    live = broker.attempt == attempts[-1].number
    name = os.path.basename(os.path.abspath(path))
    return RunInfo(name, path, live, attempts, broker.control_endpoint, broker.event_feed, record.id, record.name)


def is_locked(path: Path) -> bool:
    """A broker holds the run's lock, which ends with the broker's process however that ends."""
    try:
        directory = open_directory(path)
    except OSError:
        return False
    try:
        return _is_locked_in(directory)
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


class NextAttempt(NamedTuple):
    """One host's knowledge of a run that is about to begin on several."""

    number: int
    """The attempt that would be the next one here."""
    run_id: str | None
    """The run's identity (:attr:`RunInfo.id`); ``None`` where there is nothing of it yet."""


def next_attempt(root: Path, name: str) -> NextAttempt:
    """This host's knowledge of a run's next attempt, for hosts to agree on one.

    Raises:
        RunIsLiveError: a broker holds it.
        RunDirectoryError: it cannot be read.
    """
    path = root / check_run_name(name)
    if is_locked(path):
        raise _is_live(root, name)
    try:
        directory = open_directory(path)
    except FileNotFoundError:
        return NextAttempt(1, None)
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}", path=path) from None
    try:
        record = read_record(path / RUN_FILE, directory, RunRecord)
    finally:
        os.close(directory)
    known = () if record is None else (attempt.number for attempt in record.attempts)
    return NextAttempt(_next_attempt(path, known)[0], None if record is None else record.id)


def _next_attempt(path: Path, known: Iterable[int]) -> tuple[int, Path]:
    number = 1 + max(known, default=0)
    # A broker that was killed at once leaves a recording that is listed nowhere.
    while os.path.lexists(recording := path / f"recording-{number}.mcap"):
        number += 1
    return number, recording


def _is_live(root: Path, name: str) -> RunIsLiveError:
    return RunIsLiveError(
        f"run {name!r} in {root} is live already: choose another run name, or wait until it ends", run=name
    )


class RunDirectory:
    """A run's directory in the hands of the broker that serves it: locked, described, given its next attempt.

    ``run_id`` is the identity of a run that is new there, by default a new one.

    Raises:
        RunIsLiveError: another broker holds it.
        RunDirectoryError: it cannot be made or written.
    """

    def __init__(self, root: Path, name: str, run_id: str | None = None) -> None:
        self.path = root / check_run_name(name)
        self.name = name
        self._lock = self._directory = -1
        self._began_at: float | None = None
        try:
            with _explained(self.path):
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._directory = open_directory(self.path)
                check_owner(self._directory)
                make_private(self._directory)
                self._lock = open_file(LOCK_FILE, os.O_RDWR | os.O_CREAT, dir_fd=self._directory)
            if not run_lock.take(self._lock):
                raise _is_live(root, name)
            # The directory's name is the run's, also after it has been moved.
            # A file that cannot be read is left as it is.
            known = read_values(self.path / RUN_FILE, self._directory, RunRecord) or {}
            identity = known.get("id") or run_id or new_run_id()
            self._record = {"attempts": []} | known | {"id": identity, "name": name}
            # What a killed broker left behind would send consumers to an address where nothing listens.
            self._remove_traces()
        except BaseException:
            self._close()
            raise

    @classmethod
    def take_free(cls, root: Path, name: str, launch: str | None = None) -> "RunDirectory":
        """Takes the directory of a run that starts now and is to be called ``name``, as :func:`free_name` chooses it.

        Raises:
            RunDirectoryError: it cannot be made or written.
        """
        while True:
            path = root / free_name(root, name, launch)
            is_new = not is_taken(path)
            try:
                directory = cls(root, path.name)
            except RunIsLiveError:
                if not is_new:
                    raise
                # Another one has taken it just now.
                continue
            if not is_new or directory.next_attempt()[0] == 1:
                return directory
            directory.release()

    @property
    def run_id(self) -> str:
        """The run's identity: see :attr:`RunInfo.id`."""
        return str(self._record["id"])

    def next_attempt(self) -> tuple[int, Path]:
        """The number of the next attempt, and where its recording goes."""
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
        """Writes down that an attempt has begun, whose recording is there; ``started`` is by default now, and
        ``local_world_size`` all ranks."""
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
        """Marks an attempt whose broker ended before it as live again. Returns its recording, its number of ranks, how
        many of them publish here, and what is known of its publishers.

        Raises:
            BrokerError: it is not the newest attempt, or it has ended otherwise.
        """
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
        """The newest attempt in ``run.json``, if its broker ended before it."""
        attempts = self._record["attempts"]
        return attempts[-1] if attempts and attempts[-1].get("status") in ("running", "lost") else None

    def describe_status(self) -> str:
        """Status of the newest attempt, for messages."""
        attempts = self._record["attempts"]
        if not attempts:
            return "the run's directory was removed or made anew"
        return f"attempt {attempts[-1]['attempt']} is the newest and is {attempts[-1]['status']}"

    def note_publisher(self, publisher: dict[str, Any]) -> None:
        """Writes down which process publishes a rank: ``rank``, ``pid``, ``started``, ``host``, ``publisher_id``."""
        entry = self._record["attempts"][-1]
        others = [other for other in entry["publishers"] if other.get("rank") != publisher["rank"]]
        entry["publishers"] = [*others, publisher]
        self._write(RUN_FILE, self._record)

    def note_pause(self, pause: Pause | None) -> None:
        """Records that the training is paused, or has resumed."""
        entry = self._record["attempts"][-1]
        entry.pop("paused", None)
        if pause is not None:
            entry["paused"] = asdict(pause)
        self._write(RUN_FILE, self._record)

    def announce(self, number: int, control_endpoint: str, event_feed: str) -> None:
        """Writes down where the broker of an attempt listens: from here on it is live."""
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
        """Writes down how the attempt ended, and how far it came, also on a full disk; ``trouble`` stands in the place
        of an error where there is none. ``ended`` is by default now, ``gaps`` are the events behind the end of the
        recording."""
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
            entry["reached"] = asdict(reached)
        if gaps:
            entry["gaps"] = list(gaps)
        with _explained(self.path):
            replace_file_in_reserve(self._directory, RUN_FILE, _as_text(self._record), _RESERVE_FILE)

    def release(self) -> None:
        """Gives the directory back: it is not live any more."""
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
    """Sees whether a run's directory can be made in ``root``, which is made if it is not there.

    Raises:
        RunDirectoryError: it cannot.
    """
    with _explained(root):
        root.mkdir(parents=True, exist_ok=True)
        if not os.access(root, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def socket_address(path: Path) -> str:
    """The address of a Unix socket at ``path``.

    Raises:
        ConfigurationError: the path is longer than the system allows for a socket, or not UTF-8.
    """
    encoded = os.fsencode(path.absolute())
    shown = encoded.decode("utf-8", "backslashreplace")
    if shown.encode() != encoded:
        raise ConfigurationError(
            f"the path {shown} is not UTF-8: choose another runs directory with '--runs-dir' or OFFLOOP_RUNS_DIR"
        )
    if len(encoded) > _SOCKET_PATH_LIMIT:
        raise ConfigurationError(
            f"the path {shown} has {len(encoded)} bytes and a socket's may have {_SOCKET_PATH_LIMIT}: "
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


class Origin(NamedTuple):
    """The attempt that was recorded, and the recording, of a run that ``offloop replay`` serves. It stands among what a
    publisher says of itself, and so in the ``run.json`` of the served run."""

    run: str
    attempt: int
    path: str
    """The recording, on the machine that served it."""

    def info(self) -> dict[str, Any]:
        """The ``info`` of the served run's publishers."""
        return {_REPLAY_OF: self._asdict()}

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> "Origin | None":
        """Reads it from a publisher's ``info``; ``None`` if that is not a replay."""
        origin = info.get(_REPLAY_OF)
        if not isinstance(origin, Mapping):
            return None
        run, attempt, path = (origin.get(name) for name in cls._fields)
        if isinstance(run, str) and isinstance(attempt, int) and isinstance(path, str):
            return cls(run, attempt, path)
        return None

    def __str__(self) -> str:
        return f"run {self.run}, attempt {self.attempt} ({self.path})"
