"""The runs that a web dashboard shows, with what can be done to each."""

from collections.abc import Callable, Sequence

from bus.errors import OffloopError
from bus.subscriber.commands import sent_by
from bus.types.commands import Outcome
from consumers.dashboard.view.run_view import RunView


class MonitoredRun:
    """One attempt of a run on the page. The page numbers them in the order in which they came, and none goes away."""

    def __init__(self, view: RunView) -> None:
        self.view = view
        self.command: Callable[..., Outcome] | None = None
        """Sends the training a command; ``None`` where it takes none."""
        self.problem: str | None = None
        """Why it cannot be watched any further."""

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
    names = [(run.view.run_name, run.view.attempt) for run in runs]
    several = {name for name, attempt in names if attempt > 1}
    return [f"{name} #{attempt}" if name in several else name for name, attempt in names]
