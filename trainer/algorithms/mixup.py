"""Training on weighted averages of two rows."""

import torch

from offloop.bus.errors import ConfigurationError
from offloop.trainer.algorithms.mixing import Mixing
from offloop.trainer.device.batch import BatchKey


class MixUp(Mixing):
    """Trains on ``(1 - mixing) * row + mixing * partner``, the partner being another row of the microbatch, and on
    their targets in the same proportion.

    The coefficient is drawn for each microbatch from Beta(alpha, alpha); of it and its complement the smaller one is
    taken, so that a row's own target always counts most and an accuracy over the original targets means something.

    Args:
        alpha: parameter of the Beta distribution, 0 or more: the larger, the closer to equal parts; 0 for no mixing.
        interpolate_loss: mix the losses for both sets of targets, for losses that take no probabilities as targets.
        input_key, target_key: where inputs (floats of shape (rows, ...)) and targets (class numbers, probabilities or
            values) are in the batch, see :mod:`offloop.trainer.device.batch`.

    Raises :class:`offloop.bus.errors.ConfigurationError`, see :class:`offloop.trainer.algorithms.mixing.Mixing`.

    Example::

        import torch
        from offloop.trainer import Classifier, Trainer
        from offloop.trainer.algorithms.mixup import MixUp
        model = Classifier(torch.nn.Linear(8, 4))
        data, sgd = [(torch.randn(6, 8), torch.randint(4, (6,)))] * 4, torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"max_duration": "4ba", "publish": False, "progress_bar": False}
        trainer = Trainer(model, data, optimizers=sgd, algorithms=MixUp(alpha=0.2), **settings)
        trainer.fit()

    Paper: Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization", arXiv:1710.09412. Reference:
    ``composer/algorithms/mixup``.
    """

    def __init__(
        self, alpha: float = 0.2, interpolate_loss: bool = False, input_key: BatchKey = 0, target_key: BatchKey = 1
    ) -> None:
        super().__init__(alpha, interpolate_loss, input_key, target_key)

    def mix(self, inputs: torch.Tensor, partners: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The weighted averages, and the weight of the partners, which is at most one half."""
        if not inputs.is_floating_point():
            raise ConfigurationError(
                f"MixUp cannot average inputs of type {inputs.dtype}: it needs floats; convert them in the dataloader"
            )
        coefficient = self.draw_coefficient()
        mixing = min(coefficient, 1 - coefficient)
        return inputs.lerp(inputs[partners], mixing), mixing
