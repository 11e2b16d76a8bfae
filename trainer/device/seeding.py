"""Reproducible random numbers."""

import os
import random
import sys
from array import array
from collections.abc import Mapping
from typing import Any

import torch

from offloop.bus.errors import ConfigurationError
from offloop.trainer.arguments.values import as_int

_LIMIT = 2**32


def new_seed() -> int:
    return int.from_bytes(os.urandom(4), "little")


def check_seed(seed: Any) -> int:
    number = as_int(seed)
    if number is None or not 0 <= number < _LIMIT:
        raise ConfigurationError(f"seed {seed!r} is not allowed: use a whole number from 0 to {_LIMIT - 1}")
    return number


def seed_all(seed: int) -> None:
    """Seed the generators of Python, of torch on all devices, and of numpy where it is installed."""
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy as np
    except ModuleNotFoundError:
        return
    np.random.seed(seed)


def make_deterministic() -> None:
    """Make torch deterministic in the whole process; it raises where it cannot be.

    Source: "Reproducibility" in PyTorch's documentation, which also names the size of cuBLAS's workspace."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def random_states() -> dict[str, Any]:
    """Return the states of the generators of Python, torch and, if it was imported, numpy."""
    version, words, gauss = random.getstate()
    numpy = None
    if (module := sys.modules.get("numpy")) is not None:
        kind, key, position, has_gauss, cached = module.random.get_state()
        numpy = [kind, key.astype("uint32").tobytes(), int(position), int(has_gauss), float(cached)]
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return {
        "python": [version, array("I", words).tobytes(), gauss],
        "numpy": numpy,
        "torch": pack_state(torch.get_rng_state()),
        "cuda": None if cuda is None else pack_state(cuda),
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(array("I", words)), gauss))
    torch.set_rng_state(unpack_state(states["torch"]))
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(unpack_state(states["cuda"]))
    if states["numpy"] is not None:
        import numpy as np

        kind, key, position, has_gauss, cached = states["numpy"]
        np.random.set_state((kind, np.array(array("I", key), dtype=np.uint32), position, has_gauss, cached))


def pack_state(state: torch.Tensor) -> bytes:
    packed: bytes = state.numpy().tobytes()
    return packed


def unpack_state(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
