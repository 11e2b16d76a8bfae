"""For callbacks that have to know which run they look at, beside its events."""

from offloop.consumers.api.logger import LoggerDestination, RunContext


class ContextKeeper(LoggerDestination):
    """Keeps the run's :attr:`context` for the callback whose ``destinations()`` gives it; what is logged it ignores."""

    def __init__(self, shown_as: str) -> None:
        self.shown_as = shown_as
        """What it is called among the destinations."""
        self.context = RunContext("run", 1, None)
        """Of no run at all until it is opened."""

    def open(self, context: RunContext) -> None:
        """Keeps it."""
        self.context = context
