"""What brings a run's events to a dashboard."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from bus.protocol.order import Ending
from bus.protocol.snapshot import Snapshot
from bus.types.demand import BASE_EVENTS, Demand, Want
from bus.types.event import Event
from consumers.api.callback import Callback
from consumers.api.logger import Images, Logger, LoggerDestination, Row, RunContext, Text
from consumers.dashboard.view.run_view import RunView
from consumers.dashboard.view.runs import MonitoredRun


class ViewDestination(LoggerDestination):
    """Hands a view what callbacks log, and tells it which run it is."""

    def __init__(self, view: RunView) -> None:
        self.view = view
        self.context: RunContext | None = None
        """Which run it is, where, and how to command it; ``None`` until it is opened."""

    def open(self, context: RunContext) -> None:
        """Tells the view which run it is."""
        self.context = context
        self.view.run_name, self.view.attempt = context.run_name, context.attempt
        self.view.follow_outcomes(context.answered)

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
    events = BASE_EVENTS

    def __init__(self, run: MonitoredRun, every: int | str = 10) -> None:
        self._run = run
        self.every = every  # type: ignore[misc]

    def demand(self) -> Demand:
        """The events that there are in any case, and the phases of some batches."""
        events = {event: Want() for event in BASE_EVENTS}
        return Demand({**events, Event.BATCH_END: Want(fields={"phases": self.every})})

    def destinations(self) -> Sequence[LoggerDestination]:
        """One that takes in what is logged."""
        return (_Destination(self._run),)

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        """Takes in an event of any rank."""
        self._run.view.see(state)

    def run_ended(self, ending: Ending | None) -> None:
        """Takes in how the run ended."""
        self._run.view.end(ending)


class _Destination(ViewDestination):
    def __init__(self, run: MonitoredRun) -> None:
        super().__init__(run.view)
        self._run = run

    def open(self, context: RunContext) -> None:
        super().open(context)
        self._run.command = context.command
