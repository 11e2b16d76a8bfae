"""Parts of a batch: inputs and targets, whatever the type of the batch."""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any

import torch

from offloop.bus.errors import ConfigurationError

Getter = Callable[[Any], Any]
Setter = Callable[[Any, Any], Any]
BatchKey = int | str | list[int | str] | tuple[Getter, Setter]
"""An index, a name, a path of these, or functions ``get(batch)`` and ``set(batch, value)``, which returns the batch."""


def batch_get(batch: Any, key: BatchKey) -> Any:
    if isinstance(key, tuple):
        return key[0](batch)
    for step in key if isinstance(key, list) else [key]:
        batch = _step(batch, step, key)
    return batch


def batch_set(batch: Any, key: BatchKey, value: Any) -> Any:
    """Return a copy with a new value under the key. The original may be needed again, for a smaller microbatch."""
    if isinstance(key, tuple):
        return key[1](batch, value)
    steps = key if isinstance(key, list) else [key]
    part = _step(batch, steps[0], key)
    if len(steps) > 1:
        value = batch_set(part, steps[1:], value)
    if isinstance(batch, tuple):
        position = int(steps[0])
        parts = [*batch]
        parts[position] = value
        return type(batch)._make(parts) if hasattr(batch, "_make") else type(batch)(parts)
    copied = copy(batch)
    copied[steps[0]] = value
    return copied


def _step(batch: Any, step: int | str, key: BatchKey) -> Any:
    if isinstance(batch, Mapping | list | tuple):
        try:
            return batch[step]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            pass
    has = (
        f"the keys {list(batch)}"
        if isinstance(batch, Mapping)
        else f"{len(batch)} parts"
        if isinstance(batch, list | tuple)
        else "no parts"
    )
    raise ConfigurationError(
        f"the batch has no part {key!r}: it is a {type(batch).__name__} with {has}; "
        "name another key, or give a pair of functions (get, set)"
    )


def walk_tensors(path: str, value: Any, joint: str = ".") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor with its path of keys and indices."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping | list | tuple):
        # Outputs of transformers' models are mappings, too.
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from walk_tensors(f"{path}{joint}{key}" if path else str(key), part, joint)


def map_tensors(batch: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return the batch with ``function`` applied to each tensor in it; everything else is unchanged."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(value, function) for value in batch)
    return batch
