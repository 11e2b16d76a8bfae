"""Checks of what algorithms are given, so that a mistake is found before the training begins."""

import math
from typing import Any

from bus.errors import ConfigurationError
from trainer.batch import BatchKey

__all__ = ["check_count", "check_key", "check_number", "check_share"]


def check_number(name: str, value: Any) -> float:
    """A number of zero or more, and finite.

    Raises :class:`bus.errors.ConfigurationError`."""
    if _is_number(value) and 0 <= value < math.inf:
        return float(value)
    raise ConfigurationError(f"{name} {value!r} is not allowed: use a number of 0 or more")


def check_share(name: str, value: Any, *, zero: bool = True) -> float:
    """A share of something, from 0 to 1; ``zero`` says whether none of it is allowed.

    Raises :class:`bus.errors.ConfigurationError`."""
    if _is_number(value) and 0 <= value <= 1 and (zero or value > 0):
        return float(value)
    allowed = "from 0 to 1" if zero else "above 0 and up to 1"
    raise ConfigurationError(f"{name} {value!r} is not allowed: use a number {allowed}")


def check_count(name: str, value: Any, least: int = 1) -> int:
    """A whole number of at least ``least``.

    Raises :class:`bus.errors.ConfigurationError`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise ConfigurationError(f"{name} {value!r} is not allowed: use a whole number of {least} or more")


def check_key(name: str, key: Any) -> BatchKey:
    """What can name a part of a batch, see :mod:`trainer.batch`.

    Raises :class:`bus.errors.ConfigurationError`."""
    path = key if isinstance(key, list) else [key]
    is_path = bool(path) and all(isinstance(step, int | str) and not isinstance(step, bool) for step in path)
    is_pair = isinstance(key, tuple) and len(key) == 2 and all(map(callable, key))
    if is_path or is_pair:
        return key  # type: ignore[no-any-return]
    raise ConfigurationError(
        f"{name} {key!r} names no part of a batch: use an index, a name, a list of these, "
        "or a pair of functions (get, set)"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
