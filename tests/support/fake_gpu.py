"""A stand-in for a GPU: its work is done when a test says so, and whoever waits for it is counted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from offloop.trainer.device.device import DeferredNumbers, Device, PinnedRings


class FakeGpu(Device):
    """Copies arrive when :meth:`run` says that the work before them is done; counts how often somebody waited."""

    name = "gpu"
    model_name = "Fake GPU"
    torch_device = torch.device("cpu")

    def __init__(self, size: int = 64) -> None:
        self.done = self.issued = self.waits = self.allocations = 0
        self._copies: list[Callable[[], object]] = []
        self.rings = PinnedRings(self._allocate, lambda tensor: FakeEvent(self), (size, size))

    def _allocate(self, shape: Any, dtype: torch.dtype) -> Tensor:
        self.allocations += 1
        count, *width = shape if isinstance(shape, tuple) else (shape,)
        return Slots([Slot(self, torch.empty(width, dtype=dtype)) for _ in range(count)])  # type: ignore[return-value]

    def read_later(self, scalar: Tensor) -> DeferredNumbers[float]:
        return self.rings.copy(scalar.reshape(()))

    def read_many_later(self, vector: Tensor, convert: Callable[[list[float]], Any] = list) -> DeferredNumbers[Any]:
        return self.rings.copy(vector, convert)

    def batch_to_device(self, batch: Any) -> Any:
        return batch

    def copy(self, do: Callable[[], object]) -> None:
        self._copies.append(do)

    def run(self, count: int | None = None) -> None:
        """Lets the GPU do the next copies; all of them by default."""
        ready = self._copies[:count]
        del self._copies[: len(ready)]
        for do in ready:
            do()
        self.done += len(ready)


class FakeEvent:
    """Passed when the GPU has done what it had been given when this was made."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        gpu.issued += 1
        self._at = gpu.issued

    def query(self) -> bool:
        return self._gpu.done >= self._at

    def synchronize(self) -> None:
        self._gpu.waits += 1
        self._gpu.run(self._at - self._gpu.done)


class Slots:
    """Host memory that is written to when the fake GPU has come that far."""

    def __init__(self, slots: "list[Slot]") -> None:
        self._slots = slots

    def unbind(self) -> "list[Slot]":
        return self._slots


class Slot:
    def __init__(self, gpu: FakeGpu, memory: Tensor) -> None:
        self._gpu = gpu
        self._memory = memory

    def __getitem__(self, part: slice) -> "Slot":
        return Slot(self._gpu, self._memory[part])

    def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        # As it is now: what is copied may change before the GPU has come that far.
        content = source.clone()
        self._gpu.copy(lambda: self._memory.copy_(content))

    def tolist(self) -> Any:
        return self._memory.tolist()


_READING = {
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.cpu,
    Tensor.nonzero,
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__index__,
    Tensor.__contains__,
    torch.nonzero,
}


class _Functions(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READING:
            self._found.append(func.__name__)
        return func(*args, **(kwargs or {}))


class _Kernels(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self._found.append("_local_scalar_dense")
        return func(*args, **(kwargs or {}))


@contextmanager
def reads() -> Iterator[list[str]]:
    """Gathers everything that makes the host look at a tensor's numbers, for which a GPU would be waited for."""
    found: list[str] = []
    with _Functions(found), _Kernels(found):
        yield found


class TimedGpu(FakeGpu):
    """Has a clock of its own, in milliseconds, that moves by one at every mark that it passes."""

    def timing_event(self) -> "Mark":
        return Mark(self)

    passed = 0


class Mark:
    def __init__(self, gpu: TimedGpu) -> None:
        self._gpu = gpu
        self._at: int | None = None
        gpu.copy(self._pass)
        gpu.issued += 1

    def _pass(self) -> None:
        self._gpu.passed += 1
        self._at = self._gpu.passed

    def query(self) -> bool:
        return self._at is not None

    def synchronize(self) -> None:
        self._gpu.waits += 1
        while self._at is None:
            self._gpu.run(1)

    def elapsed_time(self, end_event: "Mark") -> float:
        assert self._at is not None
        assert end_event._at is not None
        return float(end_event._at - self._at)
