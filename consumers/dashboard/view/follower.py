"""A thread that adds the events of a run to its view."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from offloop.bus.errors import OffloopError
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.tap import MonitoredRun, RunTap
from offloop.consumers.runner.places import Stream
from offloop.consumers.runner.runner import Runner

READERS = 2
"""Runs of one page whose histories are read at the same time: more threads would only take turns, and what shows the
runs would have to wait for all of them."""

_LOOK_SECONDS = 0.1
_SILENT_SECONDS = 1.0


@dataclass
class _Reading:
    """A history that is being read."""

    view: RunView
    version: int = -1
    came: float = 0.0
    began_ns: int = field(default_factory=time.time_ns)
    is_over: bool = False

    def goes_on(self) -> bool:
        if self.view.version != self.version:
            self.version, self.came = self.view.version, time.monotonic()
        is_silent = time.monotonic() > self.came + _SILENT_SECONDS
        return not self.is_over and not is_silent and self.view.last_ns < self.began_ns


class HistoryLimit:
    """Lets a few followers at a time read the history of their run: until its events are those of the present, or none
    has come for a second."""

    def __init__(self, count: int = READERS) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._reading: list[_Reading] = []

    @contextlib.contextmanager
    def take(self, view: RunView, gives_up: Callable[[], bool]) -> Iterator[bool]:
        """Wait for a turn to read the history of a view; give ``False`` when that was given up."""
        while (reading := self._begin(view)) is None:
            if gives_up():
                yield False
                return
            time.sleep(_LOOK_SECONDS)
        try:
            yield True
        finally:
            reading.is_over = True

    def _begin(self, view: RunView) -> _Reading | None:
        with self._lock:
            self._reading = [one for one in self._reading if one.goes_on()]
            if len(self._reading) >= self._count:
                return None
            self._reading.append(_Reading(view))
            return self._reading[-1]


class RunFollower(threading.Thread):
    """Reads one attempt of a run to its end.

    Args:
        open_stream: opens the stream for the demand of a callback.
        every: batches from one measurement of phases to the next.
        turns: shared by followers that read their histories one after the other. Until its turn has come, a run shows
            the summary beside its ``recording``, if there is one.
    """

    def __init__(
        self,
        run: MonitoredRun,
        open_stream: "Callable[[RunTap], Stream]",
        every: int | str,
        turns: HistoryLimit | None = None,
        recording: Path | None = None,
    ) -> None:
        super().__init__(name="offloop-follower", daemon=True)
        self._run = run
        self._feed = RunTap(run, every)
        self._open = open_stream
        self._turns = turns or HistoryLimit()
        self._recording = recording
        self._runner: Runner | None = None
        self._left = False

    def run(self) -> None:
        """Add every event; a failure is shown on the page."""
        try:
            if self._recording is not None:
                self._feed.show_summary(self._recording)
            with self._turns.take(self._run.view, lambda: self._left) as turn:
                if turn:
                    self._follow()
        except OffloopError as error:
            self._run.problem = str(error)

    def _follow(self) -> None:
        with _closing(self._open(self._feed)) as stream:
            self._runner = Runner(stream, [self._feed], self._feed.destinations())
            if not self._left:
                self._runner.run()

    def stop(self) -> None:
        """End it as soon as it can be."""
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
