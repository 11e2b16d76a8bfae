"""What optimizers are called, in everything that is published or saved of them."""

from typing import Any

__all__ = ["optimizer_names"]


def optimizer_names(optimizers: list[Any]) -> list[str]:
    """The names that learning rates go by: class names, a further optimizer of a class with ``-1``, ``-2``, ..."""
    names: list[str] = []
    for optimizer in optimizers:
        name = type(optimizer).__name__
        count = sum(1 for other in names if other.rsplit("-", 1)[0] == name)
        names.append(f"{name}-{count}" if count else name)
    return names
