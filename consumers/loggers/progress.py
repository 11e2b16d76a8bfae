"""The progress of a run on the terminal."""

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from offloop.bus.errors import check_at_least
from offloop.bus.printing import one_line
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.screen import Screen
from offloop.bus.types.event import Event
from offloop.bus.types.metrics import MetricNames
from offloop.bus.types.time import TimeUnit
from offloop.consumers.api.logger import LoggerDestination, RunContext
from offloop.consumers.loggers.console import format_value, shown_epoch

_BAR_WIDTH = 25
_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 1.0
_MINUTE = 60


@dataclass
class _Bar:
    label: str
    place: str
    unit: str
    started: float
    first: float
    total: float | None
    done: float = 0.0
    time: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.done, self.time = self.first, self.started

    def line(self, full: str = "", width: int | None = None) -> str:
        """Return the bar as text, drawn with ``full`` where it fits; the last metrics are left out first."""
        details = self._details()
        line = self._line(full, _BAR_WIDTH if full else 0, details)
        while width is not None and len(line) > width:
            line = self._line("", 0, details) if details else line[:width]
            details = details[:-1]
        return line

    def _line(self, full: str, length: int, details: list[str]) -> str:
        share = min(self.done / self.total, 1.0) if self.total else None
        drawn = f"|{full * int(share * length):<{length}}|" if length and share is not None else ""
        percent = "" if share is None else f"{share:4.0%}{drawn} "
        count = f"{int(self.done)}" + ("" if self.total is None else f"/{self.total:.10g}")
        head = f"{self.label:<10} {self.place:<12} " if self.place else f"{self.label:<23} "
        return one_line(f"{head}{percent}{count} {self.unit} [{', '.join(details)}]")

    def _details(self) -> list[str]:
        elapsed, moved = self.time - self.started, self.done - self.first
        details = [_clock(elapsed)]
        if elapsed > 0 and moved > 0:
            rate = moved / elapsed
            if self.total is not None:
                details[0] += f"<{_clock(max(self.total - self.done, 0) / rate)}"
            details.append(f"{rate:.3g} {self.unit}/s")
        return details + [f"{name}={format_value(value)}" for name, value in self.metrics.items()]


class ProgressLogger(LoggerDestination):
    """Shows the progress of a run on standard error: bars for the training, the epoch and an evaluation.

    On a terminal the bars stay at the bottom, below all other output. A finished epoch or evaluation leaves a line with
    its metrics: the latest of each kind, at most once a second. Elsewhere it prints lines only: every ``every`` seconds
    of the run's own time one for the current epoch or evaluation, and the latest finished ones. A consumer that resumes
    begins with the next event.

    Everything comes from the events themselves: add the logger ``console`` for the values that callbacks log.

    Reference: ``composer/loggers/progress_bar_logger.py``."""

    writes_to_terminal = True
    max_delay = 0.1
    watches = (
        *(Event.FIT_START, Event.EPOCH_START, Event.BATCH_END, Event.EPOCH_END, Event.FIT_END, Event.EVAL_START),
        *(Event.EVAL_BATCH_END, Event.EVAL_END, Event.PREDICT_START, Event.PREDICT_BATCH_END, Event.PREDICT_END),
    )

    def __init__(self, every: float = 10.0) -> None:
        check_at_least("every", every, 0)
        self._every = every
        self._bars: dict[str, _Bar] = {}
        self._finished: dict[str, _Bar] = {}
        self._screen: Screen | None = None
        self._next = self._next_finished = float("-inf")

    def open(self, context: RunContext) -> None:
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            self._screen = Screen(sys.stderr)

    def watch(self, state: Snapshot) -> None:
        self._follow(state)
        if (total := self._bars.get("total")) is not None:
            total.time = state.time
        if self._screen is None:
            # Of several bars, only the last one is printed; a full one is about to finish.
            current = [bar for bar in list(self._bars.values())[-1:] if bar.done != bar.total]
            if state.time >= self._next and (current or self._finished):
                self._next = state.time + self._every
                self._leave([*self._finished.values(), *current])
            return
        # A drawing is not a record: the terminal's time counts, also when a recording is read faster than it was made.
        now = monotonic()
        if now >= self._next:
            self._next = now + _REDRAW_SECONDS
            if now >= self._next_finished and self._finished:
                self._next_finished = now + _LINE_SECONDS
                self._leave(self._finished.values())
            self._screen.draw([self._line(bar) for bar in self._bars.values()])

    def close(self) -> None:
        bars = list(self._bars.values())
        if self._screen is not None:
            self._screen.draw([])
        self._leave([*self._finished.values(), *(bars[-1:] if self._screen is None else bars)])
        if self._screen is not None:
            self._screen.close()
            self._screen = None
        self._bars = {}

    def _line(self, bar: _Bar) -> str:
        if self._screen is None:
            return bar.line()
        is_unicode = (self._screen.stream.encoding or "").lower().startswith("utf")
        return bar.line("█" if is_unicode else "#", self._screen.width)

    def _leave(self, bars: Iterable[_Bar]) -> None:
        lines = [self._line(bar) for bar in bars]
        self._finished = {}
        if self._screen is not None:
            self._screen.leave(lines)
        else:
            for line in lines:
                print(line, file=sys.stderr, flush=True)

    def _follow(self, state: Snapshot) -> None:
        if state.event in (Event.EVAL_BATCH_END, Event.EVAL_END, Event.PREDICT_BATCH_END, Event.PREDICT_END):
            self._advance(state)
        label = state.dataloader_label or "eval"
        match state.event:
            case Event.FIT_START:
                self._begin_training(state)
            case Event.EPOCH_START:
                self._begin_epoch(state)
            case Event.BATCH_END:
                self._end_batch(state)
            case Event.EPOCH_END:
                self._finish("train", self._named("train", state.train_metrics, state))
            case Event.FIT_END:
                self._finish("train", {})
                self._finish("total", {})
            case Event.EVAL_START:
                batch = f"Batch {int(state.timestamp.batch):>3}"
                self._begin(label, batch if "train" in self._bars else _epoch_text(state), state, "eval")
            case Event.EVAL_END:
                self._finish("eval", self._named(label, state.eval_metrics.get(label, {}), state))
            case Event.PREDICT_START:
                self._begin("predict", "", state)
            case Event.PREDICT_END:
                self._finish("predict", {})

    def _begin_training(self, state: Snapshot) -> None:
        self._bars = {}
        if (longest := state.max_duration) is not None:
            done = float(state.timestamp.get(longest.unit))
            self._bars["total"] = _Bar("total", "", longest.unit.value, state.time, done, longest.value)

    def _begin(self, label: str, place: str, state: Snapshot, key: str | None = None, done: float = 0.0) -> None:
        self._bars[key or label] = _Bar(label, place, "ba", state.time, done, state.dataloader_len)

    def _begin_epoch(self, state: Snapshot) -> None:
        done = float(state.timestamp.batch_in_epoch)
        if state.event is Event.BATCH_END:  # the trainer resumed in the middle of an epoch
            done -= 1
        self._begin("train", _epoch_text(state), state, done=done)

    def _end_batch(self, state: Snapshot) -> None:
        if "train" not in self._bars:
            self._begin_epoch(state)
        bar = self._bars["train"]
        bar.done, bar.total, bar.time = float(state.timestamp.batch_in_epoch), state.dataloader_len, state.time
        if state.loss is not None:
            bar.metrics["loss"] = state.loss
        if (total := self._bars.get("total")) is not None:
            total.done = float(state.timestamp.get(total.unit))
            if total.unit == TimeUnit.EPOCH.value and bar.total:
                total.done += bar.done / bar.total

    def _advance(self, state: Snapshot) -> None:
        is_eval = state.event.is_eval
        if (bar := self._bars.get("eval" if is_eval else "predict")) is not None:
            within = state.eval_timestamp if is_eval else state.predict_timestamp
            bar.done, bar.time = float(within.batch), state.time

    def _named(self, label: str, metrics: Mapping[str, Any], state: Snapshot) -> dict[str, Any]:
        known = {**state.eval_metrics, label: metrics}
        names = MetricNames(f"metrics/{one}/{name}" for one, values in known.items() for name in values)
        return {names.short(f"metrics/{label}/{name}"): value for name, value in metrics.items()}

    def _finish(self, key: str, metrics: Mapping[str, Any]) -> None:
        bar = self._bars.pop(key, None)
        if bar is not None:
            bar.metrics |= {name: value for name, value in metrics.items() if isinstance(value, float | int | str)}
            self._finished.pop(bar.label, None)
            self._finished[bar.label] = bar


def _epoch_text(state: Snapshot) -> str:
    return f"Epoch {shown_epoch(state):>3}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), _MINUTE)
    hours, minutes = divmod(minutes, _MINUTE)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"
