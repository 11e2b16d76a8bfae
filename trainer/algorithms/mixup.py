"""Training on weighted averages of two rows."""

import torch

from offloop.bus.errors import ConfigurationError
from offloop.trainer.algorithms.mixing import Mixing
from offloop.trainer.device.batch import BatchKey


class MixUp(Mixing):
    """Trains on ``(1 - mixing) * row + mixing * partner``, the partner being another row of the microbatch, and on
    their targets in the same proportion.

    The coefficient is drawn for each microbatch from Beta(alpha, alpha); of it and its complement the smaller one is
    taken, so that a row's own target counts most and an accuracy over the original targets is meaningful.

    Args:
        alpha: parameter of the Beta distribution, 0 or more: the larger, the closer to equal parts; 0 for no mixing.
        interpolate_loss: mix the losses for both sets of targets, for losses that take no probabilities as targets.
        input_key, target_key: where inputs (floats of shape (rows, ...)) and targets (class numbers, probabilities or
            values) are in the batch, see :mod:`offloop.trainer.device.batch`.

    Paper: Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization", arXiv:1710.09412. Reference:
    ``composer/algorithms/mixup``."""

    def __init__(
        self, alpha: float = 0.2, interpolate_loss: bool = False, input_key: BatchKey = 0, target_key: BatchKey = 1
    ) -> None:
        super().__init__(alpha, interpolate_loss, input_key, target_key)

    def mix(self, inputs: torch.Tensor, partners: torch.Tensor) -> tuple[torch.Tensor, float]:
        if not inputs.is_floating_point():
            raise ConfigurationError(
                f"MixUp cannot average inputs of type {inputs.dtype}: it needs floats; convert them in the dataloader"
            )
        coefficient = self.draw_coefficient()
        mixing = min(coefficient, 1 - coefficient)
        return inputs.lerp(inputs[partners], mixing), mixing
