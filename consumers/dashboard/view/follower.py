"""A thread that brings a run to what shows it."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from bus.errors import OffloopError
from bus.subscriber.subscriber import Subscriber
from consumers.dashboard.view.tap import MonitoredRun, RunTap
from consumers.runner.runner import Runner
from consumers.runner.streams import Stream


class RunFollower(threading.Thread):
    """Reads one attempt of a run to its end."""

    def __init__(self, run: MonitoredRun, open_stream: "Callable[[RunTap], Stream]", every: int | str) -> None:
        super().__init__(name="offloop-follower", daemon=True)
        self._run = run
        self._feed = RunTap(run, every)
        self._open = open_stream
        self._runner: Runner | None = None
        self._left = False

    def run(self) -> None:
        """Handles every event; what goes wrong is shown on the page."""
        try:
            with _closing(self._open(self._feed)) as stream:
                self._runner = Runner(stream, [self._feed], self._feed.destinations())
                if not self._left:
                    self._runner.run()
        except OffloopError as error:
            self._run.problem = str(error)

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
