"""Ends a training that does not get better."""

import math
from typing import Any

from bus.errors import ConfigurationError
from bus.snapshot import Snapshot
from bus.time import Time, Timestamp, TimeUnit
from consumers.callbacks.stopper import Comparison, Stopper, in_precision_of
from consumers.loggers.console import format_value

__all__ = ["EarlyStopper"]


class EarlyStopper(Stopper):
    """Ends the training when a metric has not become better for a while.

    Args:
        monitor: name of the metric, such as ``MulticlassAccuracy``.
        dataloader_label: label of the evaluator that it belongs to, or ``train``.
        comp: when the first value is better than the second: ``greater`` (``gt``), ``less`` (``lt``), or a function of
            two numbers. By default less for a metric with ``loss``, ``error`` or ``perplexity`` in its name, greater
            for others.
        min_delta: a better value counts only if it is further than this from the best so far.
        patience: the training ends when the best value is more than this ago: a number of epochs, or a time such as
            ``2ep`` or ``500ba``. In batches, a metric of the training is looked at after each of them.

    Looks at the metric at ``EVAL_END`` of its evaluator; one of the training at ``EPOCH_END``, and with ``patience`` in
    batches at ``BATCH_END``. NaN is never better than a number, and any number is better than NaN. Numbers are compared
    in the precision in which the metric was computed.

    Raises :class:`bus.errors.ConfigurationError` for a ``comp`` that is not known, and a ``patience`` in other units or
    below zero. Reference: ``composer/callbacks/early_stopper.py``.
    """

    def __init__(
        self,
        monitor: str,
        dataloader_label: str,
        comp: Comparison | str | None = None,
        min_delta: float = 0.0,
        patience: Time | str | int = 1,
    ) -> None:
        self.patience = Time.from_input(patience, TimeUnit.EPOCH)
        if self.patience.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH) or self.patience.value < 0:
            raise ConfigurationError(
                f"patience is {str(self.patience)!r}: give a number of epochs from 0 on, or a time such as '2ep' or "
                "'500ba'"
            )
        super().__init__(monitor, dataloader_label, comp, on_batch=self.patience.unit is TimeUnit.BATCH)
        self.min_delta = abs(min_delta)
        self.best: float | None = None
        """The best value so far; ``None`` before the first."""
        self.best_occurred: Timestamp | None = None
        """When that was."""

    def state_dict(self) -> dict[str, Any]:
        """The best value and when it was, beside what every stopper keeps."""
        occurred = None if self.best_occurred is None else list(self.best_occurred.values)
        return {**super().state_dict(), "best": self.best, "best_occurred": occurred}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes them up."""
        super().load_state_dict(state)
        occurred = state["best_occurred"]
        self.best = state["best"]
        self.best_occurred = None if occurred is None else Timestamp.from_values(occurred)

    def judge(self, value: float, state: Snapshot) -> bool:
        """Whether the best value is further back than the patience reaches."""
        now = state.timestamp
        if self.best is None or self.best_occurred is None or self._is_better(value, self.best):
            self.best, self.best_occurred = value, now
        unit = self.patience.unit
        return now.get(unit) - self.best_occurred.get(unit) > self.patience

    def reason(self, value: float, state: Snapshot) -> str:
        """The best value, and for how long there was no better one."""
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
