"""Events that wait for values still on a device, and events of which a part cannot be sent."""

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
    """Arguments of an event's frame, kept until its fields are complete."""

    encode: Callable[..., bytes]
    seq: int
    base_seq: int
    time: int
    timestamp: TrainingTime
    previous: TrainingTime | None
    fields: dict[str, Any]
    context: bytes

    def to_frame(self, left_out: LeftOut) -> bytes:
        """Encode the event without fields that cannot be sent: its number is assigned already."""
        try:
            frame: bytes = self.encode(*self[1:])
            if len(frame) > MAX_FRAME:
                check_size(len(frame))
            return frame
        except (TypeError, ValueError, OverflowError):
            rest: bytes = self.encode(*self._replace(fields=keep_sendable(self.fields, left_out))[1:])
            return rest


class PendingEvents(deque[PendingEvent]):
    """Queue of events in order. An event becomes a frame once its values have arrived and all earlier ones are sent."""

    def __init__(self, left_out: LeftOut) -> None:
        super().__init__()
        self._left_out = left_out

    def move(self, outbox: Outbox, *, wait: bool) -> None:
        """Move complete events at the front into ``outbox``; with ``wait`` move all, waiting for their values."""
        while self:
            event = self[0]
            # A signal handler may have raised after put(): then it is in the outbox already.
            if event.seq > outbox.seq:
                late = deferred_values(event.fields)
                if late:
                    if not wait and not all(_is_ready(value) for value in late.values()):
                        break
                    event = event._replace(fields=_read(event, late))
                outbox.put(event.to_frame(self._left_out), event.base_seq)
            del self[0]


def _read(event: PendingEvent, late: dict[str, Deferred]) -> dict[str, Any]:
    fields = dict(event.fields)
    for name, value in late.items():
        try:
            fields[name] = value.value()
        # A failed device raises any error for every later value. The run's end and its cause must still be sent.
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
    """Return the fields that fit into an event, without the largest; ``not_sent`` lists missing names and reasons."""
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
