"""Targets that leave some room for doubt."""

import torch

from offloop.bus.types.event import Event
from offloop.trainer.algorithms.common import check_key, check_share, soft_targets
from offloop.trainer.device.batch import BatchKey
from offloop.trainer.engine.algorithm import Algorithm
from offloop.trainer.engine.engine import AlgorithmLogger
from offloop.trainer.engine.state import State

_EVENTS = frozenset({Event.BEFORE_LOSS, Event.AFTER_LOSS})


class LabelSmoothing(Algorithm):
    """Moves the targets towards the uniform distribution: each becomes ``(1 - smoothing) * target + smoothing /
    classes``, so that the model is not driven to be certain.

    The loss has to take probabilities as targets, as ``torch.nn.functional.cross_entropy`` does. The batch holds the
    original targets again when the loss is computed, and metrics are updated with those. Targets are class numbers
    of shape (...) or probabilities of shape (..., classes), for outputs of shape (..., classes). A row whose class
    number is negative adds nothing to the loss, but a mean over rows counts it.

    Args:
        smoothing: share of the uniform distribution, from 0 (none) to 1 (the targets do not matter any more).
        target_key: where the targets are in the batch, see :mod:`offloop.trainer.device.batch`.

    Raises :class:`offloop.bus.errors.ConfigurationError` for other arguments, and in training for targets that do not
    go with the outputs.

    Example::

        import torch
        from offloop.trainer import Classifier, Trainer
        from offloop.trainer.algorithms.label_smoothing import LabelSmoothing
        model = Classifier(torch.nn.Linear(8, 4))
        data, sgd = [(torch.randn(6, 8), torch.randint(4, (6,)))] * 4, torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"max_duration": "4ba", "publish": False, "progress_bar": False}
        trainer = Trainer(model, data, optimizers=sgd, algorithms=LabelSmoothing(smoothing=0.1), **settings)
        trainer.fit()

    Paper: Szegedy et al. 2016, "Rethinking the Inception Architecture for Computer Vision", arXiv:1512.00567, section
    7. Reference: ``composer/algorithms/label_smoothing``.
    """

    def __init__(self, smoothing: float = 0.1, target_key: BatchKey = 1) -> None:
        self.smoothing = check_share("smoothing", smoothing)
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
