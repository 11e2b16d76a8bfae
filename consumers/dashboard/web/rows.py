"""The rows of the table of all runs as a browser gets them: of runs, and of the heads of groups."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from offloop.bus.index.columns import Column, progress_of
from offloop.bus.index.entry import RunEntry
from offloop.bus.index.table import Chosen, Group, RunTable
from offloop.bus.printing import one_line
from offloop.bus.types.units import difference


class CompareLook(msgspec.Struct, frozen=True):
    """How a browser compares runs in the table."""

    group: str = ""
    """The column by which they are grouped."""
    folded: bool = False
    """Whether groups are closed, except for those in ``toggled``; else these are the closed ones."""
    toggled: frozenset[str] = frozenset()
    baseline: str = ""
    """The run that others are compared with."""

    def groups(self, table: RunTable, chosen: Chosen, order: str) -> list[Group] | None:
        """The groups of some runs; ``None`` where they are not grouped."""
        by = table.column_or_none(self.group)
        return None if by is None else chosen.groups(by, order, table.column_or_none(order.removeprefix("-")))

    def is_closed(self, group: Group) -> bool:
        """Whether the runs of a group are hidden."""
        return self.folded != (group.text in self.toggled)


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
        groups = look.groups(table, chosen, order)
        self._lines: Sequence[Group | RunEntry] = (
            chosen.entries
            if groups is None
            else [line for one in groups for line in (one, *(() if look.is_closed(one) else one.entries))]
        )

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def baseline(self) -> dict[str, Any] | None:
        """The run that others are compared with, and whether it exists."""
        if not self._look.baseline:
            return None
        return {"label": one_line(self._look.baseline), "isThere": self._base is not None}

    def sent(self, first: int, count: int, columns: Sequence[Column]) -> list[dict[str, Any]]:
        """Some rows, for a browser."""
        return [
            self._head(line, columns) if isinstance(line, Group) else self._row(line, columns)
            for line in self._lines[first : first + count]
        ]

    def _head(self, group: Group, columns: Sequence[Column]) -> dict[str, Any]:
        heads = [group.head(column) for column in columns]
        return {
            "group": group.text,
            "count": len(group.entries),
            "isClosed": self._look.is_closed(group),
            "cells": [{"text": text, "range": range_ or None} if text else None for text, range_ in heads],
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
            "cells": [self._cell(entry, column) for column in columns],
        }

    def _cell(self, entry: RunEntry, column: Column) -> dict[str, Any] | None:
        if column.kind in ("status", "tags", "note"):
            return None
        if column.kind == "time":
            return {"time": column.value(entry)}
        cell: dict[str, Any] = {"text": column.text(entry)}
        base = None if entry is self._base else self._base
        if column.kind == "progress":
            cell["part"] = progress_of(entry)
        elif column.metric is not None:
            cell["best"] = self._chosen.best(column) == entry.run
            value = column.value(entry)
            if base is not None and value is not None:
                apart = difference(column.direction, value, column.value(base), column.scale(entry))
                cell["difference"], cell["judged"] = apart
        elif column.is_hyperparameter:
            cell["whole"] = column.text(entry, whole=True)
            cell["differs"] = base is not None and column.value(base) != column.value(entry)
        return cell


def key_of(run: str) -> str:
    """The name of a run for a browser. One that is not UTF-8 cannot be sent as it is."""
    try:
        run.encode()
    except UnicodeEncodeError:
        return one_line(run)
    return run
