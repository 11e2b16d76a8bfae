"""Trees of a checkpoint, compared bit by bit."""

import struct
from typing import Any

import torch


def exactly(value: Any) -> Any:
    """Return the value in a form that is equal only where kinds and bits are: neither 1 and True nor two zeros are."""
    if isinstance(value, torch.Tensor):
        value = value.resolve_conj()
        return (value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, dict):
        return ("dict", [(exactly(key), exactly(value[key])) for key in sorted(value, key=repr)])
    if isinstance(value, list | tuple):
        return (type(value), [exactly(item) for item in value])
    return (type(value), struct.pack(">d", value) if isinstance(value, float) else value)
