"""Callbacks that end a training: when a metric no longer improves, or has reached a value."""

import math
import operator
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from offloop.bus.errors import ConfigurationError
from offloop.bus.printing import shorten
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.demand import BASE_EVENTS, Demand
from offloop.bus.types.event import Event
from offloop.bus.types.metrics import direction_of, is_named, logged_in, logged_name, with_logged_names
from offloop.bus.types.time import Time, TimeUnit
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers.api.callback import Callback, CannotWorkError
from offloop.consumers.api.logger import Logger
from offloop.consumers.loggers.console import format_value

Comparison: TypeAlias = Callable[[Any, Any], Any]
"""Returns True if the first value is better than the second."""

TRAIN = "train"
LOGGED = "logged"
_COMPARISONS: Mapping[str, Comparison] = {
    "gt": operator.gt,
    "greater": operator.gt,
    "lt": operator.lt,
    "less": operator.lt,
}
_SMALL_IS_GOOD = ("loss", "error", "perplexity")


class Stopper(Callback, ABC):
    """Watches one metric of the training or of one evaluator, and asks for the end of the training.

    With the label ``logged`` it watches a value that the training, an actor or another consumer logs under its full
    name, whenever it is logged. With ``on_batch`` a metric of the training is checked after each batch too, and not
    only after each epoch. An unknown label or metric ends it with :class:`offloop.consumers.CannotWorkError`, which
    lists the known ones: at the start of a training that publishes the labels of its evaluators, otherwise at the first
    evaluation."""

    keeps: tuple[str, ...] = ("_has_seen_label", "_is_announced")
    sees_actors = True

    def __init__(self, monitor: str, dataloader_label: str, comp: Comparison | str | None, on_batch: bool) -> None:
        self.monitor: str = logged_name(monitor) if dataloader_label == LOGGED else monitor
        self.dataloader_label = dataloader_label
        self.comp_func: Comparison = _comparison(comp, monitor)
        events = {Event.BATCH_END, Event.EPOCH_END} if on_batch else {Event.EPOCH_END}
        self._looks_at = events if dataloader_label == TRAIN else {Event.EVAL_END}
        if dataloader_label == LOGGED:
            self._looks_at = set(BASE_EVENTS)
        else:
            self.barrier_events: set[Event] = self._looks_at  # an object's own, as the options say
        self._has_seen_label = dataloader_label in (TRAIN, LOGGED)
        self._is_announced = False

    def demand(self) -> Demand:
        """Return the events at which it decides, and those that show whether its label exists."""
        of_labels = (
            () if self.dataloader_label in (TRAIN, LOGGED) else (Event.FIT_START, Event.EVAL_AFTER_ALL, Event.FIT_END)
        )
        return Demand.of({*self._looks_at, *of_labels})

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        if self.dataloader_label != LOGGED:
            super().run_event(event, state, logger)
            return
        for _, logged in logged_in(state.fields):
            if self.monitor in (values := with_logged_names(logged)):
                self._look(values, state)

    @abstractmethod
    def judge(self, value: float, state: Snapshot) -> bool:
        """Record the metric's value at an event; return True to end the training."""

    @abstractmethod
    def reason(self, value: float, state: Snapshot) -> str: ...

    def fit_start(self, state: Snapshot, logger: Logger) -> None:
        labels = state.fields.get("evaluators")
        if isinstance(labels, list):
            self._is_announced = self.dataloader_label in labels
            if not self._is_announced and not self._has_seen_label:
                raise self._problem(f"there is no evaluator {self.dataloader_label!r}", [TRAIN, *labels])

    def eval_after_all(self, state: Snapshot, logger: Logger) -> None:
        if not self._has_seen_label and not self._is_announced:
            raise self._not_evaluated("", state)

    def fit_end(self, state: Snapshot, logger: Logger) -> None:
        if not self._has_seen_label and self.dataloader_label not in state.eval_metrics:
            raise self._not_evaluated(" before the training was over", state)

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        self._look(state.train_metrics, state)

    def epoch_end(self, state: Snapshot, logger: Logger) -> None:
        self._look(state.train_metrics, state)

    def eval_end(self, state: Snapshot, logger: Logger) -> None:
        if state.dataloader_label == self.dataloader_label:
            self._has_seen_label = True
            self._look(state.eval_metrics.get(self.dataloader_label, {}), state)

    def _look(self, metrics: Mapping[str, Any], state: Snapshot) -> None:
        name = self.monitor if self.monitor in metrics else next(filter(self._is_meant, metrics), None)
        value = None if name is None else metrics[name]
        if isinstance(value, int | float):
            if self.judge(value, state):
                state.stop_training(self.reason(value, state))
        elif name is not None:
            kind = type(value).__name__
            raise self._problem(f"metric {self.monitor!r} of {self.dataloader_label!r} is a {kind}, not a number")
        else:
            raise self._problem(f"{self.dataloader_label!r} has no metric {self.monitor!r}", _metrics_of(state))

    def _is_meant(self, name: str) -> bool:
        return is_named(f"metrics/{self.dataloader_label}/{name}", self.monitor)

    def _not_evaluated(self, when: str, state: Snapshot) -> CannotWorkError:
        return self._problem(f"nothing was evaluated as {self.dataloader_label!r}{when}", _metrics_of(state))

    def _problem(self, problem: str, names: list[str] | None = None) -> CannotWorkError:
        there = ""
        if names is not None:
            there = f"there are: {', '.join(shorten(names, 'of them')) or 'none'}; "
        return CannotWorkError(
            f"{type(self).__name__} cannot stop this training: {problem}; {there}give it another monitor or "
            "dataloader_label"
        )


def _metrics_of(state: Snapshot) -> list[str]:
    known = {TRAIN: state.train_metrics, **state.eval_metrics}
    return [f"{label}/{name}" for label, metrics in known.items() if isinstance(metrics, Mapping) for name in metrics]


def in_precision_of(value: float, other: float) -> float:
    """Return the other number in single precision if the value is a single.

    Otherwise 0.3 as a metric, computed in single precision, would be greater than the threshold 0.3."""
    return _single(other) if _single(value) == value else other


def _single(value: float) -> float:
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded


def _comparison(comp: Comparison | str | None, monitor: str) -> Comparison:
    if comp is None:
        is_less = direction_of(monitor) == "min" or any(word in monitor.lower() for word in _SMALL_IS_GOOD)
        return operator.lt if is_less else operator.gt
    # Comparisons of torch and numpy do not accept plain numbers, or do not return a plain bool.
    name = comp if isinstance(comp, str) else getattr(comp, "__name__", "")
    if name in _COMPARISONS:
        return _COMPARISONS[name]
    if isinstance(comp, str) or not callable(comp):
        raise ConfigurationError(
            f"comp {comp!r} is not known: use {', '.join(_COMPARISONS)}, or from Python a function of two numbers"
        )
    return comp


class EarlyStopper(Stopper):
    """Ends the training when a metric has not become better for a while.

    Args:
        monitor: full or short name of the metric, such as ``MulticlassAccuracy``.
        dataloader_label: label of its evaluator, ``train``, or ``logged``.
        comp: ``greater`` (``gt``) or ``less`` (``lt``) values are better, or a function of two numbers that says if the
            first is better. By default less for a metric with ``loss``, ``error`` or ``perplexity`` in its name, and
            for others of which the least is best, such as ``CrossEntropy`` and ``MSE``.
        min_delta: a better value counts only if it is further than this from the best so far.
        patience: the training ends when the best value is more than this ago: a number of epochs, or a time such as
            ``2ep`` or ``500ba``.

    Checks the metric at ``EVAL_END`` of its evaluator; a metric of the training at ``EPOCH_END``, and with ``patience``
    in batches at ``BATCH_END``. Any number is better than NaN. Numbers are compared in the precision of the metric.

    Raises :class:`offloop.bus.errors.ConfigurationError` for an invalid ``comp`` or ``patience``. Reference:
    ``composer/callbacks/early_stopper.py``."""

    def __init__(
        self,
        monitor: str,
        dataloader_label: str,
        comp: Comparison | str | None = None,
        min_delta: float = 0.0,
        patience: Time | str | int = 1,
    ) -> None:
        self.patience: Time = Time.from_input(patience, TimeUnit.EPOCH)
        if self.patience.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH) or self.patience.value < 0:
            raise ConfigurationError(
                f"patience is {str(self.patience)!r}: give a number of epochs from 0 on, or a time such as '2ep' or "
                "'500ba'"
            )
        super().__init__(monitor, dataloader_label, comp, on_batch=self.patience.unit is TimeUnit.BATCH)
        self.min_delta: float = abs(min_delta)
        self.best: float | None = None
        """The best value so far; ``None`` before the first."""
        self.best_occurred: Timestamp | None = None
        """The time of the best value."""

    def state_dict(self) -> dict[str, Any]:
        occurred = None if self.best_occurred is None else list(self.best_occurred.values)
        return {**super().state_dict(), "best": self.best, "best_occurred": occurred}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        occurred = state["best_occurred"]
        self.best = state["best"]
        self.best_occurred = None if occurred is None else Timestamp.from_values(occurred)

    def judge(self, value: float, state: Snapshot) -> bool:
        now = state.timestamp
        if self.best is None or self.best_occurred is None or self._is_better(value, self.best):
            self.best, self.best_occurred = value, now
        unit = self.patience.unit
        return now.get(unit) - self.best_occurred.get(unit) > self.patience

    def reason(self, value: float, state: Snapshot) -> str:
        assert self.best is not None  # it has judged a value
        assert self.best_occurred is not None
        unit = self.patience.unit
        count = (state.timestamp.get(unit) - self.best_occurred.get(unit)).value
        units = ("epoch", "epochs") if unit is TimeUnit.EPOCH else ("batch", "batches")
        return f"early-stop: {self.monitor} not better than {format_value(self.best)} for {count} {units[count != 1]}"

    def _is_better(self, value: float, best: float) -> bool:
        if math.isnan(best):
            return not math.isnan(value)
        difference = in_precision_of(value, abs(value - best))
        return bool(self.comp_func(value, best)) and difference > in_precision_of(value, self.min_delta)


class ThresholdStopper(Stopper):
    """Ends the training when a metric is better than a threshold.

    Args:
        monitor: full or short name of the metric, such as ``MulticlassAccuracy``.
        dataloader_label: label of its evaluator, ``train``, or ``logged``.
        threshold: the value to pass; the threshold itself does not end the training.
        comp: as for :class:`EarlyStopper`.
        stop_on_batch: check a metric of the training after each batch too.

    Checks the metric when :class:`EarlyStopper` does, with the same precision.

    Raises :class:`offloop.bus.errors.ConfigurationError` for an invalid ``comp``. Reference:
    ``composer/callbacks/threshold_stopper.py``."""

    def __init__(
        self,
        monitor: str,
        dataloader_label: str,
        threshold: float,
        *,
        comp: Comparison | str | None = None,
        stop_on_batch: bool = False,
    ) -> None:
        super().__init__(monitor, dataloader_label, comp, on_batch=stop_on_batch)
        self.threshold = threshold

    def judge(self, value: float, state: Snapshot) -> bool:
        return bool(self.comp_func(value, in_precision_of(value, self.threshold)))

    def reason(self, value: float, state: Snapshot) -> str:
        return f"threshold-stop: {self.monitor} is {format_value(value)}, the threshold is {self.threshold:g}"
