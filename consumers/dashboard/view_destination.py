"""How what is logged gets into a view."""

from collections.abc import Mapping, Sequence
from typing import Any

from bus.demand import BASE_EVENTS, Demand, Want
from bus.event import Event
from bus.snapshot import Snapshot
from consumers.dashboard.run_view import RunView
from consumers.logger import Images, LoggerDestination, Row, RunPlace, Text

__all__ = ["ViewDestination", "view_demand"]


def view_demand(every: int | str) -> Demand:
    """What a view asks of the training: the events that there are in any case, and the phases of some batches."""
    events = {event: Want() for event in BASE_EVENTS}
    return Demand({**events, Event.BATCH_END: Want(fields={"phases": every})})


class ViewDestination(LoggerDestination):
    """Hands a view what callbacks log, and tells it which run it is."""

    def __init__(self, view: RunView) -> None:
        self.view = view
        self.place: RunPlace | None = None
        """Which run it is, where, and how to command it; ``None`` until it is opened."""

    def open(self, place: RunPlace) -> None:
        """Tells the view which run it is."""
        self.place = place
        self.view.run_name, self.view.attempt = place.run_name, place.attempt
        self.view.follow_outcomes(place.answered)

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
