"""A run that a dashboard shows, and what brings its events there."""

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from offloop.bus.errors import OffloopError
from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.protocol.order import Ending
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import RunStream
from offloop.bus.recording.scan import next_check_record
from offloop.bus.recording.summary import MIN_BYTES, Summarizer, Summary
from offloop.bus.runs.directory import RunInfo, read_run
from offloop.bus.subscriber.commands import sent_by
from offloop.bus.types.commands import Outcome
from offloop.bus.types.demand import BASE_EVENTS, Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Images, Logger, LoggerDestination, Row, RunContext, Text
from offloop.consumers.dashboard.view.history import TAIL_BYTES, History
from offloop.consumers.dashboard.view.progress import progress_of
from offloop.consumers.dashboard.view.run_view import RunView

_SHOWN_SECONDS = 0.25
"""So often what a summary has is shown while it is made."""


class MonitoredRun:
    """One attempt of a run on the page. The page numbers them in the order in which they came, and none goes away."""

    def __init__(self, view: RunView) -> None:
        self.view = view
        self.command: Callable[..., Outcome] | None = None
        """Sends the training a command; ``None`` where it takes none."""
        self.problem: str | None = None
        """Why it cannot be watched any further."""
        self.key = secrets.token_hex(8)
        """By what the addresses of its images and files name it."""
        self.run_dir: Path | None = None
        """Its directory, where that is on this machine."""
        self.history: History | None = None
        """Where its view has a summary of a long recording: the recording."""

    @property
    def name(self) -> str:
        """What the run is called: in its recordings it keeps the name that it had before it was renamed."""
        return self.view.run_name if self.run_dir is None else os.path.basename(os.path.abspath(self.run_dir))

    @property
    def can_command(self) -> bool:
        """Whether there is a training that commands would reach."""
        return self.command is not None and self.view.status in ("live", "paused")

    def send(self, name: str) -> Outcome:
        """Sends a command and waits for what becomes of it, some seconds at most.

        Raises:
            OffloopError: it cannot be sent.
        """
        if self.command is None or not self.can_command:
            raise OffloopError(f"run {self.view.run_name} takes no commands: it is {self.view.status}")
        return self.command(name, reason=sent_by("the web page"))


def labels_of(runs: Sequence[MonitoredRun]) -> list[str]:
    """What each is called: the run's name, with the attempt where there are several of one run."""
    names = [(run.name, run.view.attempt) for run in runs]
    several = {name for name, attempt in names if attempt > 1}
    return [f"{name} #{attempt}" if name in several else name for name, attempt in names]


def expect_end(view: RunView, run: RunInfo) -> None:
    """Tells a view how its attempt of a run ended, if ``run.json`` says so."""
    attempt = next((one for one in run.attempts if one.number == view.attempt), None)
    if attempt is None or attempt.status == "running" or (attempt is run.last and run.away):
        return
    took = None if attempt.ended is None else max(attempt.ended - attempt.started, 0.0)
    reached = None if attempt.reached is None or took is None else progress_of(attempt.reached, took)
    view.expect_end(Ending(attempt.status, attempt.error, attempt.reason), reached)


class ViewDestination(LoggerDestination):
    """Hands a run's view what callbacks log, and tells it which run it is."""

    def __init__(self, run: MonitoredRun) -> None:
        self.view = run.view
        self._run = run

    def open(self, context: RunContext) -> None:
        """Tells the view which run it is, and takes how to command it."""
        self._run.command, self._run.run_dir = context.command, context.run_dir
        self.view.run_name, self.view.attempt = context.run_name, context.attempt
        # A recording may lie anywhere.
        with contextlib.suppress(OffloopError):
            run = None if context.run_dir is None else read_run(context.run_dir)
            if run is not None and run.id == context.run_id:
                expect_end(self.view, run)
        self.view.follow_outcomes(context.answered)
        self.view.follow_checkpoints(context.checkpoints)

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        """Hands metrics on."""
        self.view.take_rows(rows)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any], state: Snapshot) -> None:
        """Hands them on."""
        self.view.take_hyperparameters(hyperparameters)

    def log_images(self, entry: Images, state: Snapshot) -> None:
        """Hands images on."""
        self.view.take_images(entry)

    def log_text(self, entry: Text, state: Snapshot) -> None:
        """Hands a text on."""
        self.view.take_text(entry)


class RunTap(Callback):
    """Feeds a run that is shown with its events, those of every rank, and with what is logged beside it."""

    all_ranks: ClassVar[bool] = True
    background: ClassVar[bool] = True
    max_delay: ClassVar[float | None] = 0.1
    events = BASE_EVENTS

    def __init__(self, run: MonitoredRun, every: int | str = 10) -> None:
        self._run = run
        self.every = every  # type: ignore[misc]

    def demand(self) -> Demand:
        """The events that there are in any case, and the phases of some batches."""
        events = {event: EventDemand() for event in BASE_EVENTS}
        return Demand({**events, Event.BATCH_END: EventDemand(fields={"phases": self.every})})

    def destinations(self) -> Sequence[LoggerDestination]:
        """One that takes in what is logged."""
        return (ViewDestination(self._run),)

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        """Takes in an event of any rank."""
        self._run.view.see(state)

    def host_windows(self, windows: Sequence[HostWindow], logger: Logger) -> None:
        """Takes in what hosts say of their ranks."""
        self._run.view.take_windows(windows)

    def show_summary(self, recording: Path) -> None:
        """Shows what the summary beside a recording says, if there is one."""
        view = self._run.view
        summary = Summary.load(recording)
        if summary is not None and (summary.run, summary.attempt) == (view.run_name, view.attempt):
            view.load(summary)

    async def prepare(self, stream: RunStream, logger: Logger) -> None:
        """Takes the history of a long recording from its summary, which is brought up to date here, or made; then only
        the newest events need be read."""
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
        """Takes in how the run ended."""
        self._run.view.end(ending)
