"""Devices, and asynchronous copies of numbers from a GPU."""

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
"""The precisions by name, with the type of torch's automatic mixed precision. Weights, their gradients and optimizers
stay in 32 bits."""


class Device:
    """The hardware of one process, by default the host, where reading a tensor costs nothing."""

    name = "cpu"  # cpu or gpu
    model_name = "cpu"  # name of the product, if known
    torch_device: torch.device = torch.device("cpu")

    def batch_to_device(self, batch: Any) -> Any:
        """Return the batch with all of its tensors on this device."""
        return batch

    def read_later(self, scalar: torch.Tensor) -> "float | DeferredNumbers[float]":
        """Return a scalar's value, or a promise of it where reading would wait for the device."""
        number: float = scalar.item()
        return number

    def read_many_later(self, vector: torch.Tensor, convert: Callable[[list[float]], Any] = list) -> Any:
        """Return the numbers of a vector after ``convert``, or a promise of them. They cross in one copy."""
        return convert(vector.tolist())


class CpuDevice(Device):
    """The host."""


class GpuDevice(Device):
    """A CUDA device, by default the current one.

    Copies to the host are asynchronous, and so are copies of batches in pinned memory (``pin_memory=True``)."""

    name = "gpu"

    def __init__(self, torch_device: torch.device | None = None) -> None:
        self.torch_device: torch.device = torch_device or torch.device("cuda", torch.cuda.current_device())
        self.model_name: str = torch.cuda.get_device_name(self.torch_device)
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
        """Return an event that the GPU records, with its own clock, after all work given so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch_device))
        return event


def copied(tensor: torch.Tensor) -> torch.cuda.Event:
    """Return an event that completes with the copies begun so far on a tensor's device, current or not."""
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
        """Return whether :meth:`value` would return at once."""
        return self._read is not None or bool(self._copied.query())

    def value(self) -> _Read:
        """Return the numbers, after waiting for the GPU if they are not :meth:`ready`."""
        if self._read is None:
            if not self._copied.query():
                self._copied.synchronize()
            numbers: Any = self._slot.tolist()
            self._read = numbers if self._convert is None else self._convert(numbers)
            return self._read
        return self._read


class PinnedRings:
    """Slots of pinned host memory for numbers: a ring for each dtype and size, which is a power of two, or a scalar.

    No GPU converts the numbers. Pinned memory is slow to allocate, hence the slots are kept. An unread slot is read
    before it is used again, so a promise stays valid while it is held. If its numbers have not arrived yet, the ring
    grows instead of waiting.

    Args:
        allocate: makes pinned memory of a shape and a ``dtype``.
        mark: makes an event that completes with the copies begun so far on a tensor's device.
        sizes: initial number of slots in a ring of scalars, and in one of vectors."""

    def __init__(
        self,
        allocate: Callable[..., torch.Tensor],
        mark: Callable[[torch.Tensor], Any],
        sizes: tuple[int, int] = (64, 4),
    ) -> None:
        self._allocate = allocate
        self._mark = mark
        self._sizes = sizes
        # Ordered by last use, the free ones first.
        self._rings: dict[tuple[torch.dtype, int], deque[tuple[torch.Tensor, DeferredNumbers[Any] | None]]] = {}
        # Allocating pinned memory stalls the GPU: the slots for losses are allocated before the first one.
        self._grow(torch.float32, 0)

    def copy(self, tensor: torch.Tensor, convert: Callable[[Any], Any] | None = None) -> DeferredNumbers[Any]:
        """Start copying a scalar or vector from the device, and return the promise of its numbers."""
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
    """Return whether :func:`get_device` would choose a GPU; it raises the same."""
    known = _known(device)
    if isinstance(known, str):
        return known == "gpu" or (known == "auto" and torch.cuda.is_available())
    return known.name == "gpu"


def get_device(device: str | torch.device | Device) -> Device:
    """Return the device of a name: ``cpu``, ``gpu``, or ``auto`` for a GPU if torch finds one.

    torch's devices ``cpu`` and ``cuda`` are ``cpu`` and ``gpu``.

    Raises :class:`offloop.bus.errors.ConfigurationError` for another name, and for ``gpu`` without a CUDA device."""
    name = _known(device)
    if not isinstance(name, str):
        return name
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return CpuDevice()
    if not torch.cuda.is_available():
        raise ConfigurationError(
            "device 'gpu' is unavailable: torch finds no CUDA device; use 'cpu' or 'auto', or install torch with CUDA"
        )
    return GpuDevice()


def _known(device: Any) -> str | Device:
    known: str | Device = device
    if isinstance(device, torch.device):
        # A device with a number is refused: each rank sets its own current CUDA device, which is used.
        known = {"cpu": "cpu", "cuda": "gpu"}.get(str(device), str(device))
    if known in ("auto", "cpu", "gpu") or isinstance(known, Device):
        return known
    raise ConfigurationError(
        f"device {known!r} is unknown: use auto, cpu or gpu, which is the current CUDA device (torch.cuda.set_device)"
    )


def autocast(precision: str | None, device: Device) -> contextlib.AbstractContextManager[object]:
    """Return the context of forward passes and losses."""
    kind = None if precision is None else _PRECISIONS[precision]
    return contextlib.nullcontext() if kind is None else torch.autocast(device.torch_device.type, dtype=kind)


def make_scaler(precision: str, device: Device) -> "torch.amp.GradScaler | None":
    if precision != "amp_fp16":
        return None
    return torch.amp.GradScaler(device.torch_device.type)
