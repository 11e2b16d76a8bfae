"""The index of a folder of runs."""

import contextlib
import hashlib
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from offloop.bus.checkpoints.announced import ANNOUNCED
from offloop.bus.errors import OffloopError, RunDirectoryError
from offloop.bus.index.annotations import ANNOTATIONS, read_annotations
from offloop.bus.index.entry import RunEntry, make_entry, unreadable_entry
from offloop.bus.index.store import read_stored, store_entry
from offloop.bus.recording.derived import derived_recordings
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.summary import Summarizer, Summary
from offloop.bus.runs.directory import BROKER_FILE, RUN_FILE, RunInfo, names_in, read_run
from offloop.bus.runs.directory import runs_dir as chosen_runs_dir

_log = logging.getLogger("offloop.index")

_MOST_NAMED = 3
_STAMPED = (BROKER_FILE, ANNOUNCED.name, ANNOTATIONS.name)


class RunIndex:
    """Entries of all runs of a folder, for one thread at a time.

    Entries of ended runs are stored in their directories. Missing or damaged entries are read again from the
    recordings. An unreadable run has the status ``unreadable``."""

    def __init__(self, runs_dir: str | os.PathLike[str] | None = None) -> None:
        self.root: Path = chosen_runs_dir(runs_dir)
        self.problem: str | None = None  # why entries cannot be stored
        self._entries: dict[str, RunEntry] = {}
        self._stamps: dict[str, str] = {}
        self._followed: dict[str, _FollowedRun] = {}

    @property
    def entries(self) -> Mapping[str, RunEntry]:
        return MappingProxyType(self._entries)

    def refresh(self, seconds: float = math.inf) -> int:
        """Find changed runs, then read them for at most that many seconds; return how many runs are left.

        Raises RunDirectoryError."""
        found: dict[str, str] = {}
        for name in names_in(self.root):
            with contextlib.suppress(OSError):
                found[name] = _stamp(f"{self.root}/{name}")
        for run in (self._entries.keys() | self._followed.keys()) - found.keys():
            self._entries.pop(run, None)
            self._stamps.pop(run, None)
            self._leave(run)
        # Growing runs first, then the newest.
        changed = [
            run for run in sorted(found, key=found.__getitem__, reverse=True) if self._stamps.get(run) != found[run]
        ]
        waiting = [*(self._followed.keys() - set(changed)), *changed]
        left = len(waiting)
        # Finding changes among very many runs may take longer, and some are to be read each time.
        until = time.monotonic() + seconds
        for run in waiting:
            if time.monotonic() >= until:
                break
            left -= self._read(run, found[run], until)
        return left

    def close(self) -> None:
        for followed in self._followed.values():
            followed.close()
        self._followed.clear()
        self._stamps.clear()

    def __enter__(self) -> "RunIndex":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _leave(self, run: str) -> None:
        followed = self._followed.pop(run, None)
        if followed is not None:
            followed.close()

    def _read(self, run: str, stamp: str, until: float) -> bool:
        """Read a run; return whether it is complete for now."""
        if not _is_text(run):
            where = f"{self.root}/{run}"
            _log.warning("%s is left out: its name is not UTF-8; 'offloop edit --rename' gives it another one", where)
            self._stamps[run] = stamp
            return True
        if run not in self._followed and (stored := read_stored(self.root, run)) is not None and stored.stamp == stamp:
            self._entries[run], self._stamps[run] = stored.entry, stamp
            return True
        path = self.root / run
        try:
            info = read_run(path)
            if run in self._entries and self._entries[run].id != info.id:
                # It was deleted, and another one has its name.
                self._leave(run)
            followed = self._followed.setdefault(run, _FollowedRun())
            is_read = followed.read(info, until)
            entry, _ = followed.results(info)
        except RunDirectoryError as error:
            # One damaged run must not hide the others.
            self._leave(run)
            self._entries[run] = unreadable_entry(run, str(error), read_annotations(path))
            self._stamps[run] = stamp
            return True
        self._entries[run] = entry
        if is_read:
            self._stamps[run] = stamp
        if is_read and not entry.is_going_on:
            try:
                store_entry(path, stamp, entry)
            except RunDirectoryError as error:
                self.problem = str(error)
            else:
                self.problem = None
            self._leave(run)
        return is_read


def read_entry(run: RunInfo) -> RunEntry:
    return read_results(run)[0]


def read_results(run: RunInfo) -> tuple[RunEntry, list[Summary]]:
    """Return the entry of a run, and the summaries that it is made from, of the newest attempt last."""
    with contextlib.closing(_FollowedRun()) as followed:
        followed.read(run, math.inf)
        return followed.results(run)


def add_run(run: Path, seconds: float) -> None:
    """Add an ended run to the index of its folder, within that time. :meth:`RunIndex.refresh` adds the rest."""
    with contextlib.closing(_FollowedRun()) as followed:
        try:
            stamp, info = _stamp(str(run)), read_run(run)
            if followed.read(info, time.monotonic() + seconds) and not (entry := followed.results(info)[0]).is_going_on:
                store_entry(run, stamp, entry)
        except (OffloopError, OSError) as error:
            _log.info("the entry of run %s is not stored: %s", run.name, error)


class _FollowedRun:
    def __init__(self) -> None:
        self._attempts: dict[int, Summarizer | Summary] = {}
        self._problems: dict[int, str] = {}
        self._settled: set[int] = set()  # attempts that no longer grow and have been read, or cannot be

    @property
    def problem(self) -> str | None:
        listed = [self._problems[number] for number in sorted(self._problems, reverse=True)]
        if len(listed) > _MOST_NAMED:
            listed[_MOST_NAMED:] = [f"and {len(listed) - _MOST_NAMED:,} more"]
        return "; ".join(listed) or None

    @property
    def summaries(self) -> Iterator[Summary]:
        for number in sorted(self._attempts):
            one = self._attempts[number]
            yield one if isinstance(one, Summary) else one.summary

    def results(self, run: RunInfo) -> tuple[RunEntry, list[Summary]]:
        summaries = [*_summarize_derived(run), *self.summaries]
        return make_entry(run, summaries, read_annotations(run.path), self.problem), summaries

    def read(self, run: RunInfo, until: float) -> bool:
        """Read new events, the newest attempt first, until a ``time.monotonic``; return whether all are read."""
        is_read = True
        for attempt in reversed(run.attempts):
            one = self._attempts.get(attempt.number)
            if attempt is not run.last:
                if attempt.number in self._settled:
                    continue
                if time.monotonic() >= until:
                    return False
            try:
                if one is None:
                    # A recording from before a renaming has the old name.
                    name = run.recorded_as if attempt is run.last else Recording(attempt.recording).run_name
                    one = self._attempts[attempt.number] = Summarizer(attempt.recording, name, attempt.number, run.id)
                if isinstance(one, Summarizer):
                    is_at_end = one.work(until, saves=False)
                    is_read &= is_at_end
                    if is_at_end and attempt is not run.last:
                        one.close()
                        self._attempts[attempt.number] = one.summary
                        self._settled.add(attempt.number)
                self._problems.pop(attempt.number, None)
            except OffloopError as error:
                self._problems[attempt.number] = str(error)
                if attempt is not run.last:
                    self._settled.add(attempt.number)
        return is_read

    def close(self) -> None:
        for one in self._attempts.values():
            if isinstance(one, Summarizer):
                one.close()


def _summarize_derived(run: RunInfo) -> Iterator[Summary]:
    for recording in derived_recordings(run.path):
        with contextlib.closing(
            Summarizer(recording.path, recording.run_name, recording.attempt, recording.run_id)
        ) as made:
            made.work(math.inf, saves=False)
            yield made.summary


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stamp(run: str) -> str:
    """Return a stamp of a run's files, greater for later runs."""
    known = os.lstat(f"{run}/{RUN_FILE}")
    stamps: dict[str, str] = {}
    # A later broker may resume an attempt, checkpoints may follow, and a damaged recording may be restored.
    with contextlib.suppress(OSError), os.scandir(run) as listed:
        for entry in listed:
            if entry.name in _STAMPED or entry.name.endswith(".mcap"):
                # A recording may have been moved to another disk and be a link here.
                about = entry.stat(follow_symlinks=entry.is_symlink() and os.path.exists(entry.path))
                # A restored file may have its old modification time; the time of the change cannot be set.
                stamps[entry.name] = f"{about.st_mtime_ns}-{about.st_ctime_ns}-{about.st_size}-{about.st_ino}"
    recorded = repr((known.st_size, known.st_ino, sorted(stamps.items()))).encode()
    return f"{known.st_mtime_ns:020}.{hashlib.blake2b(recorded, digest_size=16).hexdigest()}"
