"""The rows of a run's tables, read from its recordings."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from offloop.bus.errors import ConfigurationError, ProtocolError, close_matches
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.recording import Recording
from offloop.bus.types.event import ANY_TABLE, TABLE, Event
from offloop.bus.types.table import FIXED


class _Part(msgspec.Struct):
    step: int
    columns: list[str]
    rows: list[list[Any]]
    images: dict[str, list[Any]] = {}
    left_out: dict[str, int] = {}


class RowsAdded(NamedTuple):
    """Rows that one event added to a table."""

    table: str
    step: int
    time: float
    """Seconds since 1970, UTC."""
    rank: int
    attempt: int
    seq: int
    columns: list[str]
    rows: list[list[Any]]
    """Each with a cell for each column. An image is ``{"image": HASH}``."""
    images: Mapping[str, list[Any]]
    """Images that no earlier event of this process had: hash to :attr:`offloop.bus.types.image.Image.content`."""
    left_out: Mapping[str, int]
    """Numbers of rows that were left out, by the limit that they passed."""

    @classmethod
    def of(cls, state: Snapshot) -> "RowsAdded":
        """Read a snapshot of ``#NAME``. Raises ProtocolError if it is malformed."""
        try:
            part = msgspec.convert(dict(state.fields), _Part)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"rows of table {state.event.value[1:]!r}, event {state.seq}: {error}") from None
        if any(len(row) != len(part.columns) for row in part.rows):
            raise ProtocolError(f"rows of table {state.event.value[1:]!r}, event {state.seq}: a row has too few cells")
        place = state.event.value[1:], part.step, state.time, state.rank, state.attempt, state.seq
        return cls(*place, part.columns, part.rows, part.images, part.left_out)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield each row as a map, with :data:`~offloop.bus.types.table.FIXED` first."""
        fixed = dict(zip(FIXED, (self.step, self.time, self.rank, self.attempt), strict=True))
        for row in self.rows:
            yield {**fixed, **dict(zip(self.columns, row, strict=True))}


def read_rows(recordings: Iterable[Recording], table: str | None = None) -> Iterator[RowsAdded]:
    """Yield the rows of a table, or of all, in recorded order. Malformed events are skipped."""
    event = ANY_TABLE if table is None else Event(f"{TABLE}{table}")
    for recording in recordings:
        for snapshot in recording.snapshots([event]):
            try:
                yield RowsAdded.of(snapshot)
            except ProtocolError:
                continue


def count_rows(recordings: Iterable[Recording]) -> dict[str, int]:
    """Return the number of rows of each table, by name."""
    counts: dict[str, int] = {}
    for part in read_rows(recordings):
        counts[part.table] = counts.get(part.table, 0) + len(part.rows)
    return counts


def require_table(name: str, known: Iterable[str], run: str) -> None:
    """Raise ConfigurationError unless the run has the table."""
    names = sorted(known)
    if name not in names:
        there = f"there {'is' if len(names) == 1 else 'are'} {', '.join(names[:20])}" if names else "it has no tables"
        raise ConfigurationError(f"run {run} has no table {name!r}: {close_matches(name, names)}{there}")
