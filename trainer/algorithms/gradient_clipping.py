"""Limits to the size of gradients."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from offloop.bus.types.event import Event
from offloop.trainer.arguments.checks import check_choice, check_number
from offloop.trainer.engine.state import Algorithm, AlgorithmLogger, State

_SMALLEST_WEIGHT_NORM = 1e-3


class GradientClipping(Algorithm):
    """Makes large gradients smaller just before the optimizers step, after all other algorithms.

    Args:
        clipping_type: ``norm`` scales all gradients of the model together so that their norm is at most the threshold;
            ``value`` limits each number to plus or minus the threshold; ``adaptive`` scales the gradient of each unit
            (a row of a matrix, a filter of a convolution, a whole vector) so that its norm is at most the threshold
            times the norm of the unit's weights, of which ``1e-3`` is the least that counts.
        clipping_threshold: above 0.

    Papers: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", arXiv:1211.5063; for
    ``adaptive``, Brock et al. 2021, "High-Performance Large-Scale Image Recognition Without Normalization",
    arXiv:2102.06171, section 4. Reference: ``composer/algorithms/gradient_clipping``."""

    # What the optimizers step along is to be clipped, and not what another algorithm, such as SAM, replaces afterwards.
    position: ClassVar = {Event.AFTER_TRAIN_BATCH: "last"}

    def __init__(self, clipping_type: str, clipping_threshold: float) -> None:
        self.clipping_type = check_choice(clipping_type, "clipping_type", _CLIP)
        self.clipping_threshold = check_number(clipping_threshold, "clipping_threshold", above=0)

    def match(self, event: Event, state: State) -> bool:
        return event is Event.AFTER_TRAIN_BATCH

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        _CLIP[self.clipping_type](state.model.parameters(), self.clipping_threshold)


@torch.no_grad()
def _clip_adaptively(parameters: Iterable[Tensor], threshold: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            limit = threshold * _unit_norms(parameter).clamp(min=_SMALLEST_WEIGHT_NORM)
            # Division by zero gives infinity, which the clamp turns into a scale of 1.
            parameter.grad.mul_((limit / _unit_norms(parameter.grad)).clamp(max=1))


def _unit_norms(tensor: Tensor) -> Tensor:
    dimensions = tuple(range(1, tensor.ndim)) if tensor.ndim > 1 else None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=dimensions, keepdim=True)
    return norms


_CLIP: dict[str, Callable[..., Any]] = {
    "norm": torch.nn.utils.clip_grad_norm_,
    "value": torch.nn.utils.clip_grad_value_,
    "adaptive": _clip_adaptively,
}
