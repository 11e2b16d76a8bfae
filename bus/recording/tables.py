"""The rows of a run's tables, read from its recordings."""

from collections.abc import Iterable, Iterator

from offloop.bus.errors import ConfigurationError, ProtocolError, close_matches
from offloop.bus.protocol.tables import RowsAdded
from offloop.bus.recording.recording import Recording
from offloop.bus.types.event import ANY_TABLE, TABLE, Event


def read_rows(recordings: Iterable[Recording], table: str | None = None) -> Iterator[RowsAdded]:
    """Yield the rows of a table, or of all, in recorded order. Malformed events are skipped."""
    event = ANY_TABLE if table is None else Event(f"{TABLE}{table}")
    for recording in recordings:
        for snapshot in recording.snapshots([event]):
            try:
                yield RowsAdded.of(snapshot)
            except ProtocolError:
                continue


def require_table(name: str, known: Iterable[str], run: str) -> None:
    """Raise ConfigurationError unless the run has the table."""
    names = sorted(known)
    if name not in names:
        there = f"there {'is' if len(names) == 1 else 'are'} {', '.join(names[:20])}" if names else "it has no tables"
        raise ConfigurationError(f"run {run} has no table {name!r}: {close_matches(name, names)}{there}")
