"""What of an event's fields can be sent, when not all of them can."""

from typing import Any

from offloop.bus.protocol.frames import MAX_FRAME, check_size, pack_map
from offloop.bus.types.deferred import Deferred
from offloop.bus.types.left_out import LeftOut

_MOST_BYTES = MAX_FRAME - (1 << 16)
_LONGEST_REASON = 500


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

    late = {name: value for name, value in fields.items() if isinstance(value, Deferred)}
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
