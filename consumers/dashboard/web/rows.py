"""The rows of the table of all runs as a browser is sent them: of runs, and of the heads of groups."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from offloop.bus.errors import ConfigurationError
from offloop.bus.index.entry import RunEntry
from offloop.bus.printing import one_line
from offloop.consumers.dashboard.view.grouping import NUMBERS, Group, group
from offloop.consumers.dashboard.view.progress import duration
from offloop.consumers.dashboard.view.run_table import (
    OF_EVERY_RUN,
    Chosen,
    Column,
    RunTable,
    plain_text,
    progress_of,
    reached_text,
)
from offloop.consumers.dashboard.web.frames import text_in
from offloop.consumers.dashboard.web.units import Scale, scale_of, value_text

_MOST_TOGGLED = 1000


@dataclass(frozen=True)
class CompareLook:
    """How a browser has runs compared in the table."""

    group: str = ""
    """The column by which they are grouped."""
    folded: bool = False
    """Whether groups are closed, except for those in ``toggled``; else these are the closed ones."""
    toggled: frozenset[str] = frozenset()
    baseline: str = ""
    """The run that others are compared with."""

    @classmethod
    def from_browser(cls, told: Any) -> "CompareLook":
        """Reads what the browser told; what is not in its form is left out."""
        if not isinstance(told, dict):
            return cls()
        toggled = told.get("toggled")
        return cls(
            text_in(told.get("group")),
            told.get("folded") is True,
            frozenset(map(text_in, toggled[:_MOST_TOGGLED] if isinstance(toggled, list) else ())),
            text_in(told.get("baseline")),
        )


NOTHING_COMPARED = CompareLook()


class Rows:
    """The rows of some runs: one of each, or, where they are grouped, a head for each group and the runs of those that
    are open."""

    def __init__(
        self,
        table: RunTable,
        chosen: Chosen,
        look: CompareLook,
        order: str,
        is_elsewhere: Callable[[str], bool] = lambda run: False,
    ) -> None:
        self._chosen = chosen
        self._look = look
        self._is_elsewhere = is_elsewhere
        self._base = table.entries.get(look.baseline)
        by, ordered = _column(table, look.group), _column(table, order.removeprefix("-"))
        self._groups = None if by is None else group(chosen, by, ordered, order.startswith("-"))
        self.count = (
            len(chosen.entries) if self._groups is None else sum(1 + len(self._shown(one)) for one in self._groups)
        )
        """How many there are."""

    @property
    def baseline(self) -> dict[str, Any] | None:
        """The run that others are compared with, and whether it is there."""
        if not self._look.baseline:
            return None
        return {"label": one_line(self._look.baseline), "isThere": self._base is not None}

    def members(self, text: str) -> Sequence[RunEntry]:
        """The runs of a group."""
        return next((one.entries for one in self._groups or () if one.text == text), [])

    def sent(self, first: int, count: int, columns: Sequence[Column]) -> list[dict[str, Any]]:
        """So many rows, as a browser is sent them."""
        found: list[dict[str, Any]] = []
        for one in self._window(first, count):
            found.append(self._head(one, columns) if isinstance(one, Group) else self._row(one, columns))
        return found

    def _window(self, first: int, count: int) -> Sequence[Group | RunEntry]:
        if self._groups is None:
            return self._chosen.entries[first : first + count]
        found: list[Group | RunEntry] = []
        for one in self._groups:
            if len(found) >= count:
                break
            shown = self._shown(one)
            if first < 1 + len(shown):
                lines: list[Group | RunEntry] = [one, *shown]
                found.extend(lines[first : first + count - len(found)])
            first = max(first - 1 - len(shown), 0)
        return found

    def _shown(self, one: Group) -> Sequence[RunEntry]:
        return () if self._is_closed(one) else one.entries

    def _is_closed(self, one: Group) -> bool:
        return self._look.folded != (one.text in self._look.toggled)

    def _head(self, one: Group, columns: Sequence[Column]) -> dict[str, Any]:
        return {
            "group": one.text,
            "count": len(one.entries),
            "isClosed": self._is_closed(one),
            "cells": [_head_cell(one, column) for column in columns],
        }

    def _row(self, entry: RunEntry, columns: Sequence[Column]) -> dict[str, Any]:
        return {
            "run": key_of(entry.run),
            "label": one_line(entry.run),
            "name": one_line(entry.run.rpartition("/")[2]),
            "isElsewhere": self._is_elsewhere(entry.run),
            "isBaseline": entry is self._base,
            "status": one_line(entry.status),
            "why": one_line(entry.error or entry.reason or entry.problem or ""),
            "pinned": entry.pinned,
            "archived": entry.archived,
            "tags": list(entry.tags),
            "note": entry.note,
            "cells": [_cell(entry, column, self._chosen, self._base) for column in columns],
        }


def _column(table: RunTable, name: str) -> Column | None:
    try:
        return table.column(name) if name else None
    except ConfigurationError:
        return None


def _head_cell(one: Group, column: Column) -> Any:
    """What the runs of a group have in a column: the mean and the range of numbers, how many have a status, or what is
    the same in all."""
    if column.kind == "status":
        counts: dict[str, int] = {}
        for entry in one.entries:
            counts[entry.status] = counts.get(entry.status, 0) + 1
        return {"text": one_line(" · ".join(f"{count:,} {status}" for status, count in counts.items()))}
    if column.kind in NUMBERS:
        spread = one.spread(column)
        if spread is None:
            return None
        text = _number_text(column, one.entries[0])
        low, high = text(spread.low), text(spread.high)
        return {"text": text(spread.mean), "range": None if low == high else f"{low} to {high}"}
    return {"text": one.shared_text(column)} if column.kind == "text" else None


def _number_text(column: Column, entry: RunEntry) -> Callable[[float], str]:
    if column.name == "duration":
        return duration
    if column.kind == "progress":
        return lambda value: f"batch {value_text(value)}"
    scale: Scale = () if column.metric is None else scale_of(column.metric, entry.hyperparameters)
    if column.name == "size":
        scale = scale_of("size_bytes", {})
    return lambda value: value_text(value, scale)


def _cell(entry: RunEntry, column: Column, chosen: Chosen, base: RunEntry | None) -> Any:
    if column.kind in ("status", "tags", "note"):
        return None
    value = column.value(entry)
    if column.kind == "time":
        return value
    if column.kind == "progress":
        return {"text": reached_text(entry), "part": progress_of(entry)}
    if column.metric is not None:
        scale = scale_of(column.metric, entry.hyperparameters)
        text = value_text(value, scale)
        if not text:
            return None
        return {"text": text, "best": chosen.best(column) == entry.run, **_difference(entry, column, base, scale)}
    if column.name == "size":
        return value_text(value, scale_of("size_bytes", {})) if value else ""
    text = plain_text(column.name, value)
    if column.name in OF_EVERY_RUN:
        return text
    differs = base is not None and column.value(base) != value
    if not differs and not isinstance(value, float):
        return text
    return {"text": value_text(value) if isinstance(value, float) else text, "whole": text, "differs": differs}


def _difference(entry: RunEntry, column: Column, base: RunEntry | None, scale: Scale) -> dict[str, str]:
    """By how much a metric is another one than that of the baseline, and whether that is better."""
    if base is None or entry is base or column.metric is None:
        return {}
    value, other = column.value(entry), column.value(base)
    if other is None or not math.isfinite(value) or not math.isfinite(other):
        return {}
    if value == other:
        return {"difference": "same"}
    sign = "+" if value > other else "\N{MINUS SIGN}"
    told = {"difference": sign + value_text(abs(value - other), scale)}
    if column.direction is not None:
        told["judged"] = "better" if (value > other) == (column.direction == "max") else "worse"
    return told


def key_of(run: str) -> str:
    """By what a browser calls a run. A name that is not UTF-8 cannot be sent there as it is."""
    try:
        run.encode()
    except UnicodeEncodeError:
        return one_line(run)
    return run
