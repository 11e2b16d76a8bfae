"""Events that wait for a value which is on its way, such as a loss that is being copied from a GPU, and what of an
event can be sent when not all of it can."""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from offloop.bus.protocol.frames import MAX_FRAME, check_size, pack_map
from offloop.bus.publisher.outbox import Outbox
from offloop.bus.types.deferred import Deferred, LeftOut, deferred_values
from offloop.bus.types.timestamp import TrainingTime

_log = logging.getLogger("offloop")

_MOST_BYTES = MAX_FRAME - (1 << 16)
_LONGEST_REASON = 500


class PendingEvent(NamedTuple):
    """The arguments of an event's frame, kept until its fields are complete."""

    encode: Callable[..., bytes]
    seq: int
    base_seq: int
    time: int
    timestamp: TrainingTime
    previous: TrainingTime | None
    fields: dict[str, Any]
    context: bytes

    def to_frame(self, left_out: LeftOut) -> bytes:
        """The frame, without the fields that cannot be sent: the event has its number already."""
        try:
            frame: bytes = self.encode(*self[1:])
            check_size(len(frame))
            return frame
        except (TypeError, ValueError, OverflowError):
            rest: bytes = self.encode(*self._replace(fields=keep_sendable(self.fields, left_out))[1:])
            return rest


class PendingEvents(deque[PendingEvent]):
    """A queue of events in order, each of which becomes a frame once its values are there, and after all before it."""

    def __init__(self, left_out: LeftOut) -> None:
        super().__init__()
        self._left_out = left_out

    def move(self, outbox: Outbox, *, wait: bool) -> None:
        """Puts the frames of the events at the front whose values are there into ``outbox``; with ``wait`` those of all
        events, waiting for their values."""
        while self:
            event = self[0]
            # Where a signal handler has raised in here, it may be there already.
            if event.seq > outbox.seq:
                fields = _complete(event, wait)
                if fields is None:
                    break
                outbox.put(event._replace(fields=fields).to_frame(self._left_out), event.base_seq)
            del self[0]


def _complete(event: PendingEvent, wait: bool) -> dict[str, Any] | None:
    """The fields with their values, or ``None`` while one is on its way."""
    late = deferred_values(event.fields)
    if not wait and not all(_is_ready(value) for value in late.values()):
        return None
    fields = dict(event.fields)
    for name, value in late.items():
        try:
            fields[name] = value.value()
        # A device that has failed raises whatever it likes for everything that is still to come from it; the run's
        # end, and the error that caused it, must get out all the same.
        except Exception as error:  # noqa: BLE001
            _log.warning("event %d is sent without %s: %s", event.seq, name, error)
            fields.update({name: None, "not_sent": str(error)})
    return fields


def _is_ready(value: Deferred) -> bool:
    try:
        return value.ready()
    except Exception:  # noqa: BLE001  reading it shows the error
        return True


def keep_sendable(fields: dict[str, Any], left_out: LeftOut) -> dict[str, Any]:
    """The fields of an event without those that cannot be packed, and of ``logged`` the values that can be. Of more
    than an event can hold the largest are left out. ``not_sent`` says what is missing, and why."""
    parts: list[tuple[int, dict[str, Any], str]] = []
    reasons: list[str] = [fields["not_sent"]] if isinstance(fields.get("not_sent"), str) else []

    def leave_out(name: object, reason: object) -> None:
        left_out.add(name, reason)
        reasons.append(f"{name!r:.100}: {reason}")

    def keep(values: dict[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for name, value in values.items():
            try:
                size = len(memoryview(pack_map({name: value})))
                check_size(size)
            except (TypeError, ValueError, OverflowError) as error:
                leave_out(name, error)
            else:
                kept[name] = value
                parts.append((size, kept, name))
        return kept

    late = deferred_values(fields)
    logged = fields.get("logged")
    entries = logged if isinstance(logged, list) else []
    kept = keep({name: value for name, value in fields.items() if name not in late and value is not logged})
    if entries:
        kept["logged"] = [[step, keep(values)] for step, values in entries]
    size = sum(part[0] for part in parts)
    for bytes_, values, name in sorted(parts, key=lambda part: part[0], reverse=True):
        if size <= _MOST_BYTES:
            break
        size -= bytes_
        del values[name]
        leave_out(name, f"{bytes_:,} bytes of an event of more than {MAX_FRAME:,}")
    return {**kept, **late, "not_sent": "; ".join(reasons)[:_LONGEST_REASON]}
