"""Numbers that can be sent."""

from collections.abc import Mapping
from typing import Any

import torch

from bus.errors import ConfigurationError

__all__ = ["plain"]

_PLAIN = (int, float, str, bytes, type(None))


def plain(value: Any) -> Any:
    """The value as numbers, text, lists and maps, which is what the stream carries; on a GPU this waits for a tensor.

    Raises :class:`bus.errors.ConfigurationError` for anything else."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if hasattr(value, "tolist"):  # numpy's scalars and arrays
        return value.tolist()
    kind = type(value).__name__
    raise ConfigurationError(f"a {kind} cannot be logged: use numbers, text, tensors, lists or maps of them")
