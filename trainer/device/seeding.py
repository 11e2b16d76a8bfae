"""Random numbers that come out the same again."""

import functools
import os
import random
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offloop.bus.errors import ConfigurationError
from offloop.trainer.arguments.values import as_int

_LIMIT = 2**32


def new_seed() -> int:
    """An unpredictable seed; it is recorded with the run."""
    return int.from_bytes(os.urandom(4), "little")


def check_seed(seed: Any) -> int:
    number = as_int(seed)
    if number is None or not 0 <= number < _LIMIT:
        raise ConfigurationError(f"seed {seed!r} is not allowed: use a whole number from 0 to {_LIMIT - 1}")
    return number


def seed_all(seed: int) -> None:
    """Seeds the generators of Python, of torch on all devices, and of numpy where it is installed."""
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy as np
    except ModuleNotFoundError:
        return
    np.random.seed(seed)


def make_deterministic() -> None:
    """Makes torch compute the same from the same, in the whole process, and raise where it cannot.

    Source: "Reproducibility" in PyTorch's documentation, which also names the size of cuBLAS's workspace."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


class RandomStates:
    """The states of the generators of Python, numpy and torch, and of a dataloader's own. numpy's is kept when numpy
    was imported: otherwise nothing has drawn from it."""

    def __init__(self, generators: Sequence[torch.Generator] = ()) -> None:
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._own = [generator.get_state() for generator in generators]

    def restore(self, generators: Sequence[torch.Generator] = ()) -> None:
        """Sets the generators to these states."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self._cuda)
        if self._numpy is not None:
            import numpy as np

            np.random.set_state(self._numpy)
        for generator, own in zip(generators, self._own, strict=False):
            generator.set_state(own)

    @functools.cached_property
    def tree(self) -> dict[str, Any]:
        """The states as numbers and bytes, for a checkpoint."""
        version, words, gauss = self._python
        numpy = None
        if self._numpy is not None:
            kind, key, position, has_gauss, cached = self._numpy
            numpy = [kind, key.astype("uint32").tobytes(), int(position), int(has_gauss), float(cached)]
        return {
            "python": [version, array("I", words).tobytes(), gauss],
            "numpy": numpy,
            "torch": _packed(self._torch),
            "cuda": None if self._cuda is None else _packed(self._cuda),
            "own": [_packed(one) for one in self._own],
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> "RandomStates":
        states = cls.__new__(cls)
        version, words, gauss = tree["python"]
        states._python = (version, tuple(array("I", words)), gauss)
        states._torch = _unpacked(tree["torch"])
        states._cuda = None if tree["cuda"] is None else _unpacked(tree["cuda"])
        states._own = [_unpacked(one) for one in tree["own"]]
        states._numpy = None
        if tree["numpy"] is not None:
            import numpy as np

            kind, key, position, has_gauss, cached = tree["numpy"]
            states._numpy = (kind, np.array(array("I", key), dtype=np.uint32), position, has_gauss, cached)
        return states


def _packed(state: torch.Tensor) -> bytes:
    packed: bytes = state.numpy().tobytes()
    return packed


def _unpacked(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
