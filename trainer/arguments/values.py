"""Values that users give: as numbers that can be sent, and in messages."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from offloop.bus.errors import ConfigurationError

_PLAIN = (int, float, str, bytes, type(None))


def to_builtin(value: Any) -> Any:
    """Converts a value to numbers, text, lists and maps, which the stream carries; on a GPU this waits for a tensor."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): to_builtin(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_builtin(part) for part in value]
    if hasattr(value, "tolist"):  # numpy's scalars and arrays
        return value.tolist()
    kind = type(value).__name__
    raise ConfigurationError(f"a {kind} cannot be logged: use numbers, text, tensors, lists or maps of them")


def as_int(value: Any) -> int | None:
    """Converts any kind of whole number to ``int``, such as numpy's; ``None`` for anything else and for bools."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def describe(value: Any) -> str:
    """Describes a value in a few words, for a message."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    is_empty = isinstance(value, list | tuple | dict) and not value
    return repr(value) if is_empty or isinstance(value, _PLAIN) else f"a {type(value).__name__}"


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Sets the learning rate of a parameter group."""
    if isinstance(group["lr"], torch.Tensor):
        # Captured and compiled optimizer steps read the rate from this very tensor.
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def optimizer_names(optimizers: list[Any]) -> list[str]:
    """The names of learning rates: class names, see :func:`unique_names`."""
    return unique_names(type(optimizer).__name__ for optimizer in optimizers)


def unique_names(given: Iterable[str]) -> list[str]:
    """The names, a repeated one with ``-1``, ``-2``, ..."""
    names: list[str] = []
    for name in given:
        count = sum(1 for other in names if other.rsplit("-", 1)[0] == name)
        names.append(f"{name}-{count}" if count else name)
    return names
