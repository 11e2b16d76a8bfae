"""Rows for people: one line at a time on standard output."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from bus.errors import ConfigurationError
from bus.snapshot import Snapshot
from consumers.logger import LoggerDestination, LogValue, Row

__all__ = ["ConsoleLogger"]

_GAP = "  "
_INDENT = " " * 4
_VALUE_WIDTH = 9
_BIGGEST_WHOLE = 10**_VALUE_WIDTH


_TIMES = ("time/*",)
_SAME_ON_ONE_DEVICE = "throughput/device/*_per_sec"


class ConsoleLogger(LoggerDestination):
    """Prints step, epoch and metrics on standard output, a line a second.

    At most one line for each ``every`` seconds of the run's own time, with the latest value of everything that was
    logged since the line before; what is left at the end is printed too. ``every=0`` prints a line for every event at
    which something was logged. On a terminal, long lines are wrapped.

    ``hide`` are patterns of metrics that are not shown: by default times (in hours, and counted in batches and samples,
    for which step and epoch stand) and the throughput of a single device. ``hide=`` shows everything.
    """

    def __init__(self, every: float = 1.0, hide: Sequence[str] = (*_TIMES, _SAME_ON_ONE_DEVICE)) -> None:
        if not every >= 0:
            raise ConfigurationError(f"every is a number of seconds, 0 or more, not {every}")
        self._every = every
        self._hide = tuple(hide)
        self._shown: dict[str, bool] = {}
        self._next = float("-inf")
        self._metrics: dict[str, LogValue] = {}
        self._order: dict[str, int] = {}
        self._step = 0
        self._epoch = 0

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        """Prints them if a line is due, keeps them for the next line if not."""
        metrics = {name: value for row in rows for name, value in row.metrics.items() if self._is_shown(name)}
        if not metrics:
            return
        self._metrics |= metrics
        for name in metrics:
            self._order.setdefault(name, len(self._order))
        self._step = max(row.step for row in rows)
        self._epoch = state.timestamp.values[1]
        if state.time >= self._next:
            self._next = state.time + self._every
            self._print_line()

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any], state: Snapshot) -> None:
        """Prints them on a line of their own."""
        print(*(f"{name}={value}" for name, value in hyperparameters.items()), sep="  ", flush=True)

    def close(self) -> None:
        """Prints what has not been printed yet."""
        if self._metrics:
            self._print_line()

    def state_dict(self) -> dict[str, Any]:
        """When the next line is due, and what it has so far, as it would be printed."""
        return {
            "next": self._next,
            "metrics": {name: format_value(value) for name, value in self._metrics.items()},
            "order": list(self._order),
            "step": self._step,
            "epoch": self._epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with the line that was being gathered; lines printed since then are printed again."""
        self._next = float(state["next"])
        self._metrics = dict(state["metrics"])
        self._order = {name: place for place, name in enumerate(state["order"])}
        self._step, self._epoch = state["step"], state["epoch"]

    def _is_shown(self, name: str) -> bool:
        shown = self._shown.get(name)
        if shown is None:
            shown = self._shown[name] = not any(fnmatchcase(name, pattern) for pattern in self._hide)
        return shown

    def _print_line(self) -> None:
        cells = [f"step {self._step:>6}", f"epoch {self._epoch:>3}"]
        # Metrics keep the order in which they first came, so that lines stay alike.
        named = sorted(self._metrics, key=self._order.__getitem__)
        cells += (f"{name} {format_value(self._metrics[name]):>{_VALUE_WIDTH}}" for name in named)
        self._metrics = {}
        print(_wrapped(cells) if sys.stdout.isatty() else _GAP.join(cells), flush=True)


def format_value(value: LogValue) -> str:
    """A value in as few characters as people need: four significant digits, whole numbers in full up to a billion."""
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int) and abs(value) < _BIGGEST_WHOLE:
        return str(value)
    return f"{value:.4g}"


def _wrapped(cells: list[str]) -> str:
    width = shutil.get_terminal_size().columns
    lines = [cells[0]]
    for cell in cells[1:]:
        if len(lines[-1]) + len(_GAP) + len(cell) <= width:
            lines[-1] += _GAP + cell
        else:
            lines.append(_INDENT + cell)
    return "\n".join(lines)
