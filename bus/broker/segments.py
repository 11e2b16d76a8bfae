"""Hands out shared memory in pieces, to consumers on other machines."""

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from offloop.bus.errors import BrokerError, ProtocolError
from offloop.bus.tensors.segments import IMAGE_OFFSET, SegmentElsewhereError, SegmentReference, lock_segment
from offloop.bus.tensors.transfer import PIECE

MAX_OPEN = 64
IDLE_SECONDS = 10.0


@dataclass
class _Lease:
    descriptor: int
    used: float


class SegmentServer:
    """The broker's side. A segment that is read is leased until its last piece was read or none was read for
    ``idle`` seconds, so that all pieces are of one image; at most :data:`MAX_OPEN` are leased at a time."""

    def __init__(self, idle: float = IDLE_SECONDS) -> None:
        self._idle = idle
        self._leases: dict[SegmentReference, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def read(self, publishers: Collection[int], requested: Mapping[str, Any]) -> dict[str, Any]:
        """A piece of a segment of one of the processes ``publishers``: those of this machine that publish the run.

        ``requested`` has the map ``segment`` of an event, ``offset`` and, if it is to be less than :data:`PIECE`,
        ``size``. Returns the content of the answer: ``run``, ``offset`` and ``data``.

        Raises:
            FieldNotAvailableError: the segment holds something else already, or is not on this machine.
            BrokerError: too many segments are being read.
            ProtocolError: the request is malformed, or asks for what is not a segment of the run.
        """
        reference = SegmentReference.from_wire(requested["segment"])
        offset, size = requested["offset"], requested.get("size", PIECE)
        if type(offset) is not int or type(size) is not int or not 0 <= offset <= reference.size or size < 1:
            raise ProtocolError(
                f"offset {str(offset)[:40]} and size {str(size)[:40]}: a segment of {reference.size} bytes is read "
                f"from 0 on, in pieces of 1 to {PIECE} bytes"
            )
        if reference.pid not in publishers:
            raise SegmentElsewhereError(
                f"process {reference.pid} publishes nothing of run {requested['run']!r} on the broker's machine: "
                "its memory cannot be read from here"
            )
        lease = self._lease(reference)
        size = min(size, PIECE, reference.size - offset)
        data = os.pread(lease.descriptor, size, IMAGE_OFFSET + offset)
        if offset + size == reference.size:
            self._end(reference)
        return {"run": requested["run"], "offset": offset, "data": data}

    def tidy(self) -> None:
        """Ends the leases that are not used any more; to be called now and then."""
        over = time.monotonic() - self._idle
        for reference in [reference for reference, lease in self._leases.items() if lease.used < over]:
            self._end(reference)

    def close(self) -> None:
        """Ends all leases."""
        for reference in tuple(self._leases):
            self._end(reference)

    def _lease(self, reference: SegmentReference) -> _Lease:
        lease = self._leases.get(reference)
        if lease is None:
            self.tidy()
            if len(self._leases) >= MAX_OPEN:
                raise BrokerError(f"{MAX_OPEN} segments are being read through this broker: try again in a moment")
            lease = self._leases[reference] = _Lease(lock_segment(reference), 0.0)
        lease.used = time.monotonic()
        return lease

    def _end(self, reference: SegmentReference) -> None:
        os.close(self._leases.pop(reference).descriptor)
