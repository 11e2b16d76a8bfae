"""Recorded events as rows for tables and JSON."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from offloop.bus.protocol.frames import END
from offloop.bus.types.timestamp import TrainingTime

if TYPE_CHECKING:
    from offloop.bus.recording.source import Recorded


FORMATS = {"parquet": ".parquet", "csv": ".csv", "jsonl": ".jsonl", "trace": ".trace.json"}
"""Export formats of events, and the suffix of a file of each."""

PICTURES = ("html", "svg")
"""Export formats for people."""

COUNTERS, DURATIONS = TrainingTime._fields[:10], TrainingTime._fields[10:]
"""Counters of a training time, and its clock times, which rows have in seconds."""

FIXED = (
    *("run", "attempt", "rank", "seq", "event", "time", "utc", "epoch", "batch", "sample", "token", "iteration"),
    *("batch_in_epoch", "sample_in_epoch", "token_in_epoch", "epoch_in_iteration", "token_in_iteration", *DURATIONS),
)  # first columns of every row. A published field with one of these names is called fields/NAME


def as_row(record: "Recorded") -> dict[str, Any]:
    """Return an event as one level of names: :data:`FIXED`, then the fields as published.

    ``time`` is in seconds since 1970, ``utc`` the same in nanoseconds; ``*_wct`` are seconds spent training. ``$end``
    has no training time."""
    (run, name, rank), event = record.topic, record.event
    fixed = run, event.attempt, rank, event.seq, name, event.time / 10**9, event.time
    row: dict[str, Any] = dict.fromkeys(FIXED) | dict(zip(FIXED, fixed, strict=False))
    if name != END:
        row |= zip((*COUNTERS, *DURATIONS), event.timestamp, strict=True)
        row |= {duration: row[duration] / 1_000_000 for duration in DURATIONS}
    for field, value in {**event.context, **event.fields}.items():
        row[f"fields/{field}" if field in row else str(field)] = value
    return row


def clock(nanoseconds: int) -> str:
    """Format a time in nanoseconds since 1970 as ISO 8601 in UTC."""
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09}Z"
