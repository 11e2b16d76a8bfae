"""Where a model is trained, and how a number gets from there to the host without making anybody wait."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from bus.errors import ConfigurationError
from trainer.data import map_tensors

__all__ = ["CpuDevice", "DeferredMap", "DeferredScalar", "Device", "GpuDevice", "PinnedRing", "get_device", "is_gpu"]


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


class CpuDevice:
    """Trains on the host: tensors are where they are needed, and reading one is no synchronisation."""

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


class GpuDevice:
    """Trains on the current CUDA device; whatever crosses to the host is copied asynchronously."""

    name = "gpu"

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.model_name = torch.cuda.get_device_name(self.torch_device)
        self._ring = PinnedRing(_pinned_scalars, torch.cuda.Event)

    def batch_to_device(self, batch: Any) -> Any:
        """A copy on the GPU; the host goes on while tensors in pinned memory (``pin_memory=True``) are copied."""
        return map_tensors(batch, lambda tensor: tensor.to(self.torch_device, non_blocking=True))

    def read_later(self, scalar: torch.Tensor) -> "DeferredScalar":
        """A promise of the value, kept as soon as the GPU has come this far."""
        return self._ring.copy(scalar)


class DeferredScalar:
    """A number on its way from a GPU: :meth:`ready` says whether it has arrived, without waiting."""

    __slots__ = ("_copied", "_number", "_slot")

    def __init__(self, slot: torch.Tensor, copied: Any) -> None:
        self._slot = slot
        self._copied = copied
        self._number: float | None = None

    def ready(self) -> bool:
        """Whether :meth:`value` would return at once."""
        return self._number is not None or bool(self._copied.query())

    def value(self) -> float:
        """The number. Waits for the GPU when it is not :meth:`ready`, so it is called then only where a stream is
        drained."""
        if self._number is None:
            if not self._copied.query():
                self._copied.synchronize()
            self._number = float(self._slot.item())
        return self._number


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


class PinnedRing:
    """Slots of pinned host memory that scalars are copied into, used in turn.

    Pinned memory is slow to allocate, hence the slots are kept. A slot whose number was never asked for is read before
    it is used again, so a :class:`DeferredScalar` stays good for as long as somebody holds it; while the number in it
    has not arrived yet, the ring grows instead of waiting.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], make_event: Callable[[], Any], size: int = 64) -> None:
        self._allocate = allocate
        self._make_event = make_event
        self._size = size
        self._slots: list[torch.Tensor] = []
        self._promises: list[DeferredScalar | None] = []
        self._next = 0
        self._grow()

    def copy(self, scalar: torch.Tensor) -> DeferredScalar:
        """Starts copying a scalar from the device and returns the promise of it."""
        index = self._free_slot()
        slot = self._slots[index]
        slot.copy_(scalar.detach(), non_blocking=True)
        copied = self._make_event()
        copied.record()
        promise = DeferredScalar(slot, copied)
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


def is_gpu(device: str | torch.device | Device) -> bool:
    """Whether :func:`get_device` would choose a GPU; it raises the same."""
    known = _known(device)
    if isinstance(known, str):
        return known == "gpu" or (known == "auto" and torch.cuda.is_available())
    return known.name == "gpu"


def get_device(device: str | torch.device | Device) -> Device:
    """The device of that name: ``cpu``, ``gpu``, or ``auto`` for a GPU where there is one; torch's devices ``cpu`` and
    ``cuda`` are ``cpu`` and ``gpu``.

    Raises :class:`bus.errors.ConfigurationError` for another name, and for ``gpu`` where torch finds none."""
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
    """A name that is allowed, or a device."""
    known: str | Device = device
    if isinstance(device, torch.device):
        # One with a number stays unknown: the current CUDA device is used, which each rank sets to its own.
        known = {"cpu": "cpu", "cuda": "gpu"}.get(str(device), str(device))
    if known in ("auto", "cpu", "gpu") or isinstance(known, Device):
        return known
    raise ConfigurationError(
        f"device {known!r} is unknown: use auto, cpu or gpu, which is the current CUDA device (torch.cuda.set_device)"
    )


def _pinned_scalars(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.float32, pin_memory=True)
