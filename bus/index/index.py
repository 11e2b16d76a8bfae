"""The index of a folder of runs.

run.json, recordings, annotations -> the entry of each run -> memory, and a database beside the runs
"""

import contextlib
import logging
import math
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TypeAlias

from bus.checkpoints.folders import FOLDERS_FILE
from bus.errors import OffloopError, RunDirectoryError
from bus.index.annotations import ANNOTATIONS_FILE, read_annotations
from bus.index.database import Database
from bus.index.entry import RunEntry, make_entry
from bus.recording.recording import Recording
from bus.recording.summary import Point, Summarizer, Summary
from bus.runs.directory import BROKER_FILE, RUN_FILE, RunInfo, read_run
from bus.runs.directory import runs_dir as chosen_runs_dir

_log = logging.getLogger("offloop.index")

INDEX_FILE = "index.sqlite"
_SAVE_SECONDS = 0.5
_MAX_BUCKETS = 100
"""Of a series that is stored, each of up to three points."""

_Unsaved: TypeAlias = dict[str, tuple[str, RunEntry, Sequence[tuple[str, list[Point]]] | None]]
"""Name of a run to its stamp, its entry, and its series if they may have changed."""


class RunIndex:
    """Every run of a folder, with its hyperparameters, its metrics and what people say of it.

    :meth:`refresh` brings it up to date. What it knows lies in a database beside the runs, ``index.sqlite``, so that
    the next one begins there; the recordings are the record, and a database that is deleted or damaged is made again.
    For one thread at a time.
    """

    def __init__(self, runs_dir: str | os.PathLike[str] | None = None) -> None:
        self.root = chosen_runs_dir(runs_dir)
        self._database: Database | None = None
        self._entries: dict[str, RunEntry] = {}
        self._stamps: dict[str, str] = {}
        self._followed: dict[str, _FollowedRun] = {}

    @property
    def entries(self) -> Mapping[str, RunEntry]:
        """What is known of each run, by the name of its directory, as of the last :meth:`refresh`."""
        return MappingProxyType(self._entries)

    @property
    def problem(self) -> str | None:
        """Why nothing is stored, so that the next one must read everything again; ``None`` while all is well."""
        return None if self._database is None else self._database.problem

    def refresh(self, seconds: float = math.inf) -> int:
        """Looks at what has changed on the disk, for so many seconds at most; returns how many runs have yet to be
        looked at.

        Raises:
            RunDirectoryError: the folder cannot be read.
        """
        until = time.monotonic() + seconds
        found = _find(self.root)
        if not found and not self.root.is_dir():
            self._restart()
            return 0
        for _ in range(2):
            try:
                return self._refresh(found, until)
            except sqlite3.Error as error:
                _log.warning("the index of %s is opened again: %s", self.root, error)
                self._restart(error)
                problem = f"the index {self.root / INDEX_FILE} cannot be used: {error}"
        # A full disk, for example.
        self._database = Database(self.root / INDEX_FILE, problem=problem)
        return self._refresh(found, until)

    def series(self, run: str, metric: str) -> list[Point]:
        """Steps and values of a metric of a run, thinned to some hundred; empty where there is none."""
        followed = self._followed.get(run)
        if followed is not None:
            return followed.series(metric)
        try:
            return [] if self._database is None else self._database.series(run, metric)
        except sqlite3.Error as error:
            _log.warning("the index of %s is opened again: %s", self.root, error)
            self._restart(error)
            return []

    def close(self) -> None:
        """Closes the database and the recordings that it follows."""
        self._restart()

    def __enter__(self) -> "RunIndex":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refresh(self, found: Mapping[str, str], until: float) -> int:
        database = self._opened()
        for run in self._entries.keys() | self._followed.keys():
            if run not in found:
                self._forget(run)
        # What still changes, and then the newest first, because people look at those.
        changed = [
            run for run in sorted(found, key=found.__getitem__, reverse=True) if self._stamps.get(run) != found[run]
        ]
        waiting = [*(self._followed.keys() - set(changed)), *changed]
        left = len(waiting)
        unsaved: _Unsaved = {}
        save_at = time.monotonic() + _SAVE_SECONDS
        for run in waiting:
            now = time.monotonic()
            if now >= save_at or now >= until:
                _save(database, unsaved)
                save_at = time.monotonic() + _SAVE_SECONDS
            if now >= until:
                break
            left -= self._read(database, run, found[run], until, unsaved)
        _save(database, unsaved)
        return left

    def _opened(self) -> Database:
        if self._database is not None and not self._database.is_current:
            self._restart()
        if self._database is None:
            self._database = Database(self.root / INDEX_FILE)
            for run, stamp, entry in self._database.entries():
                self._entries[run], self._stamps[run] = entry, stamp
        return self._database

    def _restart(self, error: sqlite3.Error | None = None) -> None:
        if self._database is not None:
            self._database.close(error)
            self._database = None
        for followed in self._followed.values():
            followed.close()
        self._followed.clear()
        self._stamps.clear()

    def _forget(self, run: str) -> None:
        self._entries.pop(run, None)
        self._stamps.pop(run, None)
        followed = self._followed.pop(run, None)
        if followed is not None:
            followed.close()
        assert self._database is not None  # opened before
        self._database.remove(run)

    def _read(self, database: Database, run: str, stamp: str, until: float, unsaved: _Unsaved) -> bool:
        """Takes in what is known of a run; returns whether that is all for now."""
        path = self.root / run
        if not _is_text(run):
            _log.warning("%s is left out: its name is not UTF-8; 'bus rename' gives it another one", path)
            self._stamps[run] = stamp
            return True
        if run not in self._followed and database.stamp(run) == stamp:
            # Another process has looked at it meanwhile.
            self._entries[run], self._stamps[run] = database.entry(run), stamp
            return True
        known = self._entries.get(run)
        if known is not None and run not in self._followed and _recorded(self._stamps.get(run, "")) == _recorded(stamp):
            # Only what people say of it has changed.
            self._entries[run] = known.annotated(read_annotations(path))
            self._stamps[run] = stamp
            unsaved[run] = stamp, self._entries[run], None
            return True
        try:
            info = read_run(path)
            followed = self._followed.setdefault(run, _FollowedRun())
            is_read = followed.read(info, until)
            entry = make_entry(info, followed.summaries, read_annotations(path), followed.problem)
        except RunDirectoryError as error:
            # One damaged run must not hide the others.
            _log.warning("%s", error)
            self._forget(run)
            self._stamps[run] = stamp
            return True
        self._entries[run] = entry
        if is_read:
            self._stamps[run] = stamp
        if entry.is_going_on or not is_read:
            # The next process sees it as it is now, and looks again.
            unsaved[run] = "", entry, ()
        else:
            unsaved[run] = stamp, entry, list(followed.all_series())
            followed.close()
            del self._followed[run]
        return is_read


def read_entry(run: RunInfo) -> RunEntry:
    """What is known of a run, read anew from its directory."""
    followed = _FollowedRun()
    try:
        followed.read(run, math.inf)
        return make_entry(run, followed.summaries, read_annotations(run.path), followed.problem)
    finally:
        followed.close()


def add_run(run: Path, seconds: float) -> None:
    """Adds a run that has ended to the index of its folder, if that takes so many seconds at most and no other process
    writes there. What is missing is added by :meth:`RunIndex.refresh`."""
    followed = _FollowedRun()
    try:
        stamp, info = _stamp(str(run)), read_run(run)
        if not followed.read(info, time.monotonic() + seconds):
            return
        entry = make_entry(info, followed.summaries, read_annotations(run), followed.problem)
        with contextlib.closing(Database(run.parent / INDEX_FILE, busy_seconds=0.0)) as database:
            if database.problem is None and not entry.is_going_on:
                _save(database, {run.name: (stamp, entry, list(followed.all_series()))})
    except (OffloopError, OSError, sqlite3.Error) as error:
        _log.info("run %s is not added to the index: %s", run.name, error)
    finally:
        followed.close()


class _FollowedRun:
    """What is known of the recordings of a run, which may grow."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """What could not be read."""
        self._attempts: dict[int, Summarizer | Summary] = {}

    @property
    def summaries(self) -> Iterator[Summary]:
        """One of each attempt that could be read."""
        for number in sorted(self._attempts):
            one = self._attempts[number]
            yield one if isinstance(one, Summary) else one.summary

    def read(self, run: RunInfo, until: float) -> bool:
        """Takes in what was recorded meanwhile, until that time of ``time.monotonic``; returns whether that was all."""
        problems = []
        is_read = True
        for attempt in run.attempts:
            one = self._attempts.get(attempt.number)
            try:
                if one is None:
                    # An attempt before the run was renamed has the name of that time in its recording.
                    name = run.recorded_as if attempt is run.last else Recording(attempt.recording).run_name
                    one = self._attempts[attempt.number] = Summarizer(attempt.recording, name, attempt.number, run.id)
                if isinstance(one, Summarizer):
                    is_at_end = one.work(until, saves=False)
                    is_read &= is_at_end
                    if is_at_end and attempt is not run.last:
                        # It grows no more.
                        one.close()
                        self._attempts[attempt.number] = one.summary
            except OffloopError as error:
                problems.append(str(error))
        self.problem = "; ".join(problems) or None
        return is_read

    def series(self, metric: str) -> list[Point]:
        """A metric over all attempts, by step: where two attempts have the same steps, that of the later one."""
        found: list[Point] = []
        for summary in self.summaries:
            if metric in summary.metrics:
                later = summary.metrics[metric].thinned(_MAX_BUCKETS).points()
                found = [*(point for point in found if point[0] < later[0][0]), *later] if later else found
        return found

    def all_series(self) -> Iterator[tuple[str, list[Point]]]:
        """Each metric with its series."""
        for name in dict.fromkeys(name for summary in self.summaries for name in summary.metrics):
            yield name, self.series(name)

    def close(self) -> None:
        """Closes the recordings."""
        for one in self._attempts.values():
            if isinstance(one, Summarizer):
                one.close()


def _save(database: Database, unsaved: _Unsaved) -> None:
    if unsaved:
        with database.changing():
            for run, (stamp, entry, series) in unsaved.items():
                database.store(run, stamp, entry, series)
        unsaved.clear()


def _find(root: Path) -> dict[str, str]:
    """Each run in a folder, with a stamp that changes with what is written in its directory about it. Later runs have
    greater stamps."""
    found: dict[str, str] = {}
    try:
        with os.scandir(root) as folder:
            for entry in folder:
                with contextlib.suppress(OSError):
                    found[entry.name] = _stamp(entry.path)
    except FileNotFoundError:
        return {}
    except NotADirectoryError:
        raise RunDirectoryError(
            f"{root} is a file; runs live in a directory: choose another with '--runs-dir'", path=root
        ) from None
    except OSError as error:
        raise RunDirectoryError(f"the runs directory {root} cannot be read: {error.strerror}", path=root) from None
    return found


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stamp(run: str) -> str:
    """Raises :class:`OSError` for a directory that is not one of a run."""
    stamp = f"{os.stat(f'{run}/{RUN_FILE}').st_mtime_ns:020}"
    # A broker may take up again what an earlier one has left, and checkpoints may come later. Behind the last dot is
    # what people say.
    for name in (BROKER_FILE, FOLDERS_FILE, ANNOTATIONS_FILE):
        try:
            found = os.stat(f"{run}/{name}")
        except OSError:
            stamp += "."
        else:
            stamp += f".{found.st_mtime_ns}-{found.st_size}"
    return stamp


def _recorded(stamp: str) -> str:
    return stamp.rpartition(".")[0]
