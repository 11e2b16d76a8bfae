"""How the tensors that consumers ask for get to them: small ones in the event, others through shared memory."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from bus.errors import ConfigurationError
from bus.publisher.publisher import Publisher
from bus.tensors.segments import Segment, SegmentPool
from bus.tensors.view import INLINE_BYTES, ImageLayout, image_layout
from trainer.checkpoints.file import tensor_spec
from trainer.engine.state import State
from trainer.fields.tensors import TensorPayload

LAST_SECONDS = 10.0
GROWTH_BYTES = 256 * 1024
"""By so much a checkpoint may become larger than one after the first batch is: its numbers get longer, and within an
epoch the states of generators are in it."""
DRAIN_SECONDS = 60.0
"""How long the end of a training waits for consumers that have borrowed tensors."""

_log = logging.getLogger("offloop")


class TensorSharing:
    """Copies tensors into images, see :mod:`bus.tensors.view`, without making the host wait for a GPU.

    Args:
        pool: the shared memory, pinned (``SegmentPool(pin=pin)``) where tensors are on a GPU.
        stream: what the events are published through.
        may_wait: whether the training has ended, so that what is worth waiting for is waited for.
    """

    def __init__(self, pool: SegmentPool, stream: Publisher, may_wait: Callable[[], bool] = lambda: False) -> None:
        self._pool = pool
        self._stream = stream
        self._may_wait = may_wait
        self._waiting: set[str] = set()
        self.skipped: dict[str, int] = {}
        """How often each field was left out because no memory was free."""

    def share(self, name: str, out: TensorPayload) -> "dict[str, Any] | _SharedLater":
        """What is sent for a field of tensors: the map that stands for them, or a promise of it.

        Raises :class:`bus.errors.ConfigurationError` when no memory is free, and for tensors that cannot be sent."""
        layout = _layout(out)
        on_gpu = any(tensor.is_cuda for tensor in out.tensors.values())
        if layout.size <= INLINE_BYTES:
            image = torch.empty(layout.size, dtype=torch.uint8, pin_memory=on_gpu)
            _fill(image, layout, out.tensors)
            copied = _copied() if on_gpu else None
            value = _SharedLater(lambda: _reference(layout, image=image.numpy().tobytes()), copied, layout.size)
            return value if on_gpu else value.value()
        segment = self._pool.reserve(layout.size, name)
        if segment is None and out.policy == "wait" and self._may_wait():
            segment = self._reserve_at_last(layout.size, name)
        if segment is None:
            raise self._refused(name, out)
        try:
            _fill(torch.frombuffer(segment.buffer, dtype=torch.uint8), layout, out.tensors)
        except BaseException:
            segment.release()
            raise
        seq = self._stream.next_seq
        # Readers are let in when the bytes are there, which is before they can learn of it.
        value = _SharedLater(lambda: _reference(layout, segment=segment.publish(seq)), _copied() if on_gpu else None)
        return value if on_gpu else value.value()

    def reserve(self, outs: Iterable[TensorPayload]) -> None:
        """Begins to allocate memory for the largest of what will be shared, while the training continues."""
        size = 0
        for out in outs:
            # What cannot be sent is reported when it is due.
            with contextlib.suppress(ConfigurationError):
                size = max(size, _layout(out).size)
        if size > INLINE_BYTES:
            self._pool.prepare(size + GROWTH_BYTES)

    def _reserve_at_last(self, size: int, name: str) -> Segment | None:
        """As ``reserve`` where no later event comes: waits for consumers to give back what they have borrowed."""
        deadline = time.monotonic() + LAST_SECONDS
        segment = None
        while segment is None and time.monotonic() < deadline:
            self._stream.wait()
            segment = self._pool.reserve(size, name)
        return segment

    def take_waiting(self) -> set[str]:
        """The fields that were refused since the last call and are to come with a later event."""
        waiting, self._waiting = self._waiting, set()
        return waiting

    def drain(self, seconds: float = DRAIN_SECONDS) -> None:
        """Waits until consumers have handled what they borrowed, because it ends with this process. Says so when
        they have not within ``seconds``."""
        deadline = time.monotonic() + seconds
        while self._pool.unhandled and time.monotonic() < deadline:
            self._stream.wait()
        if self._pool.unhandled:
            _log.warning("tensors that a consumer asked for are gone with the training: it has not come for them")

    def close(self) -> None:
        """Gives all shared memory back; consumers keep what they hold."""
        self._pool.close()

    def _refused(self, name: str, out: TensorPayload) -> ConfigurationError:
        reason = "no shared memory is free, as consumers have not handled what they were sent"
        if out.policy == "wait":
            self._waiting.add(name)
            return ConfigurationError(f"{reason}: it comes with the next event that it is asked for with")
        self.skipped[name] = self.skipped.get(name, 0) + 1
        return ConfigurationError(f"{reason}: it is left out here, {self.skipped[name]} times so far")


class _SharedLater:
    """An image that a GPU is still copying, or that is there."""

    def __init__(
        self, tell: Callable[[], dict[str, Any]], copied: "torch.cuda.Event | None", size: int | None = None
    ) -> None:
        self.size = size
        """How much of it goes into the event; ``None`` for what is in shared memory."""
        self._tell = tell
        self._copied = copied

    def ready(self) -> bool:
        """Whether :meth:`value` would return at once."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def value(self) -> dict[str, Any]:
        """The map that stands for the image. Waits for the GPU when it is not :meth:`ready`."""
        if not self.ready():
            assert self._copied is not None  # it is ready otherwise
            self._copied.synchronize()
        return self._tell()


def _layout(out: TensorPayload) -> ImageLayout:
    return image_layout({one: tensor_spec(tensor) for one, tensor in out.tensors.items()}, out.metadata or None)


def _copied() -> torch.cuda.Event:
    """What shows that the copies begun so far are done."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _reference(layout: ImageLayout, **place: Any) -> dict[str, Any]:
    return {"$tensors": 1, "bytes": layout.size, **place}


def _fill(image: Tensor, layout: ImageLayout, tensors: Mapping[str, Tensor]) -> None:
    """Copies everything to its place in an image; from a GPU, begins to."""
    front = len(layout.header)
    image[:front] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    with torch.no_grad():
        for name, start in layout.offsets.items():
            tensor = tensors[name]
            if tensor.numel():
                place = image[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                place.copy_(tensor, non_blocking=True)


def share_tensors(state: State, publisher: Publisher) -> TensorSharing:
    """What lends the tensors of a training to its consumers."""
    on_gpu = state.device.name == "gpu"
    pool = SegmentPool(is_handled=publisher.is_handled, pin=pin if on_gpu else None)
    return TensorSharing(pool, publisher, lambda: not state.fitting)


def pin(memory: memoryview) -> Callable[[], object]:
    """Lets a GPU copy straight into memory, without the host; what is returned undoes that.

    Raises :class:`RuntimeError` where CUDA refuses it."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    status = runtime.cudaHostRegister(address, memory.nbytes, 0)
    if int(status) != 0:
        raise RuntimeError(f"CUDA cannot pin {memory.nbytes} bytes of shared memory: error {int(status)}")
    return lambda: runtime.cudaHostUnregister(address)
