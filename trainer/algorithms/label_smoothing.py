"""Targets that leave some room for doubt."""

import torch

from offloop.bus.types.event import Event
from offloop.trainer.algorithms.common import check_key, soft_targets
from offloop.trainer.arguments.checks import check_number
from offloop.trainer.device.batch import BatchKey
from offloop.trainer.engine.state import Algorithm, AlgorithmLogger, State

_EVENTS = frozenset({Event.BEFORE_LOSS, Event.AFTER_LOSS})


class LabelSmoothing(Algorithm):
    """Moves the targets towards the uniform distribution: ``(1 - smoothing) * target + smoothing / classes``.

    The loss has to take probabilities as targets, as ``torch.nn.functional.cross_entropy`` does. Targets are class
    numbers of shape (...) or probabilities of shape (..., classes), for outputs of shape (..., classes). After the loss
    the batch holds the original targets again, for metrics. A row whose class number is negative adds nothing to the
    loss, but a mean over rows counts it.

    Args:
        smoothing: share of the uniform distribution, from 0 to 1.
        target_key: where the targets are in the batch, see :mod:`offloop.trainer.device.batch`.

    Paper: Szegedy et al. 2016, "Rethinking the Inception Architecture for Computer Vision", arXiv:1512.00567, section
    7. Reference: ``composer/algorithms/label_smoothing``."""

    def __init__(self, smoothing: float = 0.1, target_key: BatchKey = 1) -> None:
        self.smoothing = check_number(smoothing, "smoothing", most=1)
        self.target_key = check_key("target_key", target_key)
        self._original: torch.Tensor | None = None

    def match(self, event: Event, state: State) -> bool:
        return event in _EVENTS

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        if event is Event.AFTER_LOSS:
            state.batch_set_item(self.target_key, self._original)
            self._original = None
            return
        self._original = state.batch_get_item(self.target_key)
        targets = soft_targets(self._original, state.outputs)
        # The sum of a row is 1, or 0 where there is no target.
        uniform = targets.sum(dim=-1, keepdim=True) / targets.shape[-1]
        state.batch_set_item(self.target_key, (1 - self.smoothing) * targets + self.smoothing * uniform)
