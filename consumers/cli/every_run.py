"""Runs callbacks on all runs of a folder in one process, until it is stopped."""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from offloop.bus.errors import ConfigurationError, OffloopError
from offloop.bus.runs.directory import names_in, runs_dir
from offloop.bus.terminal import handle_signals
from offloop.consumers.api.callback import Callback
from offloop.consumers.cli.report import say, say_start
from offloop.consumers.delivery.commit import Committed
from offloop.consumers.runner.places import FolderRuns, FoundRun, Stream

if TYPE_CHECKING:
    from offloop.consumers.cli.consume import ConsumerOptions
    from offloop.consumers.runner.runner import Runner

_RECENT = 86400  # seconds for which an ended run is still read
_LOOK_SECONDS, _RETRY_SECONDS, _LEAVE_SECONDS = 1.0, 30.0, 10.0
_PAUSES = 9  # between two looks, this many times the duration of the last one passes
_READERS = threading.Semaphore(2)  # ended runs that are read at the same time


def follow_all(options: "ConsumerOptions", made: Sequence[Callback]) -> int:
    """Follow the live runs, those that ended in the last day, and new ones, each attempt in a thread."""
    if any(callback.owns_terminal for callback in made):
        raise ConfigurationError("--all is for callbacks that do not draw on the whole terminal")
    place, stopping = FolderRuns(options.runs_dir), threading.Event()
    followed: dict[tuple[str, str | None, int], _Follower] = {}

    def stop(*_: object) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()

    say(f"following all runs {place} ... (Ctrl-C ends)")
    with handle_signals(stop, signal.SIGINT, signal.SIGTERM):
        pause = 0.0
        while not stopping.wait(pause):
            began = time.monotonic()
            for name in filter(place.has, names_in(runs_dir(options.runs_dir))):
                # A run that is being changed is read the next time.
                with contextlib.suppress(OffloopError):
                    run = place.find(name)
                    key = (name, run.id, run.attempt)
                    before = followed.get(key)
                    if _is_recent(run) and (before is None or before.is_due(run)):
                        followed[key] = _Follower(options, run)
                        followed[key].start()
            pause = max(_LOOK_SECONDS, _PAUSES * (time.monotonic() - began))
        for follower in followed.values():
            follower.stop()
        for follower in followed.values():
            follower.join(_LEAVE_SECONDS)
    return 0


def _is_recent(run: FoundRun) -> bool:
    if run.is_live or run.is_starting or run.info is None:
        return run.is_live
    with contextlib.suppress(OSError):
        return (run.info.last.ended or run.info.recording.stat().st_mtime) > time.time() - _RECENT
    return False


class _Follower(threading.Thread):
    """Handles one attempt of a run to its end."""

    def __init__(self, options: "ConsumerOptions", run: FoundRun) -> None:
        super().__init__(name="offloop-follower", daemon=True)
        self._options, self._run = options, run
        self._made, self._destinations = options.create()
        self._runner: Runner | None = None
        self._left = self._failed = False
        self._next = math.inf  # time of the next try

    def is_due(self, run: FoundRun) -> bool:
        """Return True if the run has to be read again: after an error, and when a lost one is live again."""
        return not self.is_alive() and time.monotonic() > self._next and (self._failed or run.is_live)

    def run(self) -> None:
        try:
            with contextlib.nullcontext() if self._run.is_live else _READERS:
                is_over = self._left or self._handle()
        except (OffloopError, OSError) as error:
            say(f"run {self._run.name} is not followed, and tried again in {_RETRY_SECONDS:g} s: {error}")
            is_over, self._failed = False, True
        if not is_over:
            self._next = time.monotonic() + _RETRY_SECONDS

    def _handle(self) -> bool:
        from offloop.consumers.cli.consume import open_state, run_on

        with contextlib.closing(open_state(self._options, self._run)) as progress:
            if progress.found is not None and progress.found.ending is not None:
                return True
            _, ended, _ = run_on(self._options, self._run, self._made, self._destinations, progress, self._on_start)
        return ended.ending is not None and ended.ending.status != "lost"

    def _on_start(self, stream: Stream, committed: Committed | None, runner: "Runner") -> None:
        self._runner = runner
        say_start(stream, committed, runner, self._options.name)
        if self._left:
            runner.stop()

    def stop(self) -> None:
        self._left = True
        if self._runner is not None:
            self._runner.stop()
