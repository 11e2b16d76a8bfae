"""A run that a dashboard shows, the callback that feeds it, and the thread that runs it."""

import asyncio
import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from offloop.bus.errors import OffloopError
from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.protocol.order import Ending
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import RunStream
from offloop.bus.recording.summary import MIN_BYTES, Summarizer, Summary
from offloop.bus.recording.walk import next_check_record
from offloop.bus.runs.directory import RunInfo, read_run
from offloop.bus.subscriber.commands import sent_by
from offloop.bus.subscriber.merged import MergedSubscriber
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.bus.types.commands import Argument, Outcome
from offloop.bus.types.demand import BASE_EVENTS, Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Images, Logger, LoggerDestination, Row, RunContext, Text
from offloop.consumers.dashboard.view.history import TAIL_BYTES, History
from offloop.consumers.dashboard.view.progress import progress_of
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.runner.places import Stream
from offloop.consumers.runner.runner import Runner

_SHOWN_SECONDS = 0.25
"""Interval at which an unfinished summary is shown."""
READERS = 2
"""Runs of one page whose recordings are read at the same time: more threads would only take turns, and what shows the
runs would have to wait for all of them."""


class MonitoredRun:
    """One attempt of a run on a dashboard."""

    def __init__(self, view: RunView) -> None:
        self.view = view
        self.command: Callable[..., Outcome] | None = None
        """Sends a command to the training; ``None`` where it takes none."""
        self.problem: str | None = None
        """The reason why it cannot be watched any further."""
        self.key = secrets.token_hex(8)
        """Its name in the addresses of its images and files."""
        self.run_dir: Path | None = None
        """Its directory, if that is on this machine."""
        self.history: History | None = None
        """The recording behind a view that has a summary."""

    @property
    def name(self) -> str:
        """The name of the run, which its recordings do not have after a renaming."""
        return self.view.run_name if self.run_dir is None else os.path.basename(os.path.abspath(self.run_dir))

    @property
    def can_command(self) -> bool:
        """Whether commands would reach a training."""
        return self.command is not None and self.view.status in ("live", "paused")

    def send(self, name: str, *arguments: Argument) -> Outcome:
        """Send a command and wait for its outcome, some seconds at most. Raises OffloopError if it cannot be sent."""
        if self.command is None or not self.can_command:
            raise OffloopError(f"run {self.view.run_name} takes no commands: it is {self.view.status}")
        return self.command(name, *arguments, reason=sent_by("the web page"))


def labels_of(runs: Sequence[MonitoredRun]) -> list[str]:
    """The labels of runs: their names, with the attempt where there are several of one run."""
    names = [(run.name, run.view.attempt) for run in runs]
    several = {name for name, attempt in names if attempt > 1}
    return [f"{name} #{attempt}" if name in several else name for name, attempt in names]


def expect_end(view: RunView, run: RunInfo) -> None:
    """Set how the attempt of a view ended, if ``run.json`` says so."""
    attempt = next((one for one in run.attempts if one.number == view.attempt), None)
    if attempt is None or attempt.status == "running" or (attempt is run.last and run.away):
        return
    took = None if attempt.ended is None else max(attempt.ended - attempt.started, 0.0)
    reached = None if attempt.reached is None or took is None else progress_of(attempt.reached, took)
    view.expect_end(Ending(attempt.status, attempt.error, attempt.reason), reached)


class ViewDestination(LoggerDestination):
    """Adds what callbacks log to the view of a run."""

    def __init__(self, run: MonitoredRun) -> None:
        self.view = run.view
        self._run = run

    def open(self, context: RunContext) -> None:
        self._run.command, self._run.run_dir = context.command, context.run_dir
        self.view.follow(context)
        # A recording may lie anywhere.
        with contextlib.suppress(OffloopError):
            run = None if context.run_dir is None else read_run(context.run_dir)
            if run is not None and run.id == context.run_id:
                expect_end(self.view, run)

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        self.view.take_rows(rows)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any], state: Snapshot) -> None:
        self.view.take_hyperparameters(hyperparameters)

    def log_images(self, entry: Images, state: Snapshot) -> None:
        self.view.take_images(entry)

    def log_text(self, entry: Text, state: Snapshot) -> None:
        self.view.take_text(entry)


class RunTap(Callback):
    """Adds the events of all ranks to the view of a run."""

    all_ranks: ClassVar[bool] = True
    background: ClassVar[bool] = True
    max_delay: ClassVar[float | None] = 0.1
    events = BASE_EVENTS

    def __init__(self, run: MonitoredRun, every: int | str = 10) -> None:
        self._run = run
        self.every = every  # type: ignore[misc]

    def demand(self) -> Demand:
        events = {event: EventDemand() for event in BASE_EVENTS}
        return Demand({**events, Event.BATCH_END: EventDemand(fields={"phases": self.every})})

    def destinations(self) -> Sequence[LoggerDestination]:
        return (ViewDestination(self._run),)

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        self._run.view.see(state)

    def host_windows(self, windows: Sequence[HostWindow], logger: Logger) -> None:
        self._run.view.take_windows(windows)

    def show_summary(self, recording: Path) -> None:
        """Show the summary beside a recording, if there is one."""
        view = self._run.view
        summary = Summary.load(recording)
        if summary is not None and (summary.run, summary.attempt) == (view.run_name, view.attempt):
            view.load(summary)

    async def prepare(self, stream: RunStream, logger: Logger) -> None:
        """Load the history of a long recording from its summary, which is updated here; then only the newest events are
        read."""
        recording, view = stream.recording, self._run.view
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
            # Everything comes: nothing is to be shown twice.
            view.load(summary, 0)
            return
        view.load(summary, found.end)
        self._run.history = History(view, recording, summary, found.end)
        logger.take_from_run(summary.hyperparameters)
        stream.skip_to(found.end, {rank: (one.seq, one.base_seq) for rank, one in found.check.positions.items()})

    def run_ended(self, ending: Ending | None) -> None:
        self._run.view.end(ending)


class RunFollower(threading.Thread):
    """Reads one attempt of a run to its end.

    Args:
        open_stream: opens the stream for the demand of a callback.
        every: batches from one measurement of phases to the next.
        turns: limits how many followers read recordings at the same time. Until its turn has come, a run shows the
            summary beside its ``recording``, if there is one.
    """

    def __init__(
        self,
        run: MonitoredRun,
        open_stream: "Callable[[RunTap], Stream]",
        every: int | str,
        turns: threading.Semaphore | None = None,
        recording: Path | None = None,
    ) -> None:
        super().__init__(name="offloop-follower", daemon=True)
        self._run = run
        self._feed = RunTap(run, every)
        self._open = open_stream
        self._turns = turns or threading.Semaphore()
        self._recording = recording
        self._runner: Runner | None = None
        self._left = False

    def run(self) -> None:
        """Add every event; a failure is shown on the page."""
        try:
            if self._recording is not None:
                self._feed.show_summary(self._recording)
            with self._turns:
                if self._left:
                    return
                stream = self._open(self._feed)
                if not isinstance(stream, Subscriber | MergedSubscriber):
                    self._follow(stream)
                    return
            with contextlib.closing(stream):
                self._follow(stream)
        except OffloopError as error:
            self._run.problem = str(error)

    def _follow(self, stream: Stream) -> None:
        self._runner = Runner(stream, [self._feed], self._feed.destinations())
        if not self._left:
            self._runner.run()

    def stop(self) -> None:
        """End it as soon as it can be."""
        self._left = True
        if self._runner is not None:
            self._runner.stop()
