"""Events that wait for a value which is on its way, such as a loss that is being copied from a GPU."""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from bus.protocol.frames import MAX_FRAME
from bus.types.deferred import deferred_values
from bus.types.timestamp import TrainingTime

_log = logging.getLogger("offloop")


class PendingEvent(NamedTuple):
    """What :func:`bus.protocol.frames.event_encoder` makes a frame of, kept until its fields are complete."""

    encode: Callable[..., bytes]
    seq: int
    base_seq: int
    time: int
    timestamp: TrainingTime
    previous: TrainingTime | None
    fields: dict[str, Any]
    context: bytes

    def to_frame(self) -> bytes:
        """The frame; without the fields if they cannot be packed or are too large, because the event has its number
        already."""
        try:
            frame: bytes = self.encode(*self[1:])
            if len(frame) > MAX_FRAME:
                raise ValueError(f"{len(frame):,} bytes, at most {MAX_FRAME:,} are allowed")
            return frame
        except (TypeError, ValueError, OverflowError) as error:
            _log.warning("the fields of event %d cannot be sent and are left out: %s", self.seq, error)
            bare: bytes = self.encode(*self._replace(fields={"not_sent": str(error)})[1:])
            return bare


class PendingEvents(deque[PendingEvent]):
    """A queue of events in order, each of which becomes a frame once its values are there, and after all before it."""

    def take(self, *, wait: bool) -> list[bytes]:
        """The frames of the events at the front whose values are there; with ``wait`` those of all events, waiting for
        their values."""
        frames: list[bytes] = []
        while self:
            fields = _complete(self[0], wait)
            if fields is None:
                break
            frames.append(self.popleft()._replace(fields=fields).to_frame())
        return frames


def _complete(event: PendingEvent, wait: bool) -> dict[str, Any] | None:
    """The fields with their values, or ``None`` while one is on its way."""
    late = deferred_values(event.fields)
    try:
        if not wait and not all(value.ready() for value in late.values()):
            return None
        return {**event.fields, **{name: value.value() for name, value in late.items()}}
    # A device that has failed raises whatever it likes for everything that is still to come from it; the run's end, and
    # the error that caused it, must get out all the same.
    except Exception as error:  # noqa: BLE001
        _log.warning("event %d is sent without %s: %s", event.seq, ", ".join(late), error)
        return {**event.fields, **dict.fromkeys(late), "not_sent": str(error)}
