"""A thread that brings a run to what shows it."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from offloop.bus.errors import OffloopError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.bus.types.event import Event
from offloop.consumers.api.logger import Logger
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.tap import MonitoredRun, RunTap
from offloop.consumers.runner.places import Stream
from offloop.consumers.runner.runner import Runner

READERS = 2
"""So many runs of one page have their histories read at the same time: more threads would only take turns, and what
shows the runs would have to wait for all of them."""

_LOOK_SECONDS = 0.1
_SILENT_SECONDS = 1.0


class Turns:
    """Has a few followers at a time read the history of their run. One that has come to what is live, or of whose run
    nothing has come for a second, lets the next one begin."""

    def __init__(self, count: int = READERS) -> None:
        self._free = threading.BoundedSemaphore(count)
        self._taken: list[Turn] = []

    @contextlib.contextmanager
    def take(self, view: RunView, gives_up: Callable[[], bool]) -> "Iterator[Turn | None]":
        """Waits for a turn to read what goes to that view; gives ``None`` when that was given up."""
        while not self._free.acquire(timeout=_LOOK_SECONDS):
            if gives_up():
                yield None
                return
            for turn in tuple(self._taken):
                turn.end_if_silent()
        turn = Turn(view, self._free)
        self._taken.append(turn)
        try:
            yield turn
        finally:
            self._taken.remove(turn)
            turn.end()


class Turn:
    """The right to read a history now."""

    def __init__(self, view: RunView, free: threading.Semaphore) -> None:
        self.began_ns = time.time_ns()
        self._view = view
        self._free = free
        self._lock = threading.Lock()
        self._is_over = False
        self._came = time.monotonic()
        self._version = view.version

    def end(self) -> None:
        """Lets the next one begin; a second time it does nothing."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                self._free.release()

    def end_if_silent(self) -> None:
        """Ends it when nothing has come for a second."""
        if self._view.version != self._version:
            self._version, self._came = self._view.version, time.monotonic()
        elif time.monotonic() > self._came + _SILENT_SECONDS:
            self.end()


class _Feed(RunTap):
    """Ends a turn with the first event that is newer than it."""

    turn: Turn | None = None

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        """Takes in an event of any rank."""
        super().run_event(event, state, logger)
        if self.turn is not None and state.time_ns >= self.turn.began_ns:
            self.turn.end()
            self.turn = None


class RunFollower(threading.Thread):
    """Reads one attempt of a run to its end.

    Args:
        open_stream: opens the stream for the demand of a callback.
        every: after how many batches phases are measured.
        turns: shared by those that are not to read their histories all at once. Until its turn has come, a run shows
            the summary that may lie beside its ``recording``.
    """

    def __init__(
        self,
        run: MonitoredRun,
        open_stream: "Callable[[RunTap], Stream]",
        every: int | str,
        turns: Turns | None = None,
        recording: Path | None = None,
    ) -> None:
        super().__init__(name="offloop-follower", daemon=True)
        self._run = run
        self._feed = _Feed(run, every)
        self._open = open_stream
        self._turns = turns or Turns()
        self._recording = recording
        self._runner: Runner | None = None
        self._left = False

    def run(self) -> None:
        """Handles every event; what goes wrong is shown on the page."""
        try:
            if self._recording is not None:
                self._feed.show_summary(self._recording)
            with self._turns.take(self._run.view, lambda: self._left) as turn:
                if turn is not None:
                    self._feed.turn = turn
                    self._follow()
        except OffloopError as error:
            self._run.problem = str(error)

    def _follow(self) -> None:
        with _closing(self._open(self._feed)) as stream:
            self._runner = Runner(stream, [self._feed], self._feed.destinations())
            if not self._left:
                self._runner.run()

    def stop(self) -> None:
        """Ends it as soon as it can be."""
        self._left = True
        if self._runner is not None:
            self._runner.stop()


@contextlib.contextmanager
def _closing(stream: Stream) -> Iterator[Stream]:
    try:
        yield stream
    finally:
        if isinstance(stream, Subscriber):
            stream.close()
