"""In which numbers a model computes."""

import contextlib
from collections.abc import Callable

import torch

from bus.errors import ConfigurationError
from trainer.device import Device

__all__ = ["PRECISIONS", "autocast_of", "check_precision", "make_scaler"]

PRECISIONS = {"fp32": None, "amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
"""The precisions by name, with the type that torch's automatic mixed precision computes in where that is good enough.
Weights, gradients of weights and the optimizers stay in 32 bits."""


def check_precision(precision: str | None) -> str:
    """The precision's name, ``fp32`` by default; :class:`bus.errors.ConfigurationError` for an unknown one."""
    name = "fp32" if precision is None else str(precision)
    if name not in PRECISIONS:
        raise ConfigurationError(f"precision {name!r} is not allowed: use {', '.join(PRECISIONS)}")
    return name


def autocast_of(precision: str, device: Device) -> Callable[[], contextlib.AbstractContextManager[object]] | None:
    """Makes the context in which forward passes and losses are computed; ``None`` when they need none."""
    kind = PRECISIONS[precision]
    if kind is None:
        return None
    return lambda: torch.autocast(device.torch_device.type, dtype=kind)


def make_scaler(precision: str, device: Device) -> "torch.amp.GradScaler | None":
    """What keeps small gradients from vanishing in 16 bits: it multiplies the loss, and divides the gradients again."""
    if precision != "amp_fp16":
        return None
    return torch.amp.GradScaler(device.torch_device.type)
