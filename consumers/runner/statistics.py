"""Statistics of a runner, and its problems in words."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from offloop.bus.protocol.order import Ending, Gap
from offloop.bus.types.commands import Outcome
from offloop.bus.types.source import Source


@dataclass(frozen=True)
class RunnerStatistics:
    """Statistics of a runner, and of the runners before it that committed to the same progress."""

    handled: int
    """Events that at least one callback received."""
    errors: Mapping[str, int]
    """Number of errors of each callback."""
    failed_destinations: tuple[str, ...]
    """Destinations that raised and have received nothing since."""
    last_seq: int | None
    """``seq`` of the last handled event; ``None`` before the first."""
    interrupted: bool
    """SIGINT or SIGTERM ended it."""
    gaps: tuple[Gap, ...] = ()
    """Lost events: published, but neither received nor recorded."""
    ending: Ending | None = None
    """Ending of the run; ``None`` before it, and for streams without one."""
    damage: str | None = None
    """The unreadable part of the recording."""
    fields_since: Mapping[str, int] = field(default_factory=dict)
    """Requested field to the number of the batch with which it came first, among the events of this runner."""
    outcomes: tuple[Outcome, ...] = ()
    """Outcomes of the commands that callbacks sent."""
    undelivered: Mapping[str, str] = field(default_factory=dict)
    """Unsent entries of each destination when it was closed, in words that follow its name."""
    uncommitted: str | None = None
    """Why the last attempt to commit the progress failed; ``None`` after a success."""
    written: Mapping[str, str] = field(default_factory=dict)
    """Place of the output of each destination, in words that follow its name."""
    source: Source = field(default_factory=Source)
    """Source of the run's events, as far as known."""

    @property
    def outcome_lines(self) -> list[str]:
        """A line for people about each command that callbacks have sent and that did not fail."""
        return [
            f"command '{outcome.command}' came too late: the training had ended"
            if outcome.event is None and self.ending is not None
            else f"command {outcome}"
            for outcome in self.outcomes
            if outcome.error is None
        ]

    @property
    def place_lines(self) -> list[str]:
        """A line for people about each destination with visible output."""
        return [f"{name}: {where}" for name, where in self.written.items()]

    @property
    def problems(self) -> list[str]:
        """A line for each problem; empty without any."""
        raised = [(name, count) for name, count in self.errors.items() if count]
        return [
            *(f"callback {name} raised {count} time{'s' if count > 1 else ''}" for name, count in raised),
            *(f"destination {name} failed and lacks all later values" for name in self.failed_destinations),
            *(f"destination {name} {problem}" for name, problem in self.undelivered.items()),
            *(f"command {outcome}" for outcome in self.outcomes if outcome.error is not None),
            *([self.uncommitted] if self.uncommitted else []),
        ]
