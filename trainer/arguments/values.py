"""Values that users give: as numbers that can be sent, and in messages."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from bus.errors import ConfigurationError

__all__ = ["described", "numbered_names", "optimizer_names", "plain", "whole"]

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


def whole(value: Any) -> int | None:
    """The value as an ``int``, from any kind of whole number, such as numpy's or a tensor with one element; ``None``
    for anything else, also for ``True`` and ``False``."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def described(value: Any) -> str:
    """The value in a few words, for a message of one line."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    is_empty = isinstance(value, list | tuple | dict) and not value
    return repr(value) if is_empty or isinstance(value, _PLAIN) else f"a {type(value).__name__}"


def optimizer_names(optimizers: list[Any]) -> list[str]:
    """The names that learning rates go by: class names, a further optimizer of a class with ``-1``, ``-2``, ..."""
    return numbered_names(type(optimizer).__name__ for optimizer in optimizers)


def numbered_names(given: Iterable[str]) -> list[str]:
    """The names, a further one that is the same with ``-1``, ``-2``, ..."""
    names: list[str] = []
    for name in given:
        count = sum(1 for other in names if other.rsplit("-", 1)[0] == name)
        names.append(f"{name}-{count}" if count else name)
    return names
