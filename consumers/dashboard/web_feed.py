"""What brings a run's events to the web dashboard."""

from collections.abc import Sequence
from typing import ClassVar

from bus.demand import BASE_EVENTS
from bus.event import Event
from bus.snapshot import Snapshot
from bus.stream import Ending
from consumers.callback import Callback
from consumers.dashboard.view_destination import ViewDestination
from consumers.dashboard.web_runs import WatchedRun
from consumers.logger import Logger, LoggerDestination, RunPlace

__all__ = ["RunFeed"]


class RunFeed(Callback):
    """Feeds a run on the page with its events, those of every rank, and with what is logged beside it."""

    all_ranks: ClassVar[bool] = True
    own_cursor: ClassVar[bool] = True
    events = BASE_EVENTS
    fields = ("phases",)

    def __init__(self, run: WatchedRun, every: int | str = 10) -> None:
        self._run = run
        self.every = every  # type: ignore[misc]

    def destinations(self) -> Sequence[LoggerDestination]:
        """One that takes what is logged to the page."""
        return (_Destination(self._run),)

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        """Takes an event of any rank to the page."""
        self._run.view.see(state)

    def run_ended(self, ending: Ending | None) -> None:
        """Tells the page how the run ended."""
        self._run.view.end(ending)


class _Destination(ViewDestination):
    def __init__(self, run: WatchedRun) -> None:
        super().__init__(run.view)
        self._run = run

    def open(self, place: RunPlace) -> None:
        super().open(place)
        self._run.command = place.command
