"""Rows that events add to a run's tables."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from offloop.bus.errors import ProtocolError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.strict_json import json_text, plain
from offloop.bus.types.table import FIXED

_SINGLE = frozenset((float, int, bool, str, type(None)))


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
    """Each with a cell for each column. An image is ``{"image": HASH}``. What cannot be in a cell became text."""
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
        rows = [[cell if type(cell) in _SINGLE else _as_cell(cell) for cell in row] for row in part.rows]
        return cls(*place, part.columns, rows, part.images, part.left_out)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield each row as a map, with :data:`~offloop.bus.types.table.FIXED` first."""
        fixed = dict(zip(FIXED, (self.step, self.time, self.rank, self.attempt), strict=True))
        for row in self.rows:
            yield {**fixed, **dict(zip(self.columns, row, strict=True))}


def _as_cell(value: Any) -> Any:
    if type(value) is list:
        return [_as_cell(one) for one in value]
    if type(value) in _SINGLE or (type(value) is dict and [*value] == ["image"] and isinstance(value["image"], str)):
        return value
    return plain(value) if isinstance(value, bytes) else json_text(value)
