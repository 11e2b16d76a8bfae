"""Shared memory in which a trainer leaves tensors for consumers on its machine.

A :class:`SegmentPool` reuses a bounded number of segments. A segment is reused after every consumer that requested it
has handled it or exceeded its time, and while no process has it mapped. The kernel enforces the latter. A reader holds
a shared ``flock`` from before its first read until it unmaps the segment. The pool writes only with an exclusive lock,
which it takes without waiting. When a process dies, the kernel releases its lock.

So no reader sees a mixture of two images. A reader with its lock compares the number at the front of the segment,
which was written under the exclusive lock together with the image, with the number in its reference. If they are
equal, the image is the right one, and stays so while the lock is held. Otherwise the reader came too late."""

import contextlib
import fcntl
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from mmap import mmap
from typing import Annotated, Any

import msgspec

from offloop.bus.errors import BrokerError, ClosedError, ConfigurationError, FieldNotAvailableError, ProtocolError
from offloop.bus.tensors.shared_memory import NO_DESCRIPTOR, create_memory, discard_memory, map_memory, open_memory

_log = logging.getLogger("offloop.segments")

IMAGE_OFFSET = 4096
MAX_SIZE = 1 << 48
MAX_INTEGER = 1 << 31
GRANULE = 1 << 20  # smaller images are sent in their events
IDLE_SECONDS = 120.0
PIECE = 256 * 1024
DEFER_BYTES = 64 << 20
"""Larger segments can be allocated beside the training: fresh memory takes up to two seconds for a GB."""

_FRONT = struct.Struct("<8s16sQQ")
"""Magic, random token of the segment, number of its image (0 during a change), size of the image.

The image begins at :data:`IMAGE_OFFSET`."""
_MAGIC = b"OFFLOOP\0"

Pin = Callable[[memoryview], Callable[[], object]]
"""Prepares memory for copies from a device; returns a function that undoes it. Raises OSError on failure."""
Ask = Callable[[str, dict[str, Any]], Mapping[str, Any]]
"""Sends the broker a control message of a kind and with a content; returns the content of its answer."""


class SegmentElsewhereError(FieldNotAvailableError):
    """The segment does not exist here: its process ended, is on another machine, or has freed it."""


class SegmentReference(msgspec.Struct, frozen=True):
    """Reference to an image: the map ``segment`` in an event."""

    pid: Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]  # the process that made the segment
    fd: Annotated[int, msgspec.Meta(ge=NO_DESCRIPTOR, le=MAX_INTEGER)]
    """The segment's descriptor in that process; -1 without memfds."""
    token: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    number: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]  # size of the image in bytes

    def to_wire(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)

    @classmethod
    def from_wire(cls, wire: Any) -> "SegmentReference":
        try:
            # Text must not be converted to bytes.
            return msgspec.convert(wire, cls, builtin_types=(bytes,))
        except (msgspec.ValidationError, RecursionError) as error:
            raise ProtocolError(f"{str(wire)[:200]} is not a reference to a segment: {error}") from None


# -- the trainer's side -----------------------------------------------------------------------------------------------


class Segment:
    """A piece of shared memory with a fixed size.

    No other process reads it between :meth:`SegmentPool.reserve` and :meth:`publish` or :meth:`release`."""

    def __init__(self, capacity: int, pin: Pin | None) -> None:
        self.capacity = capacity
        self.reserved: bool = False
        self.published: tuple[int, str] | None = None
        """``seq`` and field of its contents, until all requesters have handled them."""
        self.since: float = 0.0  # monotonic time at which it was last published or released
        self.kept: dict[str, Any] = {}  # objects that the owner keeps for the next use of this memory
        self._number = self._size = 0
        self._field = ""
        self._token = os.urandom(16)
        self._descriptor, self._shared = create_memory(IMAGE_OFFSET + capacity, self._token)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.memory: mmap | None = map_memory(self._descriptor, IMAGE_OFFSET + capacity, writable=True)
            self._unpin = None if pin is None else pin(memoryview(self.memory))
        except BaseException:
            discard_memory(self._descriptor, self._token)
            raise

    @property
    def buffer(self) -> memoryview:
        """Memory for the image. Nothing may be written to it after :meth:`publish`."""
        assert self.memory is not None  # a freed segment is not reserved
        return memoryview(self.memory)[IMAGE_OFFSET : IMAGE_OFFSET + self._size]

    def lock(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def reserve(self, size: int, field: str) -> None:
        self.reserved, self.published = True, None
        self._size, self._field = size, field
        self._mark(0, 0)

    def publish(self, seq: int) -> dict[str, Any]:
        """Admit readers for event ``seq``; return the map ``segment`` for it. Raise ClosedError if not reserved."""
        if not self.reserved:
            raise ClosedError("this segment was published, released or closed before: reserve another one")
        self._number += 1
        self._mark(self._number, self._size)
        self.published = seq, self._field
        self.release()
        return SegmentReference(os.getpid(), self._shared, self._token, self._number, self._size).to_wire()

    def release(self) -> None:
        """Return an unpublished segment to its pool. It has no effect after :meth:`publish` and on a closed pool."""
        if self.reserved:
            self.reserved = False
            self.since = time.monotonic()
            self.unlock()

    def give_back(self) -> None:
        """Free the memory as soon as nothing in this process refers to it."""
        self.reserved = False
        if self._unpin is not None:
            self._unpin()
        # The map is not closed: a tensor may still refer to it.
        self.memory = None
        self.kept.clear()
        discard_memory(self._descriptor, self._token)

    def _mark(self, number: int, size: int) -> None:
        assert self.memory is not None  # a freed segment is in no pool
        _FRONT.pack_into(self.memory, 0, _MAGIC, self._token, number, size)


def _make_in_thread(capacity: int, pin: Pin | None) -> "Future[Segment]":
    """Allocate a segment in a thread that nothing else waits for."""
    coming: Future[Segment] = Future()

    def make() -> None:
        try:
            coming.set_result(Segment(capacity, pin))
        except BaseException as error:  # noqa: BLE001  it is reported when the memory is needed
            coming.set_exception(error)

    threading.Thread(target=make, name="offloop-segment", daemon=True).start()
    return coming


class SegmentPool:
    """At most ``slots`` segments, for use by one process.

    ``is_handled(seq, field)`` returns whether every live consumer that requests the field has handled event ``seq``. A
    late consumer delays the reuse by at most ``hold_seconds``, unless it holds the segment's lock. ``pin`` is called
    with the memory of each new segment, in any thread, to prepare it for copies from a device; its result is called
    before the memory is freed."""

    def __init__(
        self,
        slots: int = 4,
        hold_seconds: float = 60.0,
        is_handled: Callable[[int, str], bool] = lambda seq, field: False,
        pin: Pin | None = None,
    ) -> None:
        if slots < 1:
            raise ConfigurationError(f"{slots} segments: a pool has at least one")
        self._limit = slots
        self._hold_seconds = hold_seconds
        self._is_handled = is_handled
        self._pin = pin
        self._segments: list[Segment] = []
        self._to_come: tuple[int, Future[Segment]] | None = None  # capacity and result of a pending allocation
        self._pid = os.getpid()

    @property
    def size(self) -> int:
        """Bytes of shared memory in the pool, without a pending allocation."""
        self._receive_for(0)
        return sum(segment.capacity for segment in self._segments)

    @property
    def unhandled(self) -> int:
        """Number of segments that some requester has not handled, and may still take its time for."""
        return sum(segment.published is not None and not self._is_over(segment) for segment in self._segments)

    @property
    def is_allocating(self) -> bool:
        return self._to_come is not None and not self._to_come[1].done()

    def reserve(self, nbytes: int, field: str, *, defer: bool = False) -> Segment | None:
        """Return a segment with room for ``nbytes``, to be filled for ``field``; ``None`` if none is free.

        With ``defer`` it does not wait for much new memory, but starts to allocate it for a later call."""
        if os.getpid() != self._pid:
            return None
        segment = self._free_segment(nbytes, defer and nbytes > DEFER_BYTES)
        if segment is not None:
            segment.reserve(nbytes, field)
            self.trim()
        return segment

    def prepare(self, nbytes: int) -> None:
        """Start to allocate a segment for ``nbytes``, unless there is one, without waiting.

        New memory takes many times as long as a copy into used memory."""
        if os.getpid() != self._pid or self._to_come is not None or len(self._segments) >= self._limit:
            return
        if all(segment.capacity < nbytes for segment in self._segments):
            self._allocate(nbytes)

    def _allocate(self, nbytes: int) -> None:
        capacity = _capacity_for(nbytes)
        self._to_come = capacity, _make_in_thread(capacity, self._pin)

    def trim(self) -> None:
        """Free memory that was not used for two minutes. :meth:`reserve` does this too."""
        now = time.monotonic()
        for segment in tuple(self._segments):
            if now - segment.since > IDLE_SECONDS and self._is_over(segment) and segment.lock():
                self._give_back(segment)

    def close(self) -> None:
        """Free all memory; readers keep what they have mapped."""
        if os.getpid() == self._pid:
            self._receive()
            for segment in tuple(self._segments):
                self._give_back(segment)

    def _free_segment(self, nbytes: int, defer: bool) -> Segment | None:
        """Return a locked segment with enough room: the smallest free one, a new one, or one in place of a smaller."""
        self._receive_for(nbytes, defer)
        free = sorted(filter(self._is_over, self._segments), key=lambda segment: segment.capacity)
        for segment in free:
            if segment.capacity >= nbytes and segment.lock():
                return segment
        if defer and self._to_come is not None:
            return None
        if len(self._segments) + (self._to_come is not None) >= self._limit:
            too_small = next((segment for segment in free if segment.capacity < nbytes and segment.lock()), None)
            if too_small is None:
                return None
            self._give_back(too_small)
        self.trim()
        if defer:
            self._allocate(nbytes)
            return None
        try:
            segment = Segment(_capacity_for(nbytes), self._pin)
        except OSError as error:
            _warn(nbytes, error)
            return None
        self._add(segment)
        return segment

    def _receive_for(self, nbytes: int, defer: bool = False) -> None:
        """Add the pending segment, if it is ready or has the right size: another allocation would take as long."""
        if self._to_come is not None:
            capacity, coming = self._to_come
            if coming.done() or (nbytes <= capacity < 2 * _capacity_for(nbytes) and not defer):
                self._receive()

    def _receive(self) -> None:
        if self._to_come is not None:
            (capacity, coming), self._to_come = self._to_come, None
            error = coming.exception()
            if error is None:
                self._add(coming.result())
                coming.result().unlock()
            else:
                _warn(capacity, error)

    def _add(self, segment: Segment) -> None:
        segment.since = time.monotonic()
        self._segments.append(segment)

    def _is_over(self, segment: Segment) -> bool:
        return not segment.reserved and (
            segment.published is None
            or time.monotonic() - segment.since > self._hold_seconds
            or self._is_handled(*segment.published)
        )

    def _give_back(self, segment: Segment) -> None:
        self._segments.remove(segment)
        segment.give_back()


def _warn(nbytes: int, error: BaseException) -> None:
    # As text: a log record that keeps the error would keep the memory.
    _log.warning("no shared memory for %d bytes: %s", nbytes, str(error))


def _capacity_for(nbytes: int) -> int:
    return -(-nbytes // GRANULE) * GRANULE


# -- readers ----------------------------------------------------------------------------------------------------------


def open_segment(reference: SegmentReference) -> memoryview:
    """Map the image of a reference, read-only. The segment stays locked until nothing refers to the memory."""
    descriptor = lock_segment(reference)
    try:
        memory = map_memory(descriptor, IMAGE_OFFSET + reference.size)
    except (OSError, ValueError) as error:
        raise FieldNotAvailableError(f"a segment of {reference.size} bytes cannot be mapped: {error}") from None
    finally:
        # The map has its own descriptor, with the same lock.
        os.close(descriptor)
    return memoryview(memory)[IMAGE_OFFSET:]


def lock_segment(reference: SegmentReference) -> int:
    """Open and lock a segment for reading, until the returned descriptor is closed.

    Raises SegmentElsewhereError: it does not exist on this machine; FieldNotAvailableError: the segment was reused."""
    try:
        descriptor = open_memory(reference.pid, reference.fd, reference.token)
    except (OSError, ValueError):
        raise _elsewhere(reference) from None
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(os.close, descriptor)
        # Check the contents before locking: it may be any file.
        if _read_front(descriptor)[:2] != (_MAGIC, reference.token):
            raise _elsewhere(reference)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            here = _read_front(descriptor)[2:] == (reference.number, reference.size)
        except OSError:
            here = False
        if not here:
            raise FieldNotAvailableError(
                "these tensors were read too late: the trainer has reused their memory; "
                "request them less often, or handle events faster"
            )
        on_failure.pop_all()
    return descriptor


def _read_front(descriptor: int) -> tuple[bytes, bytes, int, int]:
    try:
        magic, token, number, size = _FRONT.unpack(os.pread(descriptor, _FRONT.size, 0))
    except (OSError, struct.error):
        return b"", b"", 0, 0
    return magic, token, number, size


def _elsewhere(reference: SegmentReference) -> SegmentElsewhereError:
    return SegmentElsewhereError(
        f"process {reference.pid} has no such memory here: it has ended, is on another machine, or gave it back"
    )


# -- in pieces, for consumers that cannot map them: messages ``fetch_segment`` and ``segment_data`` -------------------


def fetch_segment(ask: Ask, run: str, reference: Mapping[str, Any]) -> bytearray:
    """Fetch the image of an event's map ``segment``, piece by piece, for a consumer."""
    requested = SegmentReference.from_wire(reference)
    # It grows with received data, because the size is a peer's claim.
    image = bytearray()
    while len(image) < requested.size:
        question = {"run": run, "segment": requested.to_wire(), "offset": len(image)}
        try:
            answer = ask("fetch_segment", question)
        except BrokerError as error:
            raise FieldNotAvailableError(f"the broker does not provide these tensors: {error}") from None
        data = answer.get("data")
        if answer.get("run") != run or answer.get("offset") != len(image) or not isinstance(data, bytes) or not data:
            raise ProtocolError(f"the broker's answer is not the piece at {len(image)} of a segment")
        image += data
    if len(image) > requested.size:
        raise ProtocolError(f"the broker sent {len(image)} bytes of a segment of {requested.size}")
    return image


def read_piece(publishers: Collection[int], requested: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request for a piece of a segment, at the broker. ``publishers`` are processes on this machine."""
    reference = SegmentReference.from_wire(requested["segment"])
    offset = requested["offset"]
    if type(offset) is not int or not 0 <= offset <= reference.size:
        raise ProtocolError(f"offset {str(offset)[:40]}: a segment of {reference.size} bytes is read from 0 on")
    if reference.pid not in publishers:
        raise SegmentElsewhereError(
            f"process {reference.pid} publishes nothing of run {requested['run']!r} on the broker's machine: "
            "its memory cannot be read from here"
        )
    descriptor = lock_segment(reference)
    try:
        data = os.pread(descriptor, min(PIECE, reference.size - offset), IMAGE_OFFSET + offset)
    finally:
        os.close(descriptor)
    return {"run": requested["run"], "offset": offset, "data": data}
