"""Sends tensors to consumers: small ones in the event, others through shared memory."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offloop.bus.errors import ConfigurationError
from offloop.bus.publisher.publisher import Publisher
from offloop.bus.tensors.segments import Segment, SegmentPool
from offloop.bus.tensors.view import INLINE_BYTES, ImageLayout, TensorPlaces, tensor_places
from offloop.trainer.checkpoints.file import tensor_spec
from offloop.trainer.device.device import copied
from offloop.trainer.engine.state import State
from offloop.trainer.fields.tensors import TensorPayload

LAST_SECONDS = 10.0
GROWTH_BYTES = 256 * 1024
"""Growth of a checkpoint after the first batch: numbers get longer, and within an epoch it holds generators' states."""
HEADER_GRANULE = 4096
"""Data of an image start at a multiple of it, so they stay in place when numbers in the metadata get longer."""
DRAIN_SECONDS = 60.0  # how long a closing training waits for consumers that borrowed tensors

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all GPUs

_log = logging.getLogger("offloop")


class TensorSharing:
    """Copies tensors into images, see :mod:`offloop.bus.tensors.view`, without making the host wait for a GPU.

    Args:
        pool: the shared memory, pinned for tensors on a GPU.
        stream: publishes the events.
        may_wait: whether the training has ended, so that fields with the policy ``wait`` are waited for."""

    def __init__(self, pool: SegmentPool, stream: Publisher, may_wait: Callable[[], bool] = lambda: False) -> None:
        self._pool = pool
        self._stream = stream
        self._may_wait = may_wait
        self._waiting: set[str] = set()
        self._places: dict[str, tuple[dict[str, Any], TensorPlaces]] = {}
        self.skipped: dict[str, int] = {}  # number of times that each field was left out for lack of memory

    def share(self, name: str, out: TensorPayload) -> "dict[str, Any] | _SharedLater":
        layout = self._layout(name, out)
        # A model may be spread over several GPUs.
        gpus = {tensor.device: tensor for tensor in out.tensors.values() if tensor.is_cuda}.values()
        on_gpu = bool(gpus)
        if layout.size <= INLINE_BYTES:
            image = torch.empty(layout.size, dtype=torch.uint8, pin_memory=on_gpu)
            _copy(out.tensors, _places_in(image.numpy(), layout, out.tensors))
            copies = [copied(one) for one in gpus]
            value = _SharedLater(lambda: _reference(layout, image=image.numpy().tobytes()), copies, layout.size)
            return value if on_gpu else value.value()
        segment = self._pool.reserve(layout.size, name, defer=out.policy == "wait" and not self._may_wait())
        if segment is None and out.policy == "wait" and self._may_wait():
            segment = self._reserve_at_last(layout.size, name)
        if segment is None:
            raise self._refused(name, out)
        try:
            known, header = segment.kept.get(name), layout.header
            # The same object while names, dtypes and shapes are the same.
            if known is not None and known.starts is layout.starts and known.front == len(header):
                segment.buffer[: len(header)] = header
            else:
                known = _Places(layout.starts, len(header), _places_in(segment.buffer, layout, out.tensors))
                segment.kept[name] = known
            _copy(out.tensors, known.views)
        except BaseException:
            # Pending copies must not arrive in the memory's next use.
            for one in gpus:
                copied(one).synchronize()
            segment.release()
            raise
        seq = self._stream.next_seq
        copies = [copied(one) for one in gpus]
        # Readers may enter once the bytes are complete, which is before the event reaches them.
        value = _SharedLater(lambda: _reference(layout, segment=segment.publish(seq)), copies)
        return value if on_gpu else value.value()

    def reserve(self, outs: Iterable[TensorPayload]) -> None:
        size = 0
        for out in outs:
            # Errors are reported when the field is due.
            with contextlib.suppress(ConfigurationError):
                size = max(size, _layout(tensor_places(_specs(out)), out).size)
        if size > INLINE_BYTES:
            self._pool.prepare(size + GROWTH_BYTES)

    @property
    def is_allocating(self) -> bool:
        """Whether fields that were refused must wait for memory that is being allocated."""
        return self._pool.is_allocating and not self._may_wait()

    def _reserve_at_last(self, size: int, name: str) -> Segment | None:
        deadline = time.monotonic() + LAST_SECONDS
        segment = None
        while segment is None and time.monotonic() < deadline:
            self._stream.wait()
            segment = self._pool.reserve(size, name)
        return segment

    def take_waiting(self) -> set[str]:
        """Return the fields that were refused since the last call and come with a later event."""
        waiting, self._waiting = self._waiting, set()
        return waiting

    def drain(self, seconds: float = DRAIN_SECONDS) -> None:
        """Wait until consumers have handled the borrowed tensors, whose memory ends with this process."""
        deadline = time.monotonic() + seconds
        while self._pool.unhandled and time.monotonic() < deadline:
            self._stream.wait()
        if self._pool.unhandled:
            _log.warning("tensors that a consumer requested are lost: it did not read them before the training ended")

    def close(self) -> None:
        self._pool.close()

    def _layout(self, name: str, out: TensorPayload) -> ImageLayout:
        specs = _specs(out)
        known = self._places.get(name)
        if known is None or known[0] != specs:
            known = self._places[name] = specs, tensor_places(specs)
        return _layout(known[1], out)

    def _refused(self, name: str, out: TensorPayload) -> ConfigurationError:
        reason = (
            "their shared memory is still being allocated"
            if self._pool.is_allocating
            else "no shared memory is free, because consumers have not handled earlier tensors"
        )
        if out.policy == "wait":
            self._waiting.add(name)
            return ConfigurationError(f"{reason}: it comes with the next event for which it is requested")
        self.skipped[name] = self.skipped.get(name, 0) + 1
        return ConfigurationError(f"{reason}: it is left out here, {self.skipped[name]} times so far")


class _SharedLater:
    """An image that a GPU is still copying, or that is complete."""

    def __init__(
        self, tell: Callable[[], dict[str, Any]], copies: "list[torch.cuda.Event]", size: int | None = None
    ) -> None:
        self.size = size
        self._tell = tell
        self._copies = copies

    def ready(self) -> bool:
        return all(one.query() for one in self._copies)  # type: ignore[no-untyped-call]

    def value(self) -> dict[str, Any]:
        if not self.ready():
            for one in self._copies:
                one.synchronize()
        return self._tell()


class _Places(NamedTuple):
    starts: dict[str, int]
    front: int
    views: dict[str, Tensor]


def _specs(out: TensorPayload) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {one: tensor_spec(tensor) for one, tensor in out.tensors.items()}


def _layout(places: TensorPlaces, out: TensorPayload) -> ImageLayout:
    return places.layout(out.metadata or None, align=8 if places.size <= INLINE_BYTES else HEADER_GRANULE)


def _reference(layout: ImageLayout, **place: Any) -> dict[str, Any]:
    return {"$tensors": 1, "bytes": layout.size, **place}


def _places_in(image: Any, layout: ImageLayout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    front = len(layout.header)
    memoryview(image)[:front] = layout.header
    whole = torch.frombuffer(image, dtype=torch.uint8)
    return {
        name: whole[front + start : front + start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for name, start in layout.starts.items()
        if (tensor := tensors[name]).numel()
    }


def _copy(tensors: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> None:
    if places:
        torch._foreach_copy_(list(places.values()), [tensors[name] for name in places], non_blocking=True)


def share_tensors(state: State, publisher: Publisher) -> TensorSharing:
    device = state.device
    pool = SegmentPool(
        is_handled=publisher.is_handled, pin=partial(pin, device.torch_device) if device.name == "gpu" else None
    )
    return TensorSharing(pool, publisher, lambda: not state.fitting)


def pin(device: torch.device, memory: memoryview) -> Callable[[], object]:
    """Pin memory, so that GPUs copy into it; returns the function that unpins it. Any thread may call it."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    # A thread starts with the first GPU, whichever the others use.
    with torch.cuda.device(device):
        status = int(runtime.cudaHostRegister(address, memory.nbytes, _PORTABLE))
        if status:
            # CUDA would report the error at this thread's next kernel, which may be one of the training's.
            with contextlib.suppress(RuntimeError):
                torch.empty(1, device=device).add_(1)
            raise OSError(f"CUDA cannot pin {memory.nbytes} bytes of shared memory: error {status}")
    return lambda: runtime.cudaHostUnregister(address)
