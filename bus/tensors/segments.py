"""Shared memory in which a trainer leaves tensors for the consumers on its machine.

A :class:`SegmentPool` has a bounded number of segments and uses them again and again. Before a segment is used again,
every consumer that requested it has handled it, or has had the time to; and no process may have it mapped. The kernel
ensures the latter: a reader of a segment holds a shared ``flock`` on it, from before the first look until the map is
gone, and the pool writes only while it holds the exclusive one, which it takes without waiting. When a process dies,
the kernel releases its lock.

So no reader gets half of one image and half of another. A reader that gets its lock finds in the front of the segment
the number of what is there, written under the exclusive lock together with it; if that is the number in its reference,
the whole image is the right one, and stays while the lock does. If it is not, or there is no lock to be had, the
reader came too late.

=======  =====  ===================================================
Offset   Bytes  The front of a segment
=======  =====  ===================================================
0        8      ``OFFLOOP`` and a zero
8        16     the segment's token, random
24       8      number of what is in it, 0 while that is changing
32       8      size of the image in bytes
4096            the image
=======  =====  ===================================================

Numbers are little endian.
"""

import contextlib
import fcntl
import logging
import os
import struct
import threading
import time
from collections.abc import Callable
from mmap import mmap
from typing import Annotated, Any

import msgspec

from offloop.bus.errors import ClosedError, ConfigurationError, FieldNotAvailableError, ProtocolError
from offloop.bus.tensors.shared_memory import NO_DESCRIPTOR, create_memory, discard_memory, map_memory, open_memory

_log = logging.getLogger("offloop.segments")

IMAGE_OFFSET = 4096
MAX_SIZE = 1 << 48
MAX_INTEGER = 1 << 31
GRANULE = 1 << 20  # what takes less travels in its event
IDLE_SECONDS = 120.0

_FRONT = struct.Struct("<8s16sQQ")
_MAGIC = b"OFFLOOP\0"

Pin = Callable[[memoryview], Callable[[], object]]
"""Makes memory ready for copies from a device, and returns what undoes that; an ``OSError`` where that cannot be."""


class SegmentElsewhereError(FieldNotAvailableError):
    """A segment is not there: its process is gone or on another machine, or has given it back."""


class SegmentReference(msgspec.Struct, frozen=True):
    """The place of an image: the map ``segment`` in an event."""

    pid: Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]
    """The process that made the segment."""
    fd: Annotated[int, msgspec.Meta(ge=NO_DESCRIPTOR, le=MAX_INTEGER)]
    """The segment's descriptor in that process; -1 without memfds."""
    token: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    number: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]
    """Of the image, in bytes."""

    def to_wire(self) -> dict[str, Any]:
        """As it travels."""
        return msgspec.structs.asdict(self)

    @classmethod
    def from_wire(cls, wire: Any) -> "SegmentReference":
        """Reads the map. Raises ProtocolError: it is malformed."""
        try:
            # Without a conversion of bytes from text.
            return msgspec.convert(wire, cls, builtin_types=(bytes,))
        except (msgspec.ValidationError, RecursionError) as error:
            raise ProtocolError(f"{str(wire)[:200]} is not a reference to a segment: {error}") from None


# -- the trainer's side -----------------------------------------------------------------------------------------------


class _Slot:
    """One piece of shared memory, of a size that never changes."""

    def __init__(self, capacity: int, pin: Pin | None) -> None:
        self.capacity = capacity
        self.number = 0
        self.reserved = False
        self.published: tuple[int, str] | None = None
        """``seq`` and field of what is in it, until all who asked have handled it."""
        self.since = 0.0
        """When it was last published or released, on the steady clock."""
        self.token = os.urandom(16)
        self.kept: dict[str, Any] = {}
        self.descriptor, self.shared = create_memory(IMAGE_OFFSET + capacity, self.token)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.memory: mmap | None = map_memory(self.descriptor, IMAGE_OFFSET + capacity, writable=True)
            self._unpin = None if pin is None else pin(memoryview(self.memory))
        except BaseException:
            discard_memory(self.descriptor, self.token)
            raise

    def take(self) -> bool:
        """Locks it exclusively, if no process has it mapped."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def mark(self, number: int, size: int) -> None:
        assert self.memory is not None  # a slot that was given back is in no list
        _FRONT.pack_into(self.memory, 0, _MAGIC, self.token, number, size)

    def give_back(self) -> None:
        """Frees the memory as soon as nothing in this process refers to it."""
        if self._unpin is not None:
            self._unpin()
        # It is not closed: a tensor that was made of it may be there still.
        self.memory = None
        self.kept.clear()
        discard_memory(self.descriptor, self.token)


class Segment:
    """A segment that no other process reads, until it is published."""

    def __init__(self, slot: _Slot, size: int, field: str) -> None:
        self._slot: _Slot | None = slot
        self._size = size
        self._field = field
        assert slot.memory is not None
        self.buffer = memoryview(slot.memory)[IMAGE_OFFSET : IMAGE_OFFSET + size]
        """To be filled with the image. Nothing may be written to it after :meth:`publish`."""
        self.kept = slot.kept
        """Objects that the owner keeps with this memory for its next use."""

    def publish(self, seq: int) -> dict[str, Any]:
        """Opens the segment to readers, for event ``seq``. Returns the map ``segment`` for that event.

        Raises ClosedError: it was published or released before."""
        slot = self._end()
        slot.number += 1
        slot.mark(slot.number, self._size)
        slot.published = seq, self._field
        fcntl.flock(slot.descriptor, fcntl.LOCK_UN)
        return SegmentReference(os.getpid(), slot.shared, slot.token, slot.number, self._size).to_wire()

    def release(self) -> None:
        """Gives the segment back to its pool when it is not published after all; does nothing after that or
        after the pool was closed."""
        if self._slot is not None and self._slot.memory is not None:
            fcntl.flock(self._end().descriptor, fcntl.LOCK_UN)

    def _end(self) -> _Slot:
        if self._slot is None or self._slot.memory is None:
            raise ClosedError("this segment was published, released or closed before: reserve another one")
        slot, self._slot = self._slot, None
        slot.reserved = False
        slot.since = time.monotonic()
        return slot


class _SlotToCome:
    """A slot that is being got from the system, by a thread that nothing else waits for."""

    def __init__(self, capacity: int, pin: Pin | None) -> None:
        self.capacity = capacity
        self._pin = pin
        self._slot: _Slot | None = None
        self._thread = threading.Thread(target=self._get, name="offloop-segment", daemon=True)
        self._thread.start()

    def _get(self) -> None:
        # Without memory, the next save tries once more, and reports it.
        with contextlib.suppress(OSError):
            self._slot = _Slot(self.capacity, self._pin)

    @property
    def has_come(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> _Slot | None:
        """The slot, its exclusive lock held; ``None`` when there was no memory for it."""
        self._thread.join()
        return self._slot


class SegmentPool:
    """At most ``slots`` segments of one process, which is the only one that may use the pool.

    ``is_handled(seq, field)`` says whether every live consumer that asks for the field has handled event ``seq``; one
    that has not is waited for at most ``hold_seconds``, for as long as it does not hold the segment itself. ``pin`` is
    called once for the memory of each segment, to make it ready for copies from a device, in whichever thread gets that
    memory, and what it returned before that memory is given back.
    """

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
        self._slots: list[_Slot] = []
        self._to_come: _SlotToCome | None = None
        self._pid = os.getpid()

    @property
    def size(self) -> int:
        """Bytes of shared memory that the pool has, without what is on its way."""
        self._receive_for(0)
        return sum(slot.capacity for slot in self._slots)

    @property
    def unhandled(self) -> int:
        """Segments with something that not everyone who asked has handled yet, though there was time."""
        return sum(slot.published is not None and not self._is_over(slot) for slot in self._slots)

    def reserve(self, nbytes: int, field: str) -> Segment | None:
        """A segment with room for ``nbytes``, to be filled for ``field``. Waits for the system alone, where memory is
        new: ``None`` when all are leased, or memory is short, which is logged."""
        if os.getpid() != self._pid:
            return None
        slot = self._free_slot(nbytes)
        if slot is None:
            return None
        slot.mark(0, 0)
        slot.reserved, slot.published = True, None
        self.trim()
        return Segment(slot, nbytes, field)

    def prepare(self, nbytes: int) -> None:
        """Begins to get a segment for ``nbytes`` from the system, unless there is one, and returns at once: new memory
        takes many times as long as a copy into memory that has been used."""
        if os.getpid() != self._pid or self._to_come is not None or len(self._slots) >= self._limit:
            return
        if all(slot.capacity < nbytes for slot in self._slots):
            self._to_come = _SlotToCome(_capacity_for(nbytes), self._pin)

    def trim(self) -> None:
        """Gives memory back that was not used for two minutes. :meth:`reserve` does it too, with what it leaves."""
        now = time.monotonic()
        for slot in tuple(self._slots):
            if now - slot.since > IDLE_SECONDS and self._is_over(slot) and slot.take():
                self._give_back(slot)

    def close(self) -> None:
        """Gives all memory back; readers keep what they have mapped."""
        if os.getpid() == self._pid:
            self._receive()
            for slot in tuple(self._slots):
                self._give_back(slot)

    def _free_slot(self, nbytes: int) -> _Slot | None:
        """A slot with enough room, its exclusive lock held: the smallest that is free, a new one, or one in the place
        of a free one that is too small."""
        self._receive_for(nbytes)
        free = [slot for slot in sorted(self._slots, key=lambda slot: slot.capacity) if self._is_over(slot)]
        for slot in free:
            if slot.capacity >= nbytes and slot.take():
                return slot
        if len(self._slots) + (self._to_come is not None) >= self._limit:
            too_small = next((slot for slot in free if slot.capacity < nbytes and slot.take()), None)
            if too_small is None:
                return None
            self._give_back(too_small)
        self.trim()
        try:
            slot = _Slot(_capacity_for(nbytes), self._pin)
        except OSError as error:
            # As text: with the error, a record that is kept keeps the memory.
            _log.warning("no shared memory for %d bytes: %s", nbytes, str(error))
            return None
        self._add(slot)
        return slot

    def _receive_for(self, nbytes: int) -> None:
        """Adds the slot that is on its way, if it has come or has the right size: getting another takes as long."""
        coming = self._to_come
        if coming is not None and (coming.has_come or nbytes <= coming.capacity < 2 * _capacity_for(nbytes)):
            self._receive()

    def _receive(self) -> None:
        if self._to_come is not None:
            slot, self._to_come = self._to_come.wait(), None
            if slot is not None:
                self._add(slot)
                fcntl.flock(slot.descriptor, fcntl.LOCK_UN)

    def _add(self, slot: _Slot) -> None:
        slot.since = time.monotonic()
        self._slots.append(slot)

    def _is_over(self, slot: _Slot) -> bool:
        return not slot.reserved and (
            slot.published is None
            or time.monotonic() - slot.since > self._hold_seconds
            or self._is_handled(*slot.published)
        )

    def _give_back(self, slot: _Slot) -> None:
        self._slots.remove(slot)
        slot.give_back()


def _capacity_for(nbytes: int) -> int:
    return -(-nbytes // GRANULE) * GRANULE


# -- readers ----------------------------------------------------------------------------------------------------------


def open_segment(reference: SegmentReference) -> memoryview:
    """The image that a reference stands for, read-only. The segment is leased until nothing refers to the memory.

    Raises SegmentElsewhereError: it is not on this machine, or not there any more; FieldNotAvailableError: the segment
    holds something else already."""
    descriptor = lock_segment(reference)
    try:
        memory = map_memory(descriptor, IMAGE_OFFSET + reference.size)
    except (OSError, ValueError) as error:
        raise FieldNotAvailableError(f"a segment of {reference.size} bytes cannot be mapped: {error}") from None
    finally:
        # The map has a descriptor of its own, for the same lock.
        os.close(descriptor)
    return memoryview(memory)[IMAGE_OFFSET:]


def lock_segment(reference: SegmentReference) -> int:
    """Opens a segment and takes its lease, which lasts until the descriptor that is returned is closed.

    Raises SegmentElsewhereError: it is not on this machine, or not there any more; FieldNotAvailableError: the segment
    holds something else already."""
    try:
        descriptor = open_memory(reference.pid, reference.fd, reference.token)
    except (OSError, ValueError):
        raise _elsewhere(reference) from None
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(os.close, descriptor)
        # Before anything is done to it: it may be any file.
        if _read_front(descriptor)[:2] != (_MAGIC, reference.token):
            raise _elsewhere(reference)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            here = _read_front(descriptor)[2:] == (reference.number, reference.size)
        except OSError:
            here = False
        if not here:
            raise FieldNotAvailableError(
                "these tensors came too late: the trainer has used their memory again since; "
                "ask for them less often, or handle events faster"
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
