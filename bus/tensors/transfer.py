"""Segments for consumers that cannot map them: the broker on the trainer's machine hands them on in pieces.

Both ends of the control messages ``fetch_segment`` and ``segment_data`` of ``docs/protocol.md``.
"""

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from offloop.bus.errors import BrokerError, FieldNotAvailableError, ProtocolError
from offloop.bus.tensors.segments import IMAGE_OFFSET, SegmentElsewhereError, SegmentReference, lock_segment

PIECE = 256 * 1024

Ask = Callable[[str, dict[str, Any]], Mapping[str, Any]]
"""Sends the broker a control message of a kind and with a content, and returns the content of its answer."""


def fetch_segment(ask: Ask, run: str, reference: Mapping[str, Any]) -> bytearray:
    """The consumer's side: the image that the map ``segment`` of an event stands for, piece by piece.

    Raises FieldNotAvailableError: the broker does not have it, or not any more; ProtocolError: the reference or an
    answer is malformed."""
    requested = SegmentReference.from_wire(reference)
    # It grows with what comes: the size is a peer's claim.
    image = bytearray()
    while len(image) < requested.size:
        question = {"run": run, "segment": requested.to_wire(), "offset": len(image)}
        try:
            answer = ask("fetch_segment", question)
        except BrokerError as error:
            raise FieldNotAvailableError(f"the broker does not hand on these tensors: {error}") from None
        data = answer.get("data")
        if answer.get("run") != run or answer.get("offset") != len(image) or not isinstance(data, bytes) or not data:
            raise ProtocolError(f"the broker answered something else than the piece at {len(image)} of a segment")
        image += data
    if len(image) > requested.size:
        raise ProtocolError(f"the broker sent {len(image)} bytes of a segment of {requested.size}")
    return image


def read_piece(publishers: Collection[int], requested: Mapping[str, Any]) -> dict[str, Any]:
    """The broker's side: the answer to a request for a piece of a segment of one of the processes ``publishers``, those
    of this machine that publish the run.

    Raises FieldNotAvailableError: the segment holds something else already, or is not on this machine; ProtocolError:
    the request is malformed, or asks for what is not a segment of the run."""
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
    descriptor = lock_segment(reference)
    try:
        data = os.pread(descriptor, min(size, PIECE, reference.size - offset), IMAGE_OFFSET + offset)
    finally:
        os.close(descriptor)
    return {"run": requested["run"], "offset": offset, "data": data}
