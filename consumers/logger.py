"""Callbacks decide what is logged, destinations where it goes; the logger stands between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from bus.errors import ConfigurationError
from bus.snapshot import Snapshot

__all__ = ["LogValue", "Logger", "LoggerDestination", "Row", "RunPlace"]

LogValue: TypeAlias = float | int | str | bool
"""A metric's value as destinations get it."""

_RESERVED = ("step", "time")


class Row(NamedTuple):
    """What was logged for one step during one event."""

    step: int
    """Batches trained, unless a callback said otherwise."""
    time: float
    """When the event happened: seconds since 1970, UTC."""
    metrics: dict[str, LogValue]
    """Metric name to value, in the order of the calls; for a name logged twice the later value, in the earlier
    place."""


@dataclass(frozen=True)
class RunPlace:
    """Which run a destination is about to be given, and where that run's files are."""

    run_name: str
    attempt: int
    """Which attempt of the run, from 1."""
    run_dir: Path | None
    """``None`` for a stream that has no directory, such as a list of snapshots."""


class LoggerDestination:
    """Where logged rows go: a file, a terminal, another system. Subclass it and override what you need.

    The constructor only takes options: it runs before the run is known, and in the trainer's process when the
    destination is given to a ``Trainer``. Files and connections belong in :meth:`open`. Use no clock of your own: equal
    streams are to give equal output.
    """

    def open(self, place: RunPlace) -> None:
        """Called once, before the first event. Raise :class:`bus.errors.ConfigurationError` if it cannot be done."""

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        """Takes everything that was logged during one event: a row for each step, in the order of first use.

        Called after all callbacks have handled the event; ``state`` is the event's snapshot."""

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any], state: Snapshot) -> None:
        """Takes values that describe the run as a whole. Left out unless a destination overrides it."""

    def close(self) -> None:
        """Called once, after every callback is closed; also when the consumer is interrupted."""

    def state_dict(self) -> dict[str, Any]:
        """The position, for :meth:`load_state_dict` to go back to: how much has been written, and what is still held
        back. Plain values only: numbers, strings, bytes, lists, maps, ``None``.

        Called between two events. Everything before the position has to be safe when this returns: a file is flushed
        and synced to the disk, because the position is stored next, and must not be ahead of what it stands for."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called before :meth:`open` by a consumer that goes on, with what :meth:`state_dict` gave (tuples are lists by
        now). What :meth:`open` finds was written by the process before: it has to be there, and what came after the
        position is to be taken back, because those events come again.

        Both may be left out by a destination that only hands rows on; what it was given since the position, it is
        then given twice."""


class Logger:
    """What callbacks log through. It gathers what is logged during one event; the :class:`~consumers.runner.Runner`
    takes it from here when every callback has handled the event, and hands it to the destinations."""

    def __init__(self) -> None:
        self._state: Snapshot | None = None
        self._rows: dict[int, dict[str, LogValue]] = {}
        self._hyperparameters: dict[str, Any] = {}

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Logs metrics for a step, by default ``state.timestamp.batch`` of the event that is being handled.

        Values are numbers, strings or anything with one value and an ``item()``, such as a tensor of one element.

        Raises:
            ConfigurationError: a value of another kind, or a metric named ``step`` or ``time``.
        """
        checked = {name: _checked(name, value) for name, value in metrics.items()}
        if checked:
            self._rows.setdefault(self._current_step() if step is None else int(step), {}).update(checked)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Logs values that describe the run as a whole, such as a seed or a model's size."""
        self._hyperparameters.update(hyperparameters)

    def begin(self, state: Snapshot) -> None:
        """Says which event is handled from now on."""
        self._state = state

    @property
    def pending(self) -> bool:
        """Whether anything has been logged and not been taken yet."""
        return bool(self._rows or self._hyperparameters)

    def take_rows(self, state: Snapshot) -> list[Row]:
        """Gives the gathered rows, timed by ``state``, and begins anew."""
        rows = [Row(step, state.time, metrics) for step, metrics in self._rows.items()]
        self._rows = {}
        return rows

    def take_hyperparameters(self) -> dict[str, Any]:
        """Gives the gathered hyperparameters and begins anew."""
        gathered, self._hyperparameters = self._hyperparameters, {}
        return gathered

    def _current_step(self) -> int:
        if self._state is None:
            raise ConfigurationError("log_metrics() was called before the first event: pass step=... there")
        return self._state.timestamp.values[2]


def _checked(name: str, value: Any) -> LogValue:
    if name in _RESERVED:
        raise ConfigurationError(f"a metric cannot be called {name!r}, every row has that already: choose another name")
    if isinstance(value, float | int | str):
        return value
    try:
        item = value.item()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        item = None
    if not isinstance(item, float | int | str):
        raise ConfigurationError(
            f"metric {name!r} has a value of type {type(value).__name__}: "
            "log a number, a string or a tensor of one element"
        )
    return item
