"""Devices, and numbers on their way from a GPU to the host without a wait."""

import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from offloop.bus.errors import ConfigurationError
from offloop.trainer.arguments.checks import PRECISIONS
from offloop.trainer.device.batch import map_tensors

_PRECISIONS = dict(zip(PRECISIONS, (None, torch.bfloat16, torch.float16), strict=True))
"""The precisions by name, with the type that torch's automatic mixed precision computes in where that is good enough.
Weights, gradients of weights and the optimizers stay in 32 bits."""


class Device:
    """The hardware of one process: the host, unless a subclass is something else. On the host tensors are where they
    are needed, and reading one costs nothing."""

    name = "cpu"
    """``cpu`` or ``gpu``."""
    model_name = "cpu"
    """The product's name, where that is known."""
    torch_device = torch.device("cpu")

    def batch_to_device(self, batch: Any) -> Any:
        """The batch with all of its tensors on this device."""
        return batch

    def read_later(self, scalar: torch.Tensor) -> "float | DeferredNumbers[float]":
        """A scalar's value: at once where that costs nothing, otherwise a promise of it. Never waits for the device."""
        number: float = scalar.item()
        return number

    def read_many_later(self, vector: torch.Tensor, convert: Callable[[list[float]], Any] = list) -> Any:
        """The same for all numbers of a tensor of one dimension, which cross in one copy, as ``convert`` returns
        them."""
        return convert(vector.tolist())


class CpuDevice(Device):
    """Trains on the host."""


class GpuDevice(Device):
    """Trains on a CUDA device, by default the current one; everything that crosses to the host is copied
    asynchronously, and batches in pinned memory (``pin_memory=True``) are copied from it asynchronously."""

    name = "gpu"

    def __init__(self, torch_device: torch.device | None = None) -> None:
        self.torch_device = torch_device or torch.device("cuda", torch.cuda.current_device())
        self.model_name = torch.cuda.get_device_name(self.torch_device)
        self._rings = PinnedRings(partial(torch.empty, pin_memory=True), copied)

    def batch_to_device(self, batch: Any) -> Any:
        return map_tensors(batch, lambda tensor: tensor.to(self.torch_device, non_blocking=True))

    def read_later(self, scalar: torch.Tensor) -> "DeferredNumbers[float]":
        return self._rings.copy(scalar.reshape(()) if scalar.ndim else scalar)

    def read_many_later(
        self, vector: torch.Tensor, convert: Callable[[list[float]], Any] = list
    ) -> "DeferredNumbers[Any]":
        return self._rings.copy(vector, convert)

    def timing_event(self) -> torch.cuda.Event:
        """An event that the GPU records when it has done all work given so far, with its own clock."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch_device))
        return event


def copied(tensor: torch.Tensor) -> torch.cuda.Event:
    """An event that shows that the copies begun so far from a tensor's device, which need not be the current one, are
    done."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device if tensor.is_cuda else None))
    return event


_Read = TypeVar("_Read")


class DeferredNumbers(Generic[_Read]):
    """One number, or a list of several, on the way from a GPU; ``convert`` returns the value for them."""

    __slots__ = ("_convert", "_copied", "_read", "_slot")

    def __init__(self, slot: torch.Tensor, copied: Any, convert: Callable[[Any], Any] | None = None) -> None:
        self._slot = slot
        self._copied = copied
        self._convert = convert
        self._read: _Read | None = None

    def ready(self) -> bool:
        """Whether :meth:`value` would return at once."""
        return self._read is not None or bool(self._copied.query())

    def value(self) -> _Read:
        """The numbers. Waits for the GPU when they are not :meth:`ready`, so it is called then only where a stream is
        drained."""
        if self._read is None:
            if not self._copied.query():
                self._copied.synchronize()
            numbers: Any = self._slot.tolist()
            self._read = numbers if self._convert is None else self._convert(numbers)
            return self._read
        return self._read


class PinnedRings:
    """Slots of pinned host memory that numbers are copied into: a ring for each dtype and size, which is a power of
    two, or a scalar. Numbers arrive as they are, and no GPU converts them.

    Pinned memory is slow to allocate, hence the slots are kept. A slot whose numbers were never read is read before it
    is used again, so a promise stays good for as long as it is held; while the numbers in it have not arrived yet, the
    ring grows instead of waiting.

    Args:
        allocate: makes pinned memory of a shape, and of a ``dtype``.
        mark: makes an event that shows that the copies begun so far from a tensor's device are done.
        sizes: slots at first in a ring of scalars, and in one of vectors.
    """

    def __init__(
        self,
        allocate: Callable[..., torch.Tensor],
        mark: Callable[[torch.Tensor], Any],
        sizes: tuple[int, int] = (64, 4),
    ) -> None:
        self._allocate = allocate
        self._mark = mark
        self._sizes = sizes
        # The slots in the order in which they were used, the free ones first.
        self._rings: dict[tuple[torch.dtype, int], deque[tuple[torch.Tensor, DeferredNumbers[Any] | None]]] = {}
        # Allocating pinned memory holds up the GPU: the slots for losses are there before the first one.
        self._grow(torch.float32, 0)

    def copy(self, tensor: torch.Tensor, convert: Callable[[Any], Any] | None = None) -> DeferredNumbers[Any]:
        """Starts copying a tensor of no dimension or of one from the device, and returns the promise of its numbers."""
        width = 1 << (len(tensor) - 1).bit_length() if tensor.ndim else 0
        ring = self._rings.get((tensor.dtype, width)) or self._grow(tensor.dtype, width)
        oldest = ring[0][1]
        if oldest is not None:
            if oldest.ready():
                oldest.value()
            else:
                self._grow(tensor.dtype, width)
        slot, _ = ring.popleft()
        part = slot[: len(tensor)] if tensor.ndim else slot
        part.copy_(tensor.detach(), non_blocking=True)
        promise: DeferredNumbers[Any] = DeferredNumbers(part, self._mark(tensor), convert)
        ring.append((slot, promise))
        return promise

    def _grow(self, dtype: torch.dtype, width: int) -> deque[tuple[torch.Tensor, DeferredNumbers[Any] | None]]:
        count = self._sizes[width > 0]
        ring = self._rings.setdefault((dtype, width), deque())
        ring.extendleft(
            (slot, None) for slot in self._allocate((count, width) if width else count, dtype=dtype).unbind()
        )
        return ring


def is_gpu(device: str | torch.device | Device) -> bool:
    """Whether :func:`get_device` would choose a GPU; it raises the same."""
    known = _known(device)
    if isinstance(known, str):
        return known == "gpu" or (known == "auto" and torch.cuda.is_available())
    return known.name == "gpu"


def get_device(device: str | torch.device | Device) -> Device:
    """The device of that name: ``cpu``, ``gpu``, or ``auto`` for a GPU where there is one; torch's devices ``cpu`` and
    ``cuda`` are ``cpu`` and ``gpu``.

    Raises :class:`offloop.bus.errors.ConfigurationError` for another name, and for ``gpu`` without a CUDA device."""
    name = _known(device)
    if not isinstance(name, str):
        return name
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return CpuDevice()
    if not torch.cuda.is_available():
        raise ConfigurationError(
            "device 'gpu' is not there: torch finds no CUDA device; use 'cpu' or 'auto', or install torch with CUDA"
        )
    return GpuDevice()


def _known(device: Any) -> str | Device:
    known: str | Device = device
    if isinstance(device, torch.device):
        # One with a number stays unknown: the current CUDA device is used, which each rank sets to its own.
        known = {"cpu": "cpu", "cuda": "gpu"}.get(str(device), str(device))
    if known in ("auto", "cpu", "gpu") or isinstance(known, Device):
        return known
    raise ConfigurationError(
        f"device {known!r} is unknown: use auto, cpu or gpu, which is the current CUDA device (torch.cuda.set_device)"
    )


def autocast(precision: str | None, device: Device) -> contextlib.AbstractContextManager[object]:
    """The context of forward passes and losses."""
    kind = None if precision is None else _PRECISIONS[precision]
    return contextlib.nullcontext() if kind is None else torch.autocast(device.torch_device.type, dtype=kind)


def make_scaler(precision: str, device: Device) -> "torch.amp.GradScaler | None":
    """Returns the scaler that keeps small gradients from vanishing in 16 bits, if there is one."""
    if precision != "amp_fp16":
        return None
    return torch.amp.GradScaler(device.torch_device.type)
