"""Conversion of users' values, for the stream and for messages."""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from offloop.bus.errors import ConfigurationError

_PLAIN = (int, float, str, bytes, type(None))


def to_builtin(value: Any, read: Callable[[torch.Tensor], Any] = torch.Tensor.tolist) -> Any:
    """Convert a value to numbers, text, lists and maps. By default it waits for a tensor on a GPU."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return read(value)
    if isinstance(value, Mapping):
        return {str(name): to_builtin(part, read) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_builtin(part, read) for part in value]
    if hasattr(value, "tolist"):  # numpy's scalars and arrays
        return value.tolist()
    kind = type(value).__name__
    raise ConfigurationError(f"a {kind} cannot be logged: use numbers, text, tensors, lists or maps of them")


def as_int(value: Any) -> int | None:
    """Convert any whole number, such as numpy's; ``None`` for anything else and for bools."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    is_empty = isinstance(value, list | tuple | dict) and not value
    return repr(value) if is_empty or isinstance(value, _PLAIN) else f"a {type(value).__name__}"


def set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        # Captured and compiled optimizer steps read the rate from this tensor object.
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def optimizer_names(optimizers: list[Any]) -> list[str]:
    return unique_names(type(optimizer).__name__ for optimizer in optimizers)


def unique_names(given: Iterable[str]) -> list[str]:
    """Append ``-1``, ``-2``, ... to repeated names."""
    names: list[str] = []
    for name in given:
        count = sum(1 for other in names if other.rsplit("-", 1)[0] == name)
        names.append(f"{name}-{count}" if count else name)
    return names
