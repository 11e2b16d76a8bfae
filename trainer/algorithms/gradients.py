"""Clipped gradients, and gradients that lead to flat minima."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer.arguments.checks import check_choice, check_count, check_number
from offloop.trainer.engine.state import Algorithm, AlgorithmLogger, State

_SMALLEST_WEIGHT_NORM = 1e-3


class GradientClipping(Algorithm):
    """Clips gradients just before the optimizers step, after all other algorithms.

    Args:
        clipping_type: ``norm`` scales all gradients of the model together so that their norm is at most the threshold.
            ``value`` limits each number to plus or minus the threshold. ``adaptive`` scales the gradient of each unit
            (a row of a matrix, a filter of a convolution, a whole vector) so that its norm is at most the threshold
            times the norm of the unit's weights, which counts as ``1e-3`` at least.
        clipping_threshold: above 0.

    Papers: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", arXiv:1211.5063; for
    ``adaptive``, Brock et al. 2021, "High-Performance Large-Scale Image Recognition Without Normalization",
    arXiv:2102.06171, section 4. Reference: ``composer/algorithms/gradient_clipping``."""

    # The optimizers must step along clipped gradients, even if another algorithm, such as SAM, replaces them.
    position: ClassVar[dict[Event, Literal["first", "last"]]] = {Event.AFTER_TRAIN_BATCH: "last"}

    def __init__(self, clipping_type: str, clipping_threshold: float) -> None:
        self.clipping_type: str = check_choice(clipping_type, "clipping_type", _CLIP)
        self.clipping_threshold: float = check_number(clipping_threshold, "clipping_threshold", above=0)

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


class SAM(Algorithm):
    """Sharpness-aware minimization: steps along the gradients at the nearby point with the highest loss.

    So training prefers minima with low loss all around. The point is ``weights + rho * gradients / (norm + epsilon)``,
    with the norm over all gradients. Gradients are computed again there, so a batch takes twice the time. Not possible
    with precision ``amp_fp16``. ``state.batch_loss`` is the loss at the weights; ``state.outputs``, ``state.loss`` and
    training metrics are from the second pass.

    Args:
        rho: distance of the point, 0 or more.
        epsilon: prevents a division by zero if the gradients vanish.
        interval: apply it in every such batch; the other batches are trained on as usual.

    Paper: Foret et al. 2021, "Sharpness-Aware Minimization for Efficiently Improving Generalization", arXiv:2010.01412,
    algorithm 1. Reference: ``composer/algorithms/sam``."""

    def __init__(self, rho: float = 0.05, epsilon: float = 1e-12, interval: int = 1) -> None:
        self.rho: float = check_number(rho, "rho")
        self.epsilon: float = check_number(epsilon, "epsilon")
        self.interval: int = check_count(interval, "interval")

    def match(self, event: Event, state: State) -> bool:
        return event is Event.AFTER_TRAIN_BATCH and (int(state.timestamp.batch) + 1) % self.interval == 0

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
        moved = [one for group in groups for one in group["params"] if one.grad is not None]
        # Copies, because subtracting the offset would not always restore the same bits.
        kept = [parameter.detach().clone() for parameter in moved]
        with torch.no_grad():
            norm = torch.stack([torch.linalg.vector_norm(one.grad) for one in moved]).norm()
            for parameter in moved:
                parameter.add_(parameter.grad * (self.rho / (norm + self.epsilon)))
        try:
            state.recompute_gradients()
        finally:
            with torch.no_grad():
                for parameter, weights in zip(moved, kept, strict=True):
                    parameter.copy_(weights)

    def check(self, state: State) -> None:
        if state.scaler is not None:
            raise ConfigurationError(f"SAM does not go with precision {state.precision!r}: use amp_bf16 or fp32")
