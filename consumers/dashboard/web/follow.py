"""Several runs on one page, each followed in a thread, with new attempts as they begin."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from offloop.bus.errors import OffloopError, RunNotFoundError
from offloop.bus.protocol.order import SEVERITY, Ending
from offloop.bus.recording.recording import Recording
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.tap import READERS, RunFollower, Source
from offloop.consumers.dashboard.web.places import KEEP_SECONDS
from offloop.consumers.runner.places import FolderRuns, FoundRun, Place

_LOOK_SECONDS = 1.0
_LEAVE_SECONDS = 5.0
_REPLACED = "this run was deleted, and another one has its name: reload this page to see that one"


class FollowedRuns:
    """Followed runs of a place; with ``by_name`` only runs in its folder, never paths."""

    def __init__(self, where: Place, every: int, by_name: bool = False) -> None:
        self.runs: list[RunView] = []
        self.viewers = 0
        self.left: float = 0.0  # when the last viewer left
        self._where = where
        self._by_name = by_name
        self._every = every
        self._known: dict[str, set[int]] = {}  # run, by its path or by its name in NATS, to the followed attempts
        self._names: dict[str, str] = {}  # run to its requested name
        self._ids: dict[str, str | None] = {}  # run to its id
        self.is_replaced = False  # a run was deleted, and another one has its name
        self._followers: list[RunFollower] = []
        self._turns = threading.Semaphore(READERS)
        self._started = False
        self._placeholders: dict[str, RunView] = {}

    def add(self, name: str, wait: bool) -> bool:
        """Add a run by its name, its directory, or a recording; return True if it has begun.

        With ``wait`` it may begin later, otherwise RunNotFoundError is raised. Raises errors of unreadable recordings
        and places."""
        if isinstance(self._where, FolderRuns) and not self._by_name and Path(name).is_file():
            recording = Recording(name)
            self._follow(recording.path, recording.run_name, recording.attempt)
            return True
        try:
            run = self._find(name)
        except RunNotFoundError:
            if not wait:
                raise
            self.expect(name)
            return False
        key = f"{run.place} {run.key}"
        if key not in self._known:
            self._known[key], self._names[key] = set(), name
            self._add_attempts(key, run)
        return True

    def _find(self, name: str) -> FoundRun:
        if self._by_name and not self._where.has(name):
            raise RunNotFoundError(f"there is no run {name!r}", run=name)
        return self._where.find(name)

    def expect(self, name: str) -> None:
        if name not in self._placeholders:
            view = self._placeholders[name] = RunView(Path(name).name)
            self.runs.append(view)

    def look(self) -> None:
        for name, run in list(self._placeholders.items()):
            try:
                if not self.add(name, wait=True):
                    run.trouble = None
            except OffloopError as error:
                run.trouble = str(error)
        for key, name in list(self._names.items()):
            # A run that is being changed, or whose servers are away, is read the next time.
            with contextlib.suppress(OffloopError):
                self._add_attempts(key, self._find(name))

    def _add_attempts(self, key: str, run: FoundRun) -> None:
        known, name, info = self._known[key], self._names[key], run.info
        if self._ids.setdefault(key, run.id) != run.id:
            self.is_replaced = True
            for view in self.runs:
                if view.run_name == run.name:
                    view.trouble = _REPLACED
            return
        if info is None:
            if run.attempt not in known:
                known.add(run.attempt)
                view = self._follow(lambda: run, run.name, run.attempt, name)
                if run.status in SEVERITY:
                    view.expect_end(Ending(run.status))
            return
        for attempt in info.attempts:
            if attempt.number in known:
                continue
            is_last = attempt is info.last
            if is_last and run.is_starting:
                return
            known.add(attempt.number)
            source: Source = (lambda: run) if is_last else attempt.recording
            self._follow(source, run.name, attempt.number, name, attempt.recording).expect(info)

    def _follow(
        self, source: Source, run_name: str, attempt: int, name: str = "", recording: Path | None = None
    ) -> RunView:
        view = self._placeholders.pop(name, None)
        if view is None:
            view = RunView(run_name)
            self.runs.append(view)
        view.trouble, view.attempt = None, attempt
        self._followers.append(RunFollower(view, source, self._every, self._turns, recording))
        if self._started:
            self._followers[-1].start()
        return view

    def start(self) -> None:
        self._started = True
        for follower in self._followers:
            follower.start()

    def leave(self) -> None:
        for follower in self._followers:
            follower.stop()

    def stop(self) -> None:
        self.leave()
        for follower in self._followers:
            follower.join(_LEAVE_SECONDS)


class ChosenRuns:
    """The runs of open pages, followed by a thread while a page has a viewer, and for some seconds more."""

    def __init__(self, place: Place, every: int = 10) -> None:
        self._place = place
        self._every = every
        self._groups: dict[tuple[str, ...], FollowedRuns] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._leaves = threading.Event()

    def open(self, keys: Sequence[str]) -> tuple[Sequence[RunView], Callable[[], None]]:
        """Return the runs of a page, and a function to call when its viewer leaves."""
        key = tuple(keys)
        with self._lock:
            group = self._groups.get(key)
            if group is not None and group.is_replaced:
                # Until its viewers have left.
                self._groups[*key, f"\0{id(group)}"] = self._groups.pop(key)
                group = None
            if group is None:
                group = self._groups[key] = FollowedRuns(self._place, self._every, by_name=True)
                for name in keys:
                    try:
                        # NATS may be slow or away: the page does not wait for it.
                        is_shown = not self._place.is_elsewhere and group.add(name, wait=True)
                    except OffloopError:
                        is_shown = False
                    if not is_shown:
                        # The next look reports why.
                        group.expect(name)
                group.start()
            group.viewers += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="offloop-chosen", daemon=True)
                self._thread.start()
        return group.runs, partial(self._close, group)

    def _close(self, group: FollowedRuns) -> None:
        with self._lock:
            group.viewers -= 1
            group.left = time.monotonic()

    def stop(self) -> None:
        self._leaves.set()
        with self._lock:
            thread, groups = self._thread, list(self._groups.values())
        if thread is not None:
            thread.join(_LEAVE_SECONDS)
        for group in groups:
            group.leave()
        for group in groups:
            group.stop()

    def _follow(self) -> None:
        while True:
            with self._lock:
                now = time.monotonic()
                for key, group in list(self._groups.items()):
                    if not group.viewers and now > group.left + KEEP_SECONDS:
                        group.leave()
                        del self._groups[key]
                if not self._groups:
                    self._thread = None
                    return
                watched = [group for group in self._groups.values() if group.viewers]
            # Not under the lock: NATS may be slow or away.
            for followed in watched:
                followed.look()
            if self._leaves.wait(_LOOK_SECONDS):
                return
