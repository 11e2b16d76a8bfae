"""Targets as probabilities, which is what mixed and smoothed targets are."""

from typing import Any

import torch

from bus.errors import ConfigurationError

__all__ = ["soft_targets"]


def soft_targets(targets: Any, outputs: Any) -> torch.Tensor:
    """The targets as probabilities of the classes that the outputs score.

    Args:
        targets: class numbers, integers of shape (...), or probabilities, floats of shape (..., classes), which are
            returned as they are. A negative class number stands for "no target" and becomes a row of zeros.
        outputs: the scores that the model gave, of shape (..., classes).

    Returns:
        Probabilities of the outputs' shape, in single precision or the outputs', whichever is higher: shares of targets
        would be rounded visibly in half precision, and ``torch.nn.functional.cross_entropy`` takes both.

    Raises :class:`bus.errors.ConfigurationError` when the two do not go together.
    """
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        raise ConfigurationError(
            f"outputs of type {type(outputs).__name__} and targets of type {type(targets).__name__} do not go "
            "together: soft targets need one tensor of each; let the model return its scores as a tensor, and name the "
            "targets by target_key"
        )
    expected = outputs.shape if targets.is_floating_point() else outputs.shape[:-1]
    if targets.shape != expected:
        raise ConfigurationError(
            f"{targets.dtype} targets of shape {tuple(targets.shape)} do not go with outputs of shape "
            f"{tuple(outputs.shape)}: use class numbers of shape {tuple(outputs.shape[:-1])}, or probabilities of the "
            "outputs' shape; classes are the last dimension"
        )
    if targets.is_floating_point():
        return targets
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    classes = targets.long().unsqueeze(-1)
    # Not one_hot(): it refuses negative numbers.
    probabilities = torch.zeros(outputs.shape, dtype=dtype, device=targets.device)
    return probabilities.scatter_(-1, classes.clamp(min=0), (classes >= 0).to(dtype))
