"""What callbacks that end a training have in common: the metric that they watch, and which value of it is better."""

import math
import operator
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from bus.errors import ConfigurationError
from bus.event import Event
from bus.snapshot import Snapshot
from consumers.callback import Callback
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

    A label or a metric that does not exist is an error, raised once: at the start of the training where that tells the
    labels of its evaluators, otherwise when the metric should have been there.
    """

    def __init__(self, monitor: str, dataloader_label: str, comp: Comparison | str | None, on_batch: bool) -> None:
        self.monitor = monitor
        self.dataloader_label = dataloader_label
        self.comp_func = _comparison(comp, monitor)
        events = {Event.BATCH_END, Event.EPOCH_END} if on_batch else {Event.EPOCH_END}
        self._looks_at = events if dataloader_label == TRAIN else {Event.EVAL_END}
        self.decides = self._looks_at  # type: ignore[misc]  # an object's own, as the options say
        self._has_seen_label = dataloader_label == TRAIN
        self._has_complained = False

    def wanted_events(self) -> set[Event]:
        """The events at which it decides, and those at which it finds out whether there is such a label."""
        return {*self._looks_at, Event.FIT_START, Event.FIT_END}

    def state_dict(self) -> dict[str, Any]:
        """Whether the label has been seen, and an error been raised."""
        return {"has_seen_label": self._has_seen_label, "has_complained": self._has_complained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes them up."""
        self._has_seen_label = state["has_seen_label"]
        self._has_complained = state["has_complained"]

    @abstractmethod
    def judge(self, value: float, state: Snapshot) -> bool:
        """Takes in the metric's value at an event; whether the training is to end."""

    @abstractmethod
    def reason(self, value: float, state: Snapshot) -> str:
        """Why the training is to end, now that the metric has that value."""

    def fit_start(self, state: Snapshot, logger: Logger) -> None:
        """Raises :class:`bus.errors.ConfigurationError` if the training says that it has no such evaluator."""
        labels = state.fields.get("evaluators")
        if labels is not None and not self._has_seen_label and self.dataloader_label not in labels:
            self._complain(f"there is no evaluator {self.dataloader_label!r}", "labels", [TRAIN, *labels])

    def fit_end(self, state: Snapshot, logger: Logger) -> None:
        """Raises :class:`bus.errors.ConfigurationError` if nothing was ever evaluated under that label."""
        if not self._has_seen_label and self.dataloader_label not in state.eval_metrics:
            problem = f"nothing was evaluated as {self.dataloader_label!r} before the training was over"
            self._complain(problem, "labels", [TRAIN, *state.eval_metrics])

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        """Looks at the training's metric after a batch."""
        self._look(state.train_metrics, state)

    def epoch_end(self, state: Snapshot, logger: Logger) -> None:
        """Looks at the training's metric after an epoch."""
        self._look(state.train_metrics, state)

    def eval_end(self, state: Snapshot, logger: Logger) -> None:
        """Looks at the metric if the evaluator is the one that it belongs to."""
        if state.dataloader_label == self.dataloader_label:
            self._has_seen_label = True
            self._look(state.eval_metrics.get(self.dataloader_label, {}), state)

    def _look(self, metrics: Mapping[str, Any], state: Snapshot) -> None:
        value = metrics.get(self.monitor)
        if isinstance(value, int | float):
            if self.judge(value, state):
                state.stop_training(self.reason(value, state))
        elif self.monitor in metrics:
            kind = type(value).__name__
            self._complain(f"metric {self.monitor!r} of {self.dataloader_label!r} is a {kind}, not a number")
        else:
            self._complain(f"{self.dataloader_label!r} has no metric {self.monitor!r}", "metrics", list(metrics))

    def _complain(self, problem: str, what: str = "", names: list[str] | None = None) -> None:
        if self._has_complained:
            return
        self._has_complained = True
        there = f"the {what} that there are: {', '.join(names) or 'none'}; " if names is not None else ""
        raise ConfigurationError(
            f"{type(self).__name__} cannot stop this training: {problem}; {there}give it another "
            f"{'dataloader_label' if what == 'labels' else 'monitor'}"
        )


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
