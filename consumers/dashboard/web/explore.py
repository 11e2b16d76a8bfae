"""What a browser is sent of all runs for a scatter plot or parallel coordinates: a column of values for each axis."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from offloop.bus.errors import ConfigurationError
from offloop.bus.index.columns import Column
from offloop.bus.index.entry import RunEntry
from offloop.bus.index.table import RunTable, differing
from offloop.bus.printing import one_line
from offloop.bus.types.hyperparameters import value_text
from offloop.bus.types.units import scale_of

MOST_RUNS = 10_000
"""So many runs are drawn."""

NO_COLOR = "-"
"""In the place of a column: nothing is coloured by one."""

OTHERS = "(others)"
"""In the place of texts that are too many."""

_PREFIX = "explored"
_USUAL_AXES = 7
_MOST_AXES = 16
_MOST_TEXTS = 50
_FEW_TEXTS = 12
_LONGEST_TEXT = 60
_LOOKED_AT = 500


class ExploreLook(msgspec.Struct, frozen=True):
    """View of a browser beside the table. A column without a name is the usual one."""

    view: Literal["table", "scatter", "parallel"] = "table"
    x: str = ""
    y: str = ""
    color: str = ""
    axes: tuple[str, ...] | None = None


TABLE = ExploreLook()
"""Nothing of all this: the table."""


def explored(
    table: RunTable, found: Sequence[RunEntry], look: ExploreLook, key: Callable[[str], str]
) -> dict[str, Any]:
    """What a browser is sent for that view of the runs that are found, by keys that begin with ``explored``; nothing
    for the table. ``key`` gives by what a browser calls a run.

    The values of each column have a key of their own, so that only those that have changed are sent."""
    if look.view == "table":
        return {}
    entries = found[:MOST_RUNS]
    chosen = _Axes(table, entries, look)
    columns = {column.name: column for column in chosen.all}
    about = {
        "view": look.view,
        "found": len(found),
        "x": _name(chosen.x),
        "y": _name(chosen.y),
        "color": _name(chosen.color),
        "axes": [column.name for column in chosen.axes],
        "columns": list(columns),
        "problem": "; ".join(chosen.problems),
    }
    values = {f"{_PREFIX}:{name}": _sent_column(column, entries) for name, column in columns.items()}
    return {_PREFIX: about, f"{_PREFIX}Runs": [key(entry.run) for entry in entries], **values}


def forget_others(shown: dict[str, Any], frame: Mapping[str, Any]) -> None:
    """Takes out of what a browser was sent the columns that it forgets with this frame, because they are in it no
    more."""
    for name in [name for name in shown if name.startswith(_PREFIX) and name not in frame]:
        del shown[name]


class _Axes:
    """The columns that are shown: those that are asked for, or else the usual ones."""

    def __init__(self, table: RunTable, entries: Sequence[RunEntry], look: ExploreLook) -> None:
        self._table = table
        self.problems: list[str] = []
        self.y = self._find(look.y) or self._find(_usual_metric(table))
        usual = _usual_axes(table, entries)
        self.x = self.color = None
        self.axes: list[Column] = []
        if look.view == "scatter":
            numbers = (one for one in usual if one.kind == "number" and not one.name.endswith("seed"))
            self.x = self._find(look.x) or next(iter((*numbers, *usual)), None) or self._find("started")
            if look.color != NO_COLOR:
                self.color = self._find(look.color) or next((one for one in usual if one.name != _name(self.x)), None)
        elif look.axes is None:
            self.axes = usual
        else:
            self.axes = [column for name in look.axes[:_MOST_AXES] if (column := self._find(name))]
        self.axes = [column for column in {one.name: one for one in self.axes}.values() if column.name != _name(self.y)]
        self.all = [column for column in (self.x, self.y, self.color, *self.axes) if column is not None]

    def _find(self, name: str) -> Column | None:
        if not name:
            return None
        try:
            return self._table.column(name)
        except ConfigurationError as error:
            self.problems.append(one_line(str(error)))
            return None


def _usual_metric(table: RunTable) -> str:
    metrics = [column for name in table.usual_columns if (column := table.column(name)).metric is not None]
    names = [column.name for column in metrics]
    return next((name for name in names if name.endswith(".best")), next(iter(names), ""))


def _usual_axes(table: RunTable, entries: Sequence[RunEntry]) -> list[Column]:
    some = _some(entries)
    columns = [table.column(name) for name in differing(some, 2 * _USUAL_AXES)]
    return [column for column in columns if _is_comparable(column, some)][:_USUAL_AXES]


def _is_comparable(column: Column, entries: Sequence[RunEntry]) -> bool:
    known = [column.value(entry) for entry in entries]
    return all(_is_number(value) for value in known if value is not None) or len({*map(str, known)}) <= _FEW_TEXTS


def _some(entries: Sequence[RunEntry]) -> Sequence[RunEntry]:
    return entries[:: max(math.ceil(len(entries) / _LOOKED_AT), 1)]


def _sent_column(column: Column, entries: Sequence[RunEntry]) -> dict[str, Any]:
    sent: dict[str, Any] = {
        "name": column.name,
        "title": one_line(f"{column.which} {column.title}" if column.which else column.title),
        "hint": one_line(column.name),
        "scale": _scale(column, entries),
        "metric": column.metric is not None,
    }
    known = [_single(column.value(entry)) for entry in entries]
    if all(value is None or _is_number(value) for value in known):
        is_time = column.kind == "time"
        values = [None if value is None else _finite(1000 * value if is_time else value) for value in known]
        return {**sent, "kind": "time" if is_time else "number", "values": values}
    texts = [None if value is None else one_line(value_text(value)[:_LONGEST_TEXT]) for value in known]
    count: dict[str, int] = {}
    for text in texts:
        if text is not None:
            count[text] = count.get(text, 0) + 1
    kept = sorted(count, key=lambda text: -count[text])[:_MOST_TEXTS]
    names = [*sorted(kept), *([OTHERS] if len(count) > len(kept) else [])]
    places = {name: place for place, name in enumerate(names)}
    return {
        **sent,
        "kind": "text",
        "texts": names,
        "values": [None if text is None else places.get(text, len(kept)) for text in texts],
    }


def _scale(column: Column, entries: Sequence[RunEntry]) -> Sequence[Sequence[Any]]:
    if column.metric is not None:
        return scale_of(column.metric, entries[0].hyperparameters if entries else {})
    return scale_of({"size": "size_bytes", "duration": "duration_seconds"}.get(column.name, ""), {})


def _single(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or None
    return None if value == "" else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: float) -> float | None:
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _name(column: Column | None) -> str:
    return "" if column is None else column.name
