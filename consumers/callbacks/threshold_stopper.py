"""Ends a training that is good enough."""

from bus.snapshot import Snapshot
from consumers.callbacks.stopper import Comparison, Stopper, in_precision_of
from consumers.loggers.console import format_value

__all__ = ["ThresholdStopper"]


class ThresholdStopper(Stopper):
    """Ends the training when a metric is better than a threshold.

    Args:
        monitor: name of the metric, such as ``MulticlassAccuracy``.
        dataloader_label: label of the evaluator that it belongs to, or ``train``.
        threshold: the value to be passed; the threshold itself does not end the training.
        comp: when the first value is better than the second: ``greater`` (``gt``), ``less`` (``lt``), or a function of
            two numbers. By default less for a metric with ``loss``, ``error`` or ``perplexity`` in its name, greater
            for others.
        stop_on_batch: whether a metric of the training is looked at after each batch too.

    Looks at the metric at ``EVAL_END`` of its evaluator; one of the training at ``EPOCH_END``, and with
    ``stop_on_batch`` at ``BATCH_END``. Numbers are compared in the precision in which the metric was computed.

    Raises :class:`bus.errors.ConfigurationError` for a ``comp`` that is not known. Reference:
    ``composer/callbacks/threshold_stopper.py``.
    """

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
        """Whether the value has passed the threshold."""
        return bool(self.comp_func(value, in_precision_of(value, self.threshold)))

    def reason(self, value: float, state: Snapshot) -> str:
        """The value and the threshold that it has passed."""
        return f"threshold-stop: {self.monitor} is {format_value(value)}, the threshold is {self.threshold:g}"
