"""Several runs on one page: each is followed in a thread of its own, and new attempts are found as they begin."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bus.errors import OffloopError, RunNotFoundError
from bus.net.curve import ClientSecurity
from bus.recording.recording import Recording
from bus.runs.directory import Attempt, RunInfo, find_run, list_runs, runs_dir
from consumers.dashboard.view.follower import RunFollower
from consumers.dashboard.view.run_view import RunView
from consumers.dashboard.view.tap import MonitoredRun, RunTap
from consumers.dashboard.web.access import Listening
from consumers.dashboard.web.server import DashboardServer, page_of
from consumers.runner.entries import Subscription
from consumers.runner.streams import RemoteRunInfo, Stream, attach, find_remote, is_live, list_remote

_LOOK_SECONDS = 1.0
_LEAVE_SECONDS = 5.0
_KEEP_SECONDS = 30.0


class RunsHere(NamedTuple):
    """The runs in a directory, by default the usual one."""

    directory: str | os.PathLike[str] | None = None

    def __str__(self) -> str:
        return f"in {runs_dir(self.directory)}"

    def list(self) -> Sequence[RunInfo]:
        """All of them, the newest first."""
        return list_runs(self.directory)

    def find(self, name: str) -> tuple[str, RunInfo]:
        """The run of that name, or in that directory, and what it is known by."""
        run = find_run(name, self.directory)
        return str(run.path), run


class RunsElsewhere(NamedTuple):
    """The runs of a broker, read through it alone."""

    address: str
    security: ClientSecurity | None = None

    def __str__(self) -> str:
        return f"at {self.address}"

    def list(self) -> Sequence[RemoteRunInfo]:
        """All of them, the newest first."""
        return list_remote(self.address, self.security)

    def find(self, name: str) -> tuple[str, RemoteRunInfo]:
        """The run of that name, and what it is known by."""
        return name, find_remote(self.address, name, self.security, wait=False, say=lambda text: None)


def serve_runs(
    names: Sequence[str],
    listening: Listening,
    where: RunsHere | RunsElsewhere,
    wait: bool = False,
    every: int = 10,
    say: Callable[[str], None] = print,
) -> None:
    """Serves one page with all these runs until it is interrupted. Each is a run's name, its directory, or a recording;
    without any it is those that are live, or else the newest one, and those that begin meanwhile. Every attempt of a
    run is shown, and further ones as they begin.

    With ``wait`` a run may begin later. ``every`` is after how many batches phases are measured.

    Raises:
        RunNotFoundError: there is no such run, and ``wait`` is false.
        RecordingError: a recording cannot be read.
        BrokerError: no broker answers at that address.
        ConfigurationError: the page cannot be served.
    """
    followed = _Followed(where, every)
    there = where.list()
    before = _newest_attempts(there)
    live = [run.name for run in there if is_live(run)]
    chosen = list(dict.fromkeys(names)) or live or [run.name for run in there[:1]]
    waiting = [name for name in chosen if not followed.add(name, wait)]
    if waiting or not chosen:
        say(f"waiting for {', '.join(waiting) or 'a run'} {where} ... (Ctrl-C ends)")
    server = DashboardServer(page_of(followed.runs), listening)
    server.start()
    try:
        with followed:
            while server.wait(_LOOK_SECONDS):
                # A directory that cannot be read at this moment, or a broker that is away, is asked the next time.
                with contextlib.suppress(OffloopError):
                    further = waiting if names else _names_since(before, where.list())
                    waiting = [name for name in further if not followed.add(name, wait=True)]
                followed.look()
    finally:
        server.stop()


def _newest_attempts(runs: Sequence[RunInfo | RemoteRunInfo]) -> dict[str, int]:
    return {run.name: run.attempt if isinstance(run, RemoteRunInfo) else run.last.number for run in runs}


def _names_since(before: Mapping[str, int], runs: Sequence[RunInfo | RemoteRunInfo]) -> list[str]:
    """The runs that have begun an attempt since: a short one may be over by now."""
    return [name for name, attempt in _newest_attempts(runs).items() if before.get(name) != attempt]


class _Followed:
    """The runs that are followed, and the threads that do it."""

    def __init__(self, where: RunsHere | RunsElsewhere, every: int) -> None:
        self.runs: list[MonitoredRun] = []
        self._where = where
        self._every = every
        self._known: dict[str, set[int]] = {}
        """Of each run, by its path or by its name at a broker, the attempts that are followed."""
        self._followers: list[RunFollower] = []
        self._started = False
        self._placeholders: dict[str, MonitoredRun] = {}

    def add(self, name: str, wait: bool) -> bool:
        """Takes a run in; whether it is there.

        Raises:
            RunNotFoundError: it is not, and ``wait`` is false.
            RecordingError: it is a recording that cannot be read.
            BrokerError: no broker answers.
        """
        if isinstance(self._where, RunsHere) and Path(name).is_file():
            recording = Recording(name)
            self._follow(lambda feed: recording, recording.run_name, recording.attempt)
            return True
        try:
            key, run = self._where.find(name)
        except RunNotFoundError:
            if not wait:
                raise
            if name not in self._placeholders:
                self._placeholders[name] = self._show(RunView(Path(name).name))
            return False
        if key in self._known:
            return True
        self._known[key] = set()
        self._add_attempts(key, run, name)
        return True

    def look(self) -> None:
        """Takes in the attempts that have begun since."""
        for key in self._known:
            # A run whose directory is in the middle of a change, or whose broker is away, is read the next time.
            with contextlib.suppress(OffloopError):
                self._add_attempts(key, self._where.find(key)[1], key)

    def _add_attempts(self, key: str, run: RunInfo | RemoteRunInfo, name: str) -> None:
        known = self._known[key]
        if isinstance(run, RemoteRunInfo):
            if run.attempt not in known:
                known.add(run.attempt)
                self._follow(self._opening(run), run.name, run.attempt, name)
            return
        for attempt in run.attempts:
            if attempt.number in known:
                continue
            is_last = attempt is run.last
            if is_last and not (run.live or run.away) and attempt.status == "running":
                return  # Its broker is about to serve it.
            known.add(attempt.number)
            opening = self._opening(run) if is_last else _reading(attempt)
            self._follow(opening, run.name, attempt.number, name)

    def _opening(self, run: RunInfo | RemoteRunInfo) -> "Callable[[RunTap], Stream]":
        return lambda feed: attach(run, Subscription.of([feed]))

    def _follow(self, open_stream: "Callable[[RunTap], Stream]", run_name: str, attempt: int, name: str = "") -> None:
        run = self._placeholders.pop(name, None) or self._show(RunView(run_name, attempt))
        follower = RunFollower(run, open_stream, self._every)
        self._followers.append(follower)
        if self._started:
            follower.start()

    def _show(self, view: RunView) -> MonitoredRun:
        run = MonitoredRun(view)
        self.runs.append(run)
        return run

    def __enter__(self) -> None:
        self._started = True
        for follower in self._followers:
            follower.start()

    def stop(self) -> None:
        """Has all of them end."""
        for follower in self._followers:
            follower.stop()

    def __exit__(self, *_: object) -> None:
        self.stop()
        for follower in self._followers:
            follower.join(_LEAVE_SECONDS)


def _reading(attempt: Attempt) -> "Callable[[RunTap], Stream]":
    return lambda feed: Recording(attempt.recording)


class ChosenRuns:
    """The runs that people have chosen on the page of all runs: those of one page are followed while somebody has it
    open, and for some seconds more, because pages are loaded anew."""

    def __init__(self, where: RunsHere, every: int = 10) -> None:
        self._where = where
        self._every = every
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._lock = threading.Lock()

    def open(self, names: Sequence[str]) -> Sequence[MonitoredRun]:
        """The runs of these names, for somebody who opens a page of them; those that are gone are left out."""
        key = tuple(names)
        with self._lock:
            group = self._groups.get(key)
            if group is None:
                group = self._groups[key] = _Group(_Followed(self._where, self._every))
                for name in names:
                    with contextlib.suppress(OffloopError):
                        group.followed.add(name, wait=False)
                group.followed.__enter__()
            group.viewers += 1
            return group.followed.runs

    def close(self, names: Sequence[str]) -> None:
        """Somebody has left that page."""
        with self._lock:
            group = self._groups[tuple(names)]
            group.viewers -= 1
            group.left = time.monotonic()

    def look(self) -> None:
        """Takes in the attempts that have begun since, and leaves the runs that nobody looks at."""
        with self._lock:
            for key, group in list(self._groups.items()):
                if group.viewers:
                    group.followed.look()
                elif time.monotonic() > group.left + _KEEP_SECONDS:
                    group.followed.stop()
                    del self._groups[key]

    def stop(self) -> None:
        """Leaves all of them."""
        with self._lock:
            for group in self._groups.values():
                group.followed.stop()
            for group in self._groups.values():
                group.followed.__exit__()


@dataclass
class _Group:
    followed: _Followed
    viewers: int = 0
    left: float = 0.0
