"""What callbacks that end a training have in common: the metric that they watch, and which value of it is better."""

import math
import operator
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from bus.damage import shortened
from bus.errors import ConfigurationError
from bus.event import Event
from bus.snapshot import Snapshot
from consumers.callback import Callback, CannotWorkError
from consumers.logger import Logger

__all__ = ["Comparison", "Stopper", "in_precision_of"]

Comparison: TypeAlias = Callable[[float, float], Any]
"""Whether the first value is better than the second."""

TRAIN = "train"

_COMPARISONS: Mapping[str, Comparison] = {
    "gt": operator.gt,
    "greater": operator.gt,
    "lt": operator.lt,
    "less": operator.lt,
}
_SMALL_IS_GOOD = ("loss", "error", "perplexity")


class Stopper(Callback, ABC):
    """Watches one metric of the training or of one evaluator, and asks for the end of the training.

    Args:
        monitor: name of the metric, such as ``MulticlassAccuracy``.
        dataloader_label: label of the evaluator that it belongs to, or ``train``.
        comp: when the first value is better than the second: ``greater`` (``gt``), ``less`` (``lt``), or a function of
            two numbers. By default less for a metric with ``loss``, ``error`` or ``perplexity`` in its name, greater
            for others.
        on_batch: whether a metric of the training is looked at after each batch too, and not only after each epoch.

    A label or a metric that does not exist ends it with :class:`consumers.CannotWorkError`, which says what there is:
    at the start of the training where that tells the labels of its evaluators, otherwise at the first evaluation.
    """

    def __init__(self, monitor: str, dataloader_label: str, comp: Comparison | str | None, on_batch: bool) -> None:
        self.monitor = monitor
        self.dataloader_label = dataloader_label
        self.comp_func = _comparison(comp, monitor)
        events = {Event.BATCH_END, Event.EPOCH_END} if on_batch else {Event.EPOCH_END}
        self._looks_at = events if dataloader_label == TRAIN else {Event.EVAL_END}
        self.decides = self._looks_at  # type: ignore[misc]  # an object's own, as the options say
        self._has_seen_label = dataloader_label == TRAIN
        self._is_announced = False
        self._others: set[str] = set()

    def wanted_events(self) -> set[Event]:
        """The events at which it decides, and those at which it finds out whether there is such a label."""
        if self.dataloader_label == TRAIN:
            return set(self._looks_at)
        return {*self._looks_at, Event.FIT_START, Event.EVAL_AFTER_ALL, Event.FIT_END}

    def state_dict(self) -> dict[str, Any]:
        """What is known of the labels of evaluators."""
        return {
            "has_seen_label": self._has_seen_label,
            "is_announced": self._is_announced,
            "others": sorted(self._others),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes them up."""
        self._has_seen_label = state["has_seen_label"]
        self._is_announced = state["is_announced"]
        self._others = set(state["others"])

    @abstractmethod
    def judge(self, value: float, state: Snapshot) -> bool:
        """Takes in the metric's value at an event; whether the training is to end."""

    @abstractmethod
    def reason(self, value: float, state: Snapshot) -> str:
        """Why the training is to end, now that the metric has that value."""

    def fit_start(self, state: Snapshot, logger: Logger) -> None:
        """Raises :class:`consumers.CannotWorkError` if the training says that it has no such evaluator."""
        labels = state.fields.get("evaluators")
        if isinstance(labels, list):
            self._is_announced = self.dataloader_label in labels
            if not self._is_announced and not self._has_seen_label:
                raise self._problem(f"there is no evaluator {self.dataloader_label!r}", [TRAIN, *labels])

    def eval_after_all(self, state: Snapshot, logger: Logger) -> None:
        """Raises :class:`consumers.CannotWorkError` if an evaluation had no such evaluator and none is to come."""
        if not self._has_seen_label and not self._is_announced:
            raise self._not_evaluated("", state)

    def fit_end(self, state: Snapshot, logger: Logger) -> None:
        """Raises :class:`consumers.CannotWorkError` if nothing was ever evaluated under that label."""
        if not self._has_seen_label and self.dataloader_label not in state.eval_metrics:
            raise self._not_evaluated(" before the training was over", state)

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        """Looks at the training's metric after a batch."""
        self._look(state.train_metrics, state)

    def epoch_end(self, state: Snapshot, logger: Logger) -> None:
        """Looks at the training's metric after an epoch."""
        self._look(state.train_metrics, state)

    def eval_end(self, state: Snapshot, logger: Logger) -> None:
        """Looks at the metric if the evaluator is the one that it belongs to."""
        label = state.dataloader_label
        if label == self.dataloader_label:
            self._has_seen_label = True
            self._look(state.eval_metrics.get(label, {}), state)
        elif label is not None and not self._has_seen_label:
            # A loop may have several evaluators and publish nothing after the last: the next evaluation tells.
            if label in self._others and not self._is_announced and state.timestamp.batch > 0:
                raise self._not_evaluated("", state)
            self._others.add(label)

    def _look(self, metrics: Mapping[str, Any], state: Snapshot) -> None:
        value = metrics.get(self.monitor)
        if isinstance(value, int | float):
            if self.judge(value, state):
                state.stop_training(self.reason(value, state))
        elif self.monitor in metrics:
            kind = type(value).__name__
            raise self._problem(f"metric {self.monitor!r} of {self.dataloader_label!r} is a {kind}, not a number")
        else:
            raise self._problem(f"{self.dataloader_label!r} has no metric {self.monitor!r}", _metrics_of(state))

    def _not_evaluated(self, when: str, state: Snapshot) -> CannotWorkError:
        return self._problem(f"nothing was evaluated as {self.dataloader_label!r}{when}", _metrics_of(state))

    def _problem(self, problem: str, names: list[str] | None = None) -> CannotWorkError:
        there = ""
        if names is not None:
            there = f"there are: {', '.join(shortened(names, 'of them')) or 'none'}; "
        return CannotWorkError(
            f"{type(self).__name__} cannot stop this training: {problem}; {there}give it another monitor or "
            "dataloader_label"
        )


def _metrics_of(state: Snapshot) -> list[str]:
    """The metrics that there are, each behind its label."""
    known = {TRAIN: state.train_metrics, **state.eval_metrics}
    return [f"{label}/{name}" for label, metrics in known.items() if isinstance(metrics, Mapping) for name in metrics]


def in_precision_of(value: float, other: float) -> float:
    """The other number as precise as the value is: in single precision if the value is a number of that.

    Metrics are computed in single precision and thresholds are written in double; compared as they are, 0.3 as a metric
    would be greater than 0.3."""
    return _single(other) if _single(value) == value else other


def _single(value: float) -> float:
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded


def _comparison(comp: Comparison | str | None, monitor: str) -> Comparison:
    if comp is None:
        return operator.lt if any(word in monitor.lower() for word in _SMALL_IS_GOOD) else operator.gt
    # Those of torch and numpy take no plain numbers, or give no plain answer.
    name = comp if isinstance(comp, str) else getattr(comp, "__name__", "")
    if name in _COMPARISONS:
        return _COMPARISONS[name]
    if isinstance(comp, str) or not callable(comp):
        raise ConfigurationError(
            f"comp {comp!r} is not known: use {', '.join(_COMPARISONS)}, or from Python a function of two numbers"
        )
    return comp
