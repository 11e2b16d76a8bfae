"""The progress of a training: a bar on a terminal, plain lines elsewhere."""

import logging
import shutil
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TextIO

import torch

from offloop.bus.printing import GAP, LOGGERS, AboveLastLine, escape, is_screen, wrap
from offloop.bus.types.metrics import MetricNames
from offloop.bus.types.time import TimeUnit
from offloop.trainer.device.device import DeferredNumbers
from offloop.trainer.engine.state import State

_NEVER = sys.maxsize
_SECOND = 1_000_000_000
_BAR_EVERY = _SECOND // 10
_LINE_EVERY = 5 * _SECOND
_BAR_WIDTH = 20
_ERASE = "\r\x1b[J"


class ProgressDisplay:
    """Shows the progress: on a terminal a bar, at most ten times a second, elsewhere a line every 5 seconds.

    While there is a bar, what this process prints appears above it.

    Without a stream it shows nothing. The training loop compares its clock with :attr:`next_draw` after each batch,
    which is the only cost then."""

    def __init__(self, state: State, clock: Callable[[], int], stream: TextIO | None) -> None:
        self._state = state
        self._clock = clock
        self._stream = stream
        self._has_bar = is_screen(stream)
        self._is_drawn = False
        self._replaced: dict[str, AboveLastLine] = {}
        self._every = _BAR_EVERY if self._has_bar else _LINE_EVERY
        self._began = clock()
        self._share_before = 0.0
        self._shown: Mapping[str, Any] = {}
        self._loss: float | None = None
        self._next_loss: float | DeferredNumbers[float] | None = None
        self.next_draw: int = _NEVER  # when to call draw next, in nanoseconds of the training's clock
        self._plan()

    def begin(self) -> None:
        self._began = self._clock()
        self._share_before = self._share()
        self._shown = self._state.eval_metric_values
        self._plan()

    def set_interval(self, seconds: float) -> None:
        self._every = round(seconds * _SECOND)
        self._plan()

    def draw(self) -> None:
        if self._stream is None:
            return
        self._plan()
        parts = [*self._position(), *self._results()]
        if not self._has_bar:
            self._write_line(parts)
            return
        filled = round(self._share() * _BAR_WIDTH)
        bar = "=" * filled + "." * (_BAR_WIDTH - filled)
        if not self._is_drawn:
            self._is_drawn = True
            for name in LOGGERS:
                logging.getLogger(name).addFilter(self._make_way)
            for name in ("stdout", "stderr"):
                stream = getattr(sys, name)
                if is_screen(stream) and not isinstance(stream, AboveLastLine):
                    stream.flush()
                    self._replaced[name] = AboveLastLine(stream)
                    setattr(sys, name, self._replaced[name])
        self._write(f"\r{_fitted([f'[{bar}]', *map(escape, parts)])}\x1b[K")

    def note(self, line: str) -> None:
        self._write(f"{escape(line)}\n", above=self._is_drawn)

    def _make_way(self, _record: logging.LogRecord) -> bool:
        # A handler may hold the terminal from before the bar. The next drawing restores the bar.
        self._write(_ERASE)
        return True

    def _write(self, text: str, above: bool = False) -> None:
        if self._stream is None:
            return
        try:
            (AboveLastLine(self._stream) if above else self._stream).write(text)
            self._stream.flush()
        except (OSError, ValueError):  # a full disk, a closed pipe or file
            self._stream, self.next_draw = None, _NEVER

    def epoch_end(self) -> None:
        if self._stream is not None:
            self._plan()
            results = self._results(but=self._shown)
            self._shown = self._state.eval_metric_values
            self._write_line([f"epoch {max(self._state.timestamp.values.epoch - 1, 0):>3}", *results])

    def finish(self) -> None:
        self.close()
        if self._stream is not None:
            state = self._state
            _, epochs, batches, samples, *_ = state.timestamp.values
            seconds = (self._clock() - self._began) / _SECOND
            how = "stopped" if state.stopped else "done"
            planned = f" of {state.planned_duration}" if state.stopped else ""
            counts = f"{epochs} ep, {batches} ba, {samples} sp{planned} in {seconds:.1f} s"
            self._write_line([f"{how}: {counts}", *self._results()])

    def close(self) -> None:
        for name, stream in self._replaced.items():
            stream.close()
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.stream)
        self._replaced = {}
        if self._is_drawn:
            self._is_drawn = False
            for name in LOGGERS:
                logging.getLogger(name).removeFilter(self._make_way)
            self._write(_ERASE)

    def _plan(self) -> None:
        if self._stream is not None:
            self.next_draw = self._clock() + self._every

    def _write_line(self, parts: list[str]) -> None:
        for line in wrap(map(escape, parts)):
            self.note(line.rstrip())

    def _position(self) -> list[str]:
        state, share = self._state, self._share()
        epoch, batch = state.timestamp.values.epoch, state.timestamp.values.batch
        parts = [f"{share:4.0%}", f"epoch {epoch}", f"batch {batch}"]
        done = share - self._share_before
        if done > 0:
            passed = (self._clock() - self._began) / _SECOND
            parts.append(f"{_duration(passed * (1 - share) / done)} left")
        return parts

    def _share(self) -> float:
        state, planned = self._state, self._state.planned_duration
        if planned is None or not planned.value:
            return 0.0 if planned is None else 1.0
        done = float(state.timestamp.get(planned.unit).value)
        if planned.unit is TimeUnit.EPOCH and state.dataloader_len:
            # The training time in epochs ignores a part of an epoch; people want to see it.
            done += state.timestamp.values.batch_in_epoch / state.dataloader_len
        return min(1.0, done / planned.value)

    def _results(self, but: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
        loss = self._read_loss()
        parts = [] if loss is None else [f"loss {loss:<8.4g}"]
        evaluated = self._state.eval_metric_values
        # Some evaluators may not have run yet.
        known = {**self._state.eval_metrics, **evaluated}
        names = MetricNames(f"metrics/{label}/{name}" for label, metrics in known.items() for name in metrics)
        for label, metrics in evaluated.items():
            if metrics is not but.get(label):
                for name, value in metrics.items():
                    text = f"{value:.4g}" if isinstance(value, float) else str(value)
                    parts.append(f"{names.short(f'metrics/{label}/{name}')} {text}")
        return parts

    def _read_loss(self) -> float | None:
        if isinstance(self._next_loss, DeferredNumbers) and self._next_loss.ready():
            self._loss = self._next_loss.value()
        batch_loss = self._state.batch_loss
        if isinstance(batch_loss, torch.Tensor):
            self._next_loss = self._state.device.read_later(batch_loss)
        if isinstance(self._next_loss, float):
            self._loss = self._next_loss
        return self._loss


def _fitted(parts: list[str]) -> str:
    width = shutil.get_terminal_size().columns - 1
    while len(parts) > 1 and len(GAP.join(parts).rstrip()) > width:
        parts = parts[:-1]
    return GAP.join(parts).rstrip()[:width]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
