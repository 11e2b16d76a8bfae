"""Rows for people: one line at a time on standard output."""

import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from time import monotonic
from typing import Any

from offloop.bus.errors import check_at_least
from offloop.bus.printing import GAP, cut_at_end, cut_in_the_middle, one_line, say, widest_cell, wrap
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.hyperparameters import chosen_first
from offloop.bus.types.metrics import MetricNames, is_named, shown_step
from offloop.bus.types.source import Source
from offloop.consumers.api.logger import Images, LoggerDestination, LogValue, Row, RunContext, Table, Text

_VALUE_WIDTH = 9
_BIGGEST_WHOLE = 10**_VALUE_WIDTH
_TEXT_WIDTH = 60
_LEAST_NAME = 8
_TERMINAL_SECONDS = 0.2

_GLOBAL_NORM = "l2_norm/grad/global"
_HIDDEN = (
    # The line shows step and epoch already.
    *("time/epoch", "time/batch*", "time/sample*", "time/token*", "time/train", "time/val", "time/total"),
    "throughput/device/*_per_sec",
    # One for each parameter or module.
    *("l2_norm/*/*", f"!{_GLOBAL_NORM}", "activations/*"),
    # Hyperparameters that 'offloop show --details' shows.
    *("command", "git/*", "version/*", "machine/*"),
)
_AFTER_AN_EPOCH = (
    *(Event.EPOCH_END, Event.EPOCH_CHECKPOINT),
    *(Event.ITERATION_END, Event.ITERATION_CHECKPOINT, Event.FIT_END),
)
_MOST = 12
_FIRST = ("loss/", "metrics/")


class ConsoleLogger(LoggerDestination):
    """Prints step, epoch (from 0) and metrics by their short names on standard output.

    The step of a batch is the number of batches before it; an evaluation has that of the last batch before it, an
    imported log its own steps.

    Once in ``every`` seconds of the run's own time, and at the end, it prints the latest value of everything logged
    since; with ``every=0`` at every event. Lines are as wide as the terminal, elsewhere 80 columns; an indented line
    follows for the rest. A terminal gets at most five prints a second. Images, tables and texts are a short line each,
    the latest of each name; files to upload are left out.

    ``hide`` are patterns of hidden metrics (full or short names) and hyperparameters; a pattern with ``!`` shows them.
    The last pattern that fits a name counts. The default hides training time and wall-clock time, the throughput of a
    single device, activations, norms of single parameters, and how the run was started. ``hide=`` hides nothing.

    At most ``most`` metrics, or hyperparameters, are shown, and the number of the others: first losses and metrics of
    the model, then by the order of their first values."""

    writes_to_terminal = True
    max_delay: float = 0.1

    def __init__(self, every: float = 1.0, hide: Sequence[str] = _HIDDEN, most: int = _MOST) -> None:
        check_at_least("every", every, 0)
        check_at_least("most", most, 1)
        self._every = every
        self._hide = tuple(hide)
        self._most = most
        self._source: Callable[[], Source] = Source
        self._is_imported = False
        self._shown: dict[str, bool] = {}
        self._names: MetricNames | None = None
        self._next = float("-inf")
        self._next_on_terminal = float("-inf")
        self._metrics: dict[str, LogValue] = {}
        self._notes: dict[str, str] = {}
        self._order: dict[str, int] = {}
        self._step = 0
        self._epoch = 0

    def open(self, context: RunContext) -> None:
        self._source = context.source

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        metrics = {name: value for row in rows for name, value in row.metrics.items() if self._shows(name)}
        if not metrics:
            return
        self._metrics |= metrics
        for name in metrics:
            self._order.setdefault(name, len(self._order))
        self._is_imported = self._is_imported or self._source().is_imported
        keeps_steps = self._is_imported or not state.event.is_eval
        shown = [[row.step if keeps_steps else shown_step(one, row.step) for one in row.metrics] for row in rows]
        self._step = max(min(steps) for steps in shown if steps)
        self._epoch = shown_epoch(state)
        self._print_what_is_due(state)

    def log_images(self, entry: Images, state: Snapshot) -> None:
        height, width = entry.images[0].shape[:2] if entry.images else (0, 0)
        masks = f", with {', '.join(entry.masks)}" if entry.masks else ""
        self._note(entry.step, entry.name, f"{len(entry.images)} of {width}x{height}{masks}", state)

    def log_table(self, entry: Table, state: Snapshot) -> None:
        self._note(entry.step, entry.name, f"{len(entry.rows)} rows of {', '.join(entry.columns)}", state)

    def log_text(self, entry: Text, state: Snapshot) -> None:
        self._note(entry.step, entry.name, entry.text, state)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any], state: Snapshot) -> None:
        cells = [
            _cell(name, "=", cut_at_end(one_line(str(hyperparameters[name])), _text_width()))
            for name in chosen_first(hyperparameters)
            if self._fits(name, fnmatchcase)
        ]
        if (left_out := len(cells) - self._most) > 0:
            cells[self._most :] = [f"... and {left_out} more"]
        _say_cells(cells)

    def close(self) -> None:
        self._print_lines()

    def state_dict(self) -> dict[str, Any]:
        return {
            "next": self._next,
            "metrics": {name: format_value(value) for name, value in self._metrics.items()},
            "notes": dict(self._notes),
            "order": list(self._order),
            "step": self._step,
            "is_imported": self._is_imported,
            "epoch": self._epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = float(state["next"])
        self._metrics = dict(state["metrics"])
        self._notes = dict(state["notes"])
        self._order = {name: place for place, name in enumerate(state["order"])}
        for name in self._order:
            self._shows(name)
        self._step, self._epoch = state["step"], state["epoch"]
        self._is_imported = state["is_imported"]

    def _shows(self, metric: str) -> bool:
        shown = self._shown.get(metric)
        if shown is None:
            shown = self._fits(metric, lambda name, pattern: fnmatchcase(name, pattern) or is_named(name, pattern))
            self._shown[metric] = shown
            self._names = None
        return shown

    def _fits(self, name: str, matches: Callable[[str, str], bool]) -> bool:
        fitting = [pattern for pattern in self._hide if matches(name, pattern.removeprefix("!"))]
        return not fitting or fitting[-1].startswith("!")

    def _note(self, step: int, name: str, text: str, state: Snapshot) -> None:
        self._notes[name] = f"step {step:>6}{GAP}{one_line(name)}: {one_line(text)}"
        self._print_what_is_due(state)

    def _print_what_is_due(self, state: Snapshot) -> None:
        if state.time < self._next:
            return
        if sys.stdout is not None and sys.stdout.isatty():
            now = monotonic()  # output on a terminal is not a record, so the terminal's time counts too
            if now < self._next_on_terminal:
                return
            self._next_on_terminal = now + min(self._every, _TERMINAL_SECONDS)
        self._next = state.time + self._every
        self._print_lines()

    def _print_lines(self) -> None:
        if self._metrics:
            cells = [f"step {self._step:>6}", f"epoch {self._epoch:>3}"]
            # Metrics keep the order of their first values, so that lines stay alike.
            named = sorted(self._metrics, key=self._order.__getitem__)
            kept = sorted(named, key=lambda name: not name.startswith(_FIRST))[: self._most]
            kept.sort(key=self._order.__getitem__)
            self._names = self._names or MetricNames(self._shown)
            for name in kept:
                value = cut_at_end(one_line(format_value(self._metrics[name])), _text_width())
                cells.append(_cell(self._names.short(name), " ", f"{value:>{_VALUE_WIDTH}}"))
            if left_out := len(named) - len(kept):
                cells.append(f"... and {left_out} more")
            _say_cells(cells)
        for note in self._notes.values():
            say(cut_at_end(note, widest_cell()))
        self._metrics, self._notes = {}, {}


def shown_epoch(state: Snapshot) -> int:
    """Return the epoch of an event, from 0. At its end the timestamp has the next epoch already."""
    epoch = state.timestamp.values.epoch
    comes_after = state.event in _AFTER_AN_EPOCH or state.event.is_eval
    return epoch - 1 if comes_after and epoch and state.timestamp.batch_in_epoch == 0 else epoch


def format_value(value: LogValue) -> str:
    """Return a value in few characters: four significant digits, whole numbers in full up to a billion."""
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int) and abs(value) < _BIGGEST_WHOLE:
        return str(value)
    return f"{value:.4g}"


def _text_width() -> int:
    return max(min(_TEXT_WIDTH, widest_cell() - 1 - _LEAST_NAME), 2 * _VALUE_WIDTH)


def _cell(name: str, sign: str, value: str) -> str:
    """Return a name and a value. In a narrow terminal the name is cut: a part of a number is another number."""
    name = one_line(name)
    room = max(widest_cell() - len(sign) - len(value), _LEAST_NAME)
    return f"{cut_in_the_middle(name, room)}{sign}{value}"


def _say_cells(cells: list[str]) -> None:
    for line in wrap(cells):
        say(line)
