"""Runs of the table under a head for each value of a column, with what their numbers have in common."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from offloop.bus.index.entry import RunEntry
from offloop.bus.printing import one_line
from offloop.consumers.dashboard.view.run_table import Chosen, Column, plain_text

NUMBERS = ("number", "progress")
"""Kinds of columns that have a mean."""


class Spread(NamedTuple):
    """The numbers of a column in some runs."""

    mean: float
    low: float
    high: float


class Group:
    """Runs that have the same value in a column."""

    def __init__(self, text: str) -> None:
        self.text = text
        """That value in words; empty for runs without one."""
        self.entries: list[RunEntry] = []
        self._spreads: dict[str, Spread | None] = {}
        self._texts: dict[str, str] = {}

    def spread(self, column: Column) -> Spread | None:
        """The finite numbers of a column; ``None`` where no run has one."""
        if column.name not in self._spreads:
            known = [value for entry in self.entries if _is_number(value := column.value(entry))]
            self._spreads[column.name] = (
                Spread(math.fsum(known) / len(known), min(known), max(known)) if known else None
            )
        return self._spreads[column.name]

    def shared_text(self, column: Column) -> str:
        """What a column says of all of these runs; empty where it says different things."""
        if column.name not in self._texts:
            texts = {plain_text(column.name, column.value(entry)) for entry in self.entries}
            self._texts[column.name] = texts.pop() if len(texts) == 1 else ""
        return self._texts[column.name]


def group(chosen: Chosen, by: Column, order: Column | None = None, downwards: bool = False) -> list[Group]:
    """The runs by their value in a column, in each group in their order. Groups are in the order of their means in
    ``order`` where that is a column of numbers, and else in that of their first runs; that of the runs without a value
    is the last."""
    key = "groups", by.name, order and order.name, downwards
    if key not in chosen.kept:
        chosen.kept[key] = _group(chosen.entries, by, order, downwards)
    found: list[Group] = chosen.kept[key]
    return found


def _group(entries: Sequence[RunEntry], by: Column, order: Column | None, downwards: bool) -> list[Group]:
    groups: dict[str, Group] = {}
    for entry in entries:
        text = _text(by.name, by.value(entry))
        if text not in groups:
            groups[text] = Group(text)
        groups[text].entries.append(entry)
    found = list(groups.values())
    if order is not None and order.kind in NUMBERS:
        means = {one.text: spread.mean for one in found if (spread := one.spread(order)) is not None}
        found.sort(key=lambda one: means.get(one.text, 0.0), reverse=downwards)
        found.sort(key=lambda one: one.text not in means)
    found.sort(key=lambda one: not one.text)
    return found


def _text(name: str, value: Any) -> str:
    return one_line(", ".join(map(str, value))) if name == "tags" else plain_text(name, value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
