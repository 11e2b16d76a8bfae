"""What optimizers are called, in everything that is published or saved of them."""

from collections.abc import Iterable
from typing import Any

__all__ = ["numbered_names", "optimizer_names"]


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
