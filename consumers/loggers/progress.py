"""How far a run is, for people who watch it."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any, TextIO

from offloop.bus.errors import ConfigurationError
from offloop.bus.printing import one_line
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.screen import Screen
from offloop.bus.types.event import Event
from offloop.bus.types.metric_names import MetricNames
from offloop.bus.types.time import TimeUnit
from offloop.consumers.api.logger import LoggerDestination, RunContext
from offloop.consumers.loggers.console import format_value, shown_epoch

_BAR_WIDTH = 25
_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 1.0
_MINUTE = 60


@dataclass
class _Bar:
    """One thing that goes on: the whole training, an epoch, an evaluation, a prediction."""

    label: str
    place: str
    unit: str
    started: float
    first: float
    """How much was done when it started."""
    done: float = 0.0
    total: float | None = None
    time: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """The bar in words."""
        return self._line("", 0, self._details())

    def drawn(self, full: str, width: int) -> str:
        """The bar in words and drawn with ``full``, in at most ``width`` characters: the drawing gives way to words,
        and what does not fit then is left out, the last metrics first."""
        details = self._details()
        missing = max(len(self._line(full, _BAR_WIDTH, details)) - width, 0)
        length = max(_BAR_WIDTH - missing, 0)
        while details and len(self._line(full, length, details)) > width:
            details.pop()
        return self._line(full, length, details)[:width]

    def _line(self, full: str, length: int, details: Sequence[str]) -> str:
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


class _View:
    """Where bars are shown. One that is over leaves a line, the latest of each kind."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._finished = {label: _Bar(**bar) for label, bar in state.get("finished", {}).items()}

    def show(self, bars: Sequence[_Bar], time: float) -> None:
        """Shows those that go on; ``time`` is that of the event."""

    def finish(self, bar: _Bar) -> None:
        """Takes one that is over."""
        self._finished.pop(bar.label, None)
        self._finished[bar.label] = bar

    def close(self, bars: Sequence[_Bar]) -> None:
        """Shows what has not been shown yet."""

    def state_dict(self) -> dict[str, Any]:
        """What is still to be shown."""
        return {}


class ProgressLogger(LoggerDestination):
    """Shows how far the run is, on standard error: bars for the training, the epoch and an evaluation.

    On a terminal the bars stay at the bottom, and what else the consumer prints goes above them. An epoch or evaluation
    that is over leaves a line with its metrics, by their short names: the latest of each kind, at most once a second.
    Elsewhere, such as in a file, there are lines only: every ``every`` seconds of the run's own time one for what goes
    on, and the latest epoch and evaluation that ended since.

    Everything comes from the events themselves. What callbacks log (metrics, hyperparameters, images, tables, texts,
    files) is left out: add the logger ``console`` for those.

    Reference: ``composer/loggers/progress_bar_logger.py``.
    """

    writes_to_terminal = True
    max_delay = 0.1

    def __init__(self, every: float = 10.0) -> None:
        if not every >= 0:
            raise ConfigurationError(f"every is a number of seconds, 0 or more, not {every}")
        self._every = every
        self._bars: dict[str, _Bar] = {}
        self._restored: dict[str, Any] = {}
        self._view: _View | None = None

    def open(self, context: RunContext) -> None:
        """Takes the lower lines of the terminal, if standard error is one."""
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            self._view = _Drawn(Screen(sys.stderr))
        else:
            self._view = _Written(sys.stderr, self._every, self._restored)

    def watch(self, state: Snapshot) -> None:
        """Takes an event in."""
        change = _CHANGES.get(state.event)
        if change is None or self._view is None:
            return
        change(self, state)
        if (total := self._bars.get("total")) is not None:
            total.time = state.time
        self._view.show(list(self._bars.values()), state.time)

    def close(self) -> None:
        """Shows the last of everything, and gives the terminal back."""
        if self._view is not None:
            self._view.close(list(self._bars.values()))
            self._view = None
        self._bars, self._restored = {}, {}

    def state_dict(self) -> dict[str, Any]:
        """The bars, and the lines that are still to come."""
        view = {} if self._view is None else self._view.state_dict()
        return {"bars": {key: asdict(bar) for key, bar in self._bars.items()}, "view": view}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with those; lines written since then are written again."""
        self._bars = {key: _Bar(**bar) for key, bar in state["bars"].items()}
        self._restored = dict(state["view"])

    def _begin_training(self, state: Snapshot) -> None:
        self._bars = {}
        if (longest := state.max_duration) is not None:
            done = float(state.timestamp.get(longest.unit))
            self._bars["total"] = _Bar(
                "total", "", longest.unit.value, state.time, done, done, longest.value, state.time
            )

    def _begin(self, label: str, place: str, state: Snapshot, key: str | None = None, done: float = 0.0) -> None:
        bar = _Bar(label, place, "ba", state.time, done, done, state.dataloader_len, state.time)
        self._bars[key or label] = bar

    def _begin_epoch(self, state: Snapshot) -> None:
        done = float(state.timestamp.batch_in_epoch)
        if state.event is Event.BATCH_END:  # the trainer resumed in the middle of an epoch
            done -= 1
        self._begin("train", f"Epoch {shown_epoch(state):>3}", state, done=done)

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

    def _end_epoch(self, state: Snapshot) -> None:
        self._finish("train", self._named("train", state.train_metrics, state))

    def _end_training(self, state: Snapshot) -> None:
        self._finish("train", {})
        self._finish("total", {})

    def _begin_evaluation(self, state: Snapshot) -> None:
        within_epoch = "train" in self._bars
        place = f"Batch {int(state.timestamp.batch):>3}" if within_epoch else f"Epoch {shown_epoch(state):>3}"
        self._begin(state.dataloader_label or "eval", place, state, "eval")

    def _begin_prediction(self, state: Snapshot) -> None:
        self._begin("predict", "", state)

    def _advance(self, state: Snapshot) -> None:
        is_eval = state.event.is_eval
        if (bar := self._bars.get("eval" if is_eval else "predict")) is not None:
            within = state.eval_timestamp if is_eval else state.predict_timestamp
            bar.done, bar.time = float(within.batch), state.time

    def _end_evaluation(self, state: Snapshot) -> None:
        self._advance(state)
        label = state.dataloader_label or "eval"
        self._finish("eval", self._named(label, state.eval_metrics.get(label, {}), state))

    def _named(self, label: str, metrics: Mapping[str, Any], state: Snapshot) -> dict[str, Any]:
        """Metrics by their short names."""
        known = {**state.eval_metrics, label: metrics}
        names = MetricNames(f"metrics/{one}/{name}" for one, values in known.items() for name in values)
        return {names.short(f"metrics/{label}/{name}"): value for name, value in metrics.items()}

    def _end_prediction(self, state: Snapshot) -> None:
        self._advance(state)
        self._finish("predict", {})

    def _finish(self, key: str, metrics: Mapping[str, Any]) -> None:
        bar = self._bars.pop(key, None)
        if bar is not None and self._view is not None:
            bar.metrics |= {name: value for name, value in metrics.items() if isinstance(value, float | int | str)}
            self._view.finish(bar)


_CHANGES: dict[Event, Callable[[ProgressLogger, Snapshot], None]] = {
    Event.FIT_START: ProgressLogger._begin_training,
    Event.EPOCH_START: ProgressLogger._begin_epoch,
    Event.BATCH_END: ProgressLogger._end_batch,
    Event.EPOCH_END: ProgressLogger._end_epoch,
    Event.FIT_END: ProgressLogger._end_training,
    Event.EVAL_START: ProgressLogger._begin_evaluation,
    Event.EVAL_BATCH_END: ProgressLogger._advance,
    Event.EVAL_END: ProgressLogger._end_evaluation,
    Event.PREDICT_START: ProgressLogger._begin_prediction,
    Event.PREDICT_BATCH_END: ProgressLogger._advance,
    Event.PREDICT_END: ProgressLogger._end_prediction,
}


ProgressLogger.watches = tuple(_CHANGES)


class _Written(_View):
    """Bars as lines, at a bounded rate of the run's own time."""

    def __init__(self, stream: TextIO, every: float, state: Mapping[str, Any]) -> None:
        super().__init__(state)
        self._stream = stream
        self._every = every
        self._next = float(state.get("next", "-inf"))

    def show(self, bars: Sequence[_Bar], time: float) -> None:
        # Of what goes on at once, the last one is what the others wait for. One that is full is about to be finished.
        going_on = [bar for bar in bars[-1:] if bar.done != bar.total]
        if time >= self._next and (going_on or self._finished):
            self._next = time + self._every
            self.close(going_on)

    def close(self, bars: Sequence[_Bar]) -> None:
        for bar in [*self._finished.values(), *bars[-1:]]:
            print(bar.line(), file=self._stream, flush=True)
        self._finished = {}

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "finished": {label: asdict(bar) for label, bar in self._finished.items()}}


class _Drawn(_View):
    """Bars at the bottom of a terminal. What is drawn there is no record, so how often it is drawn is a matter of the
    terminal's time, also when a recording is read much faster than it was made."""

    def __init__(self, screen: Screen) -> None:
        super().__init__({})
        self._screen = screen
        self._full = "█" if (screen.stream.encoding or "").lower().startswith("utf") else "#"
        self._next_drawing = self._next_lines = float("-inf")

    def show(self, bars: Sequence[_Bar], time: float) -> None:
        now = monotonic()
        if now < self._next_drawing:
            return
        self._next_drawing = now + _REDRAW_SECONDS
        if now >= self._next_lines and self._finished:
            self._next_lines = now + _LINE_SECONDS
            self._leave_lines()
        self._screen.draw(self._lines(bars))

    def close(self, bars: Sequence[_Bar]) -> None:
        self._screen.draw([])
        self._leave_lines()
        self._screen.leave(self._lines(bars))
        self._screen.close()

    def _leave_lines(self) -> None:
        self._screen.leave(self._lines(self._finished.values()))
        self._finished = {}

    def _lines(self, bars: Iterable[_Bar]) -> list[str]:
        width = self._screen.width
        return [bar.drawn(self._full, width) for bar in bars]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), _MINUTE)
    hours, minutes = divmod(minutes, _MINUTE)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"
