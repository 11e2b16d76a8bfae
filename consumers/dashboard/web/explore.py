"""What a browser is sent of all runs for a scatter plot or parallel coordinates: a column of values for each axis."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec

from offloop.bus.errors import ConfigurationError
from offloop.bus.index.columns import Column
from offloop.bus.index.entry import RunEntry
from offloop.bus.index.table import RunTable, differing
from offloop.bus.printing import one_line
from offloop.bus.types.hyperparameters import value_text
from offloop.bus.types.units import Scale, scale_of

MOST_RUNS = 10_000  # limit of drawn runs

NO_COLOR = "-"  # in place of a column: nothing is coloured

OTHERS = "(others)"  # in place of texts beyond the limit

_USUAL_AXES = 7
_MOST_AXES = 16
_MOST_TEXTS = 50
_FEW_TEXTS = 12
_LONGEST_TEXT = 60
_LOOKED_AT = 500


class ExploreLook(msgspec.Struct, frozen=True):
    view: Literal["scatter", "parallel"] = "scatter"
    x: str = ""
    y: str = ""
    color: str = ""
    axes: tuple[str, ...] | None = None


def explored(
    table: RunTable, found: Sequence[RunEntry], look: ExploreLook, key: Callable[[str], str]
) -> dict[str, Any]:
    entries = found[:MOST_RUNS]
    problems: list[str] = []

    def find(name: str) -> Column | None:
        try:
            return table.column(name) if name else None
        except ConfigurationError as error:
            problems.append(one_line(str(error)))
            return None

    metrics = [name for name in table.usual_columns if table.column(name).metric is not None]
    best = (name for name in metrics if name.endswith(".best"))
    y = find(look.y) or find(next(best, next(iter(metrics), "")))
    usual = _usual_axes(table, entries)
    x = color = None
    axes: Iterable[Column | None] = ()
    if look.view == "scatter":
        numbers = (one for one in usual if one.kind == "number" and not one.name.endswith("seed"))
        x = find(look.x) or next(iter((*numbers, *usual)), None) or find("started")
        if look.color != NO_COLOR:
            color = find(look.color) or next((one for one in usual if x is None or one.name != x.name), None)
    else:
        axes = usual if look.axes is None else map(find, look.axes[:_MOST_AXES])
    beside = {one.name: one for one in axes if one is not None and (y is None or one.name != y.name)}
    columns = {one.name: one for one in (x, y, color, *beside.values()) if one is not None}
    return {
        "view": look.view,
        "found": len(found),
        **{role: "" if one is None else one.name for role, one in (("x", x), ("y", y), ("color", color))},
        "axes": list(beside),
        "problem": "; ".join(problems),
        "runs": [key(entry.run) for entry in entries],
        "columns": [_sent_column(column, entries) for column in columns.values()],
    }


def _usual_axes(table: RunTable, entries: Sequence[RunEntry]) -> list[Column]:
    some = entries[:: max(math.ceil(len(entries) / _LOOKED_AT), 1)]
    columns = [table.column(name) for name in differing(some, 2 * _USUAL_AXES)]
    return [column for column in columns if _is_comparable([column.value(entry) for entry in some])][:_USUAL_AXES]


def _is_comparable(values: Sequence[Any]) -> bool:
    return all(value is None or _is_number(value) for value in values) or len({*map(str, values)}) <= _FEW_TEXTS


def _sent_column(column: Column, entries: Sequence[RunEntry]) -> dict[str, Any]:
    sent: dict[str, Any] = {
        "name": column.name,
        "title": one_line(f"{column.which} {column.title}" if column.which else column.title),
        "scale": _scale(column, entries),
        "metric": column.metric is not None,
    }
    known = [_single(column.value(entry)) for entry in entries]
    if all(value is None or _is_number(value) for value in known):
        is_time = column.kind == "time"
        values = [None if value is None else _finite(1000 * value if is_time else value) for value in known]
        return {**sent, "kind": "time" if is_time else "number", "values": values}
    texts = [None if value is None else one_line(value_text(value)[:_LONGEST_TEXT]) for value in known]
    count = Counter(text for text in texts if text is not None)
    names = sorted(text for text, _ in count.most_common(_MOST_TEXTS))
    places = {name: place for place, name in enumerate(names)}
    found = [None if text is None else places.get(text, len(names)) for text in texts]
    return {**sent, "kind": "text", "texts": [*names, *[OTHERS] * (len(count) > len(names))], "values": found}


def _scale(column: Column, entries: Sequence[RunEntry]) -> Scale:
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
