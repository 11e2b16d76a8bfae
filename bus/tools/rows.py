"""Recorded events as rows: names and values that tables and JSON can hold."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from offloop.bus.protocol.frames import END
from offloop.bus.types.timestamp import TrainingTime

if TYPE_CHECKING:
    from offloop.bus.recording.source import Recorded


FORMATS = {
    "parquet": ".parquet",
    "csv": ".csv",
    "jsonl": ".jsonl",
    "trace": ".trace.json",
}
"""The formats in which a recording can be exported, and the suffix of a file of each."""

COUNTERS = TrainingTime._fields[:10]
"""What counts in a training time, in the order in which it travels; after these come :data:`DURATIONS`."""

DURATIONS = TrainingTime._fields[10:14]
"""What is by the clock in a training time; in rows in seconds."""

FIXED = (
    "run",
    "attempt",
    "rank",
    "seq",
    "event",
    "time",
    "utc",
    "epoch",
    "batch",
    "sample",
    "token",
    "iteration",
    "batch_in_epoch",
    "sample_in_epoch",
    "token_in_epoch",
    "epoch_in_iteration",
    "token_in_iteration",
    *DURATIONS,
)
"""What every row begins with. A published field of one of these names is called ``fields/NAME``."""


def as_row(record: "Recorded") -> dict[str, Any]:
    """An event as one level of names, the values as they were published: :data:`FIXED`, then every field.

    ``time`` is in seconds since 1970, ``utc`` the same in whole nanoseconds; the ``*_wct`` are seconds spent
    training. ``$end`` has no training time."""
    event = record.event
    counted: dict[str, Any] = {
        "run": record.topic.run,
        "attempt": event.attempt,
        "rank": record.topic.rank,
        "seq": event.seq,
        "event": record.topic.name,
        "time": event.time / 10**9,
        "utc": event.time,
    }
    if record.topic.name != END:
        counted |= zip((*COUNTERS, *DURATIONS), event.timestamp, strict=False)
        counted |= {name: counted[name] / 1_000_000 for name in DURATIONS}
    row = {name: counted.get(name) for name in FIXED}
    for name, value in {**event.context, **event.fields}.items():
        row[f"fields/{name}" if name in row else str(name)] = value
    return row


def clock(nanoseconds: int) -> str:
    """A moment in ISO 8601, in UTC, to the nanosecond."""
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09}Z"
