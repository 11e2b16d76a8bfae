"""The callback that feeds the view of a run, and the thread that runs it."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from offloop.bus.errors import OffloopError
from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.protocol.order import Ending
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import RunStream
from offloop.bus.recording.derived import derived_recordings
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.records import next_check_record
from offloop.bus.recording.summary import MIN_BYTES, Summarizer, Summary
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.bus.types.demand import BASE_EVENTS, Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger, LoggerDestination
from offloop.consumers.dashboard.view.history import TAIL_BYTES, History
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.runner.entries import Subscription
from offloop.consumers.runner.places import FoundRun, Stream
from offloop.consumers.runner.runner import Runner

_SHOWN_SECONDS = 0.25  # interval at which an unfinished summary is shown
READERS = 2  # runs of one page whose recordings are read at the same time; more threads would only delay the page


class RunTap(Callback):
    all_ranks = True
    sees_actors = True
    background: bool = True
    max_delay: float = 0.1
    events: frozenset[Event] = BASE_EVENTS

    def __init__(self, run: RunView, every: int | str = 10) -> None:
        self._run = run
        self.every = every

    def demand(self) -> Demand:
        events = {event: EventDemand() for event in BASE_EVENTS}
        return Demand({**events, Event.BATCH_END: EventDemand(fields={"phases": self.every})})

    def destinations(self) -> Sequence[LoggerDestination]:
        return (self._run,)

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        self._run.see(state)

    def host_windows(self, windows: Sequence[HostWindow], logger: Logger) -> None:
        self._run.take_windows(windows)

    def show_summary(self, recording: Path) -> None:
        summary = Summary.load(recording)
        if summary is not None and (summary.run, summary.attempt) == (self._run.run_name, self._run.attempt):
            self._run.load(summary)

    async def prepare(self, stream: RunStream, logger: Logger) -> None:
        recording, view = stream.recording, self._run
        view.stream = stream
        for derived in derived_recordings(stream.run_dir, [stream.attempt]):
            for snapshot in derived:
                view.see(snapshot)
        if recording is None or not recording.exists() or recording.stat().st_size < MIN_BYTES:
            return
        with contextlib.closing(Summarizer(recording, stream.run_name, stream.attempt, stream.run_id)) as summarizer:
            while not summarizer.work(time.monotonic() + _SHOWN_SECONDS, saves=False):
                view.load(summarizer.summary)
                await asyncio.sleep(0)
        summary = summarizer.summary
        offsets = [tick.offset for tick in summary.clock.values() if tick.offset <= summary.offset - TAIL_BYTES]
        found = next_check_record(recording, max(offsets)) if any(offsets) else None
        if found is None or found.check is None:
            # All events come: nothing may be shown twice.
            view.load(summary, 0)
            return
        view.load(summary, found.end)
        view.history = History(view, recording, summary, found.end)
        logger.take_from_run(summary.hyperparameters)
        stream.skip_to(found.end, {rank: (one.seq, one.base_seq) for rank, one in found.check.positions.items()})

    def run_ended(self, ending: Ending | None) -> None:
        self._run.end(ending)


Source: TypeAlias = Path | Callable[[], FoundRun]  # A recording, or a function that finds a run


class RunFollower(threading.Thread):
    """Reads one attempt of a run to its end.

    ``every`` is the interval of the measurement of phases, in batches. ``turns`` limits the followers that read
    recordings at the same time. Until its turn a run shows the summary beside its ``recording``."""

    def __init__(
        self,
        view: RunView,
        source: Source,
        every: int | str,
        turns: threading.Semaphore | None = None,
        recording: Path | None = None,
    ) -> None:
        super().__init__(name="offloop-follower", daemon=True)
        self._view = view
        self._feed = RunTap(view, every)
        self._source = source
        self._turns = turns or threading.Semaphore()
        self._recording = recording
        self._runner: Runner | None = None
        self._left = False

    def run(self) -> None:
        try:
            if self._recording is not None:
                self._feed.show_summary(self._recording)
            with self._turns:
                if self._left:
                    return
                source = self._source
                stream: Stream
                if isinstance(source, Path):
                    stream = Recording(source)
                else:
                    stream = source().attach(Subscription.of([self._feed]))
                if not isinstance(stream, Subscriber):
                    self._follow(stream)
                    return
            with contextlib.closing(stream):
                self._follow(stream)
        except OffloopError as error:
            self._view.trouble = str(error)
        except Exception as error:  # such as too many open files, in any library
            self._view.trouble = f"{type(error).__name__}: {error}"
            raise

    def _follow(self, stream: RunStream) -> None:
        self._runner = Runner(stream, [self._feed], self._feed.destinations())
        if not self._left:
            self._runner.run()

    def stop(self) -> None:
        self._left = True
        if self._runner is not None:
            self._runner.stop()
