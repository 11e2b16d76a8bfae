"""For callbacks that have to know which run they look at, beside its events."""

from consumers.api.logger import LoggerDestination, RunPlace

__all__ = ["PlaceKeeper"]


class PlaceKeeper(LoggerDestination):
    """Takes nothing that is logged; :attr:`place` is the run's, for the callback whose ``destinations()`` gives it."""

    def __init__(self, shown_as: str) -> None:
        self.shown_as = shown_as
        """What it is called among the destinations."""
        self.place = RunPlace("run", 1, None)
        """Of no run at all until it is opened."""

    def open(self, place: RunPlace) -> None:
        """Keeps it."""
        self.place = place
