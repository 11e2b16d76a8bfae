"""Where a model is trained, and how a number gets from there to the host without a wait."""

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch

from offloop.bus.errors import ConfigurationError
from offloop.trainer.arguments.checks import PRECISIONS
from offloop.trainer.device.batch import map_tensors

_PRECISIONS = dict(zip(PRECISIONS, (None, torch.bfloat16, torch.float16), strict=True))
"""The precisions by name, with the type that torch's automatic mixed precision computes in where that is good enough.
Weights, gradients of weights and the optimizers stay in 32 bits."""


@runtime_checkable
class Device(Protocol):
    """The hardware of one process."""

    name: str
    """``cpu`` or ``gpu``."""
    model_name: str
    """What it is sold as, where that is known."""
    torch_device: torch.device

    def batch_to_device(self, batch: Any) -> Any:
        """The batch with all of its tensors on this device."""

    def read_later(self, scalar: torch.Tensor) -> "float | DeferredScalar":
        """A scalar's value: at once where that costs nothing, otherwise a promise of it. Never waits for the device."""

    def read_many_later(self, vector: torch.Tensor) -> "list[float] | DeferredVector":
        """The same for all numbers of a tensor of one dimension, which cross in one copy."""


class CpuDevice:
    """Trains on the host: tensors are where they are needed, and reading one does not synchronise."""

    name = "cpu"
    model_name = "cpu"
    torch_device = torch.device("cpu")

    def batch_to_device(self, batch: Any) -> Any:
        """The batch itself: dataloaders give tensors on the host."""
        return batch

    def read_later(self, scalar: torch.Tensor) -> float:
        """The value, at once."""
        number: float = scalar.item()
        return number

    def read_many_later(self, vector: torch.Tensor) -> list[float]:
        """The numbers, at once."""
        numbers: list[float] = vector.tolist()
        return numbers


class GpuDevice:
    """Trains on a CUDA device, by default the current one; whatever crosses to the host is copied asynchronously."""

    name = "gpu"

    def __init__(self, torch_device: torch.device | None = None) -> None:
        self.torch_device = torch_device or torch.device("cuda", torch.cuda.current_device())
        self.model_name = torch.cuda.get_device_name(self.torch_device)
        self._rings = PinnedRings(partial(torch.empty, pin_memory=True), copied)

    def batch_to_device(self, batch: Any) -> Any:
        """A copy on the GPU; the host continues while tensors in pinned memory (``pin_memory=True``) are copied."""
        return map_tensors(batch, lambda tensor: tensor.to(self.torch_device, non_blocking=True))

    def read_later(self, scalar: torch.Tensor) -> "DeferredScalar":
        """A promise of the value, kept as soon as the GPU has come this far."""
        return self._rings.copy_scalar(scalar)

    def read_many_later(self, vector: torch.Tensor) -> "DeferredVector":
        """A promise of the numbers, kept as soon as the GPU has come this far."""
        return self._rings.copy_vector(vector)

    def timing_event(self) -> torch.cuda.Event:
        """What shows when the GPU has done all that it has been given so far, by the GPU's own clock."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch_device))
        return event


def copied(tensor: torch.Tensor) -> torch.cuda.Event:
    """What shows that the copies begun so far from a tensor's device, which need not be the current one, are done."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device if tensor.is_cuda else None))
    return event


_Read = TypeVar("_Read")


class _Deferred(Generic[_Read]):
    """What is on its way from a GPU: :meth:`ready` says whether it has arrived, without waiting."""

    __slots__ = ("_copied", "_read", "_slot")

    def __init__(self, slot: torch.Tensor, copied: Any) -> None:
        self._slot = slot
        self._copied = copied
        self._read: _Read | None = None

    def ready(self) -> bool:
        """Whether :meth:`value` would return at once."""
        return self._read is not None or bool(self._copied.query())

    def value(self) -> _Read:
        """What has arrived. Waits for the GPU when it is not :meth:`ready`, so it is called then only where a stream is
        drained."""
        if self._read is None:
            if not self._copied.query():
                self._copied.synchronize()
            self._read = self._take()
        return self._read

    def _take(self) -> _Read:
        raise NotImplementedError


class DeferredScalar(_Deferred[float]):
    """A number on its way from a GPU."""

    __slots__ = ()

    def _take(self) -> float:
        number: float = self._slot.item()
        return number


class DeferredVector(_Deferred[list[float]]):
    """Several numbers on their way from a GPU, which arrive together."""

    __slots__ = ()

    def _take(self) -> list[float]:
        numbers: list[float] = self._slot.tolist()
        return numbers


class DeferredMap:
    """Several numbers by name, some of them on their way; there when all are."""

    def __init__(self, numbers: "Mapping[str, float | DeferredScalar]") -> None:
        self._numbers = numbers
        self._pending = [number for number in numbers.values() if isinstance(number, DeferredScalar)]

    def ready(self) -> bool:
        """Whether :meth:`value` would return at once."""
        return all(number.ready() for number in self._pending)

    def value(self) -> dict[str, float]:
        """The numbers. Waits for the GPU when they are not :meth:`ready`."""
        return {
            name: number.value() if isinstance(number, DeferredScalar) else number
            for name, number in self._numbers.items()
        }


_Promise = TypeVar("_Promise", bound=_Deferred[Any])


class PinnedRing(Generic[_Promise]):
    """Slots of pinned host memory that tensors of one size are copied into, used in turn.

    Pinned memory is slow to allocate, hence the slots are kept. A slot whose numbers were never asked for is read
    before it is used again, so a promise stays good for as long as it is held; while the numbers in it have not
    arrived yet, the ring grows instead of waiting.

    Args:
        promise: makes the promise of a slot and of what shows that the copy into it is done.
        allocate: makes so many slots.
        mark: makes what shows that the copies begun so far from a tensor's device are done.
        size: how many slots there are at first.
    """

    def __init__(
        self,
        promise: Callable[[torch.Tensor, Any], _Promise],
        allocate: Callable[[int], torch.Tensor],
        mark: Callable[[torch.Tensor], Any],
        size: int,
    ) -> None:
        self._promise = promise
        self._allocate = allocate
        self._mark = mark
        self._size = size
        self._slots: list[torch.Tensor] = []
        self._promises: list[_Promise | None] = []
        self._next = 0
        self._grow()

    def copy(self, tensor: torch.Tensor) -> _Promise:
        """Starts copying a tensor from the device and returns the promise of it; one with a dimension may be shorter
        than a slot."""
        index = self._free_slot()
        slot = self._slots[index]
        if tensor.ndim:
            slot = slot[: len(tensor)]
        slot.copy_(tensor.detach(), non_blocking=True)
        promise = self._promise(slot, self._mark(tensor))
        self._promises[index] = promise
        self._next = (index + 1) % len(self._slots)
        return promise

    def _free_slot(self) -> int:
        oldest = self._promises[self._next]
        if oldest is None:
            return self._next
        if oldest.ready():
            oldest.value()
            return self._next
        return self._grow()

    def _grow(self) -> int:
        # New slots go in front of the oldest promise, which keeps the ring in the order of time.
        at = self._next
        self._slots[at:at] = list(self._allocate(self._size).unbind())
        self._promises[at:at] = [None] * self._size
        return at


class PinnedRings:
    """A :class:`PinnedRing` for scalars of each dtype, and for vectors of each dtype and power of two that they are
    long, made when the first one comes: numbers arrive as they are, and no GPU converts them.

    Args:
        allocate: makes pinned memory of a shape, and of a ``dtype``.
        mark: makes what shows that the copies begun so far from a tensor's device are done.
        sizes: how many slots a ring of scalars begins with, and one of vectors.
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
        self._vectors: dict[tuple[torch.dtype, int], PinnedRing[DeferredVector]] = {}
        # To allocate pinned memory holds up the GPU: what losses need is there before the first one.
        self._scalars = {torch.float32: self._ring_of_scalars(torch.float32)}

    def copy_scalar(self, scalar: torch.Tensor) -> DeferredScalar:
        """Starts copying a tensor with one element from the device and returns the promise of its number."""
        ring = self._scalars.get(scalar.dtype)
        if ring is None:
            ring = self._scalars[scalar.dtype] = self._ring_of_scalars(scalar.dtype)
        return ring.copy(scalar.reshape(()) if scalar.ndim else scalar)

    def copy_vector(self, vector: torch.Tensor) -> DeferredVector:
        """Starts copying a vector from the device and returns the promise of its numbers."""
        dtype, width = kind = vector.dtype, 1 << (len(vector) - 1).bit_length()
        ring = self._vectors.get(kind)
        if ring is None:
            ring = self._vectors[kind] = PinnedRing(
                DeferredVector,
                lambda count: self._allocate((count, width), dtype=dtype),
                self._mark,
                self._sizes[1],
            )
        return ring.copy(vector)

    def _ring_of_scalars(self, dtype: torch.dtype) -> PinnedRing[DeferredScalar]:
        return PinnedRing(DeferredScalar, partial(self._allocate, dtype=dtype), self._mark, self._sizes[0])


def is_gpu(device: str | torch.device | Device) -> bool:
    """Whether :func:`get_device` would choose a GPU; it raises the same."""
    known = _known(device)
    if isinstance(known, str):
        return known == "gpu" or (known == "auto" and torch.cuda.is_available())
    return known.name == "gpu"


def get_device(device: str | torch.device | Device) -> Device:
    """The device of that name: ``cpu``, ``gpu``, or ``auto`` for a GPU where there is one; torch's devices ``cpu`` and
    ``cuda`` are ``cpu`` and ``gpu``.

    Raises :class:`offloop.bus.errors.ConfigurationError` for another name, and for ``gpu`` where torch finds none."""
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


def autocast_of(
    precision: str | None, device: Device
) -> Callable[[], contextlib.AbstractContextManager[object]] | None:
    """Makes the context in which forward passes and losses are computed; ``None`` when they need none."""
    kind = None if precision is None else _PRECISIONS[precision]
    if kind is None:
        return None
    return lambda: torch.autocast(device.torch_device.type, dtype=kind)


def make_scaler(precision: str, device: Device) -> "torch.amp.GradScaler | None":
    """What keeps small gradients from vanishing in 16 bits: it multiplies the loss, and divides the gradients again."""
    if precision != "amp_fp16":
        return None
    return torch.amp.GradScaler(device.torch_device.type)
