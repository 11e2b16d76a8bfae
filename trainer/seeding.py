"""Random numbers that come out the same again."""

import os
import random

import torch

from bus.errors import ConfigurationError

__all__ = ["check_seed", "new_seed", "seed_all"]

_LIMIT = 2**32


def new_seed() -> int:
    """A seed that nobody can foresee; it is written down with the run."""
    return int.from_bytes(os.urandom(4), "little")


def check_seed(seed: int) -> int:
    """The seed, or :class:`bus.errors.ConfigurationError` when not every generator takes it."""
    if not isinstance(seed, int) or not 0 <= seed < _LIMIT:
        raise ConfigurationError(f"seed {seed!r} is not allowed: use a whole number from 0 to {_LIMIT - 1}")
    return seed


def seed_all(seed: int) -> None:
    """Seeds the generators of Python, of torch on all devices, and of numpy where it is installed."""
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy as np
    except ModuleNotFoundError:
        return
    np.random.seed(seed)
