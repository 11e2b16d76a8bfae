"""Rows of tables in their form on the wire, within limits."""

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.frames import MAX_DEPTH, as_utf8, check_plain
from offloop.bus.types.image import Image
from offloop.bus.types.table import FIXED

MAX_ROW = 1 << 20
MAX_STEP = 32 << 20
MAX_SECOND = 16 << 20
MAX_COLUMNS = 200
_PART = 2 << 20  # bytes of rows in an event
_PART_CONTAINERS = 1 << 15  # lists and maps in it
_MOST_IMAGES = 10_000
_MOST_LEVELS = MAX_DEPTH - 2  # of lists in a cell: a row is in a list of the event's fields
_SMALLEST, _LARGEST = -(1 << 63), (1 << 64) - 1

Rows: TypeAlias = Iterable[Mapping[str, Any] | Sequence[Any]]


class TableRows:
    """The rows of one publisher's tables: packs them, and leaves out those beyond the limits.

    Without ``has_rate`` only the size of a row is limited."""

    def __init__(self, has_rate: bool = True) -> None:
        self._has_rate = has_rate
        self.refused: str | None = None
        """Number of rows that the last call left out, and the limit."""
        self._step = -1
        self._in_step = 0
        self._allowance = float(MAX_SECOND)
        self._filled_at = 0.0
        self._images: dict[bytes, None] = {}

    def pack(
        self, name: str, rows: Rows, columns: Sequence[str] | None, step: int, room: int
    ) -> Iterator[dict[str, Any]]:
        """Yield the fields of events. Raises ConfigurationError for malformed rows."""
        self.refused = None
        now = time.monotonic()
        self._allowance = min(MAX_SECOND, self._allowance + (now - self._filled_at) * MAX_SECOND)
        self._filled_at = now
        if step != self._step:
            self._step, self._in_step = step, 0
        names, all_cells = _as_cells(name, rows, columns)
        left_out: dict[str, int] = {}
        packed: list[Any] = []
        images: dict[str, Any] = {}
        size = containers = 0
        for cells in all_cells:
            own_images: dict[bytes, Any] = {}
            row = [_as_cell(name, column, cell, own_images) for column, cell in zip(names, cells, strict=True)]
            lists = check_plain(row, _MOST_LEVELS)
            new = {key: image for key, image in own_images.items() if key not in self._images}
            data = msgspec.msgpack.encode(row)
            length = len(data) + sum(len(image[-1]) for image in new.values())
            limit = self._limit_passed(length, room)
            if limit is not None:
                left_out[limit] = left_out.get(limit, 0) + 1
                continue
            if packed and (size + length > _PART or containers + lists > _PART_CONTAINERS):
                yield _fields(step, names, packed, images, {})
                packed, images, size, containers = [], {}, 0, 0
            packed.append(msgspec.Raw(data))
            for key, image in new.items():
                images[key.hex()] = image
                self._images[key] = None
                if len(self._images) > _MOST_IMAGES:
                    del self._images[next(iter(self._images))]
            size, containers, room = size + length, containers + lists, room - length
            self._in_step += length
            self._allowance -= length
        if packed or left_out:
            yield _fields(step, names, packed, images, left_out)
        if left_out:
            self.refused = ", ".join(
                f"{number} rows are over the limit of {limit}" for limit, number in left_out.items()
            )

    def _limit_passed(self, length: int, room: int) -> str | None:
        if length > MAX_ROW:
            return f"{MAX_ROW:,} bytes a row"
        if not self._has_rate:
            return None
        if self._in_step + length > MAX_STEP:
            return f"{MAX_STEP:,} bytes a step"
        if length > self._allowance:
            return f"{MAX_SECOND:,} bytes a second"
        return "half of the send buffer" if length > room else None


def _fields(
    step: int, names: list[str], rows: list[Any], images: dict[str, Any], left_out: dict[str, int]
) -> dict[str, Any]:
    more = {name: value for name, value in (("images", images), ("left_out", left_out)) if value}
    return {"step": step, "columns": names, "rows": rows, **more}


def _as_cells(name: str, rows: Rows, columns: Sequence[str] | None) -> tuple[list[str], list[Sequence[Any]]]:
    given = list(rows)
    if columns is None:
        if not all(isinstance(row, Mapping) for row in given):
            raise ConfigurationError(f"table {name!r} has rows that are lists, without columns: give columns=")
        # In the order of their first use.
        columns = list(dict.fromkeys(column for row in given for column in row))
    names = [as_utf8(column) if isinstance(column, str) else str(column) for column in columns]
    names = [f"{column}_" if column in FIXED else column for column in names]
    if len(names) > MAX_COLUMNS or len(set(names)) < len(names) or any(len(column) > 200 for column in names):
        raise ConfigurationError(
            f"table {name!r} has {len(names)} columns: use at most {MAX_COLUMNS}, with different names of at most 200 "
            "characters"
        )
    cells: list[Sequence[Any]] = []
    for row in given:
        if isinstance(row, Mapping):
            if unknown := row.keys() - set(columns):
                raise ConfigurationError(
                    f"a row of table {name!r} has the column {min(map(str, unknown))!r}, not in {names}"
                )
            cells.append([row.get(column) for column in columns])
        elif isinstance(row, str | bytes) or not isinstance(row, Sequence) or len(row) != len(names):
            raise ConfigurationError(
                f"a row of table {name!r} does not have a cell for each of its {len(names)} columns"
            )
        else:
            cells.append(row)
    return names, cells


def _as_cell(table: str, column: str, value: Any, images: dict[bytes, Any], levels: int = _MOST_LEVELS) -> Any:
    kind = type(value)
    if kind is str:
        return as_utf8(value)
    if value is None or kind is float or kind is bool or (kind is int and _SMALLEST <= value <= _LARGEST):
        return value
    if isinstance(value, Image):
        content = value.content
        key = hashlib.blake2b(repr(content[:-1]).encode() + content[-1], digest_size=16).digest()
        images[key] = content
        return {"image": key.hex()}
    if isinstance(value, list | tuple):
        if levels == 0:
            raise ConfigurationError(
                f"column {column!r} of table {table!r} has lists in more than {_MOST_LEVELS} levels: log it as text"
            )
        return [_as_cell(table, column, one, images, levels - 1) for one in value]
    if getattr(value, "is_cuda", False):
        raise ConfigurationError(
            f"column {column!r} of table {table!r} is on a GPU: log value.cpu(), which waits for it"
        )
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return _as_cell(table, column, getattr(value, method)(), images, levels)
    if isinstance(value, str | int | float):
        return _as_cell(table, column, str(value) if isinstance(value, str) else float(value), images)
    raise ConfigurationError(
        f"column {column!r} of table {table!r} has a value of type {kind.__name__}: use numbers, texts, None, lists of "
        "these, or offloop.Image"
    )
