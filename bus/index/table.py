"""The table of runs that commands, pages and notebooks show."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from offloop.bus.errors import ConfigurationError
from offloop.bus.index.columns import NUMBERS, OF_RUN, REACHED, Column, Columns, ValueOf
from offloop.bus.index.entry import Mode, RunEntry, newest_first
from offloop.bus.index.filters import parse_filter, sortable
from offloop.bus.printing import one_line
from offloop.bus.types.hyperparameters import is_of_the_training
from offloop.bus.types.metrics import LOSS, goals_in

NEWEST_FIRST = "-started"  # the default order. A minus sign before a name sorts downwards

OF_EVERY_RUN = tuple(name for name in OF_RUN if name not in ("run", "id", "planned", "archived", "pinned"))
"""Columns to choose from besides hyperparameters and metrics."""

_LAST = (REACHED, "started", "duration", "tags", "note")
_LOOKED_AT = 200
_DIFFERING = 3
_METRICS = 2
_SHOWN_ELSEWHERE = ("run_name", "max_duration")  # hyperparameters that other columns show
_SIGN = re.compile(r"[=<>~]")
_EXPRESSION_WORD = re.compile(r"\b(?:and|or|not)\b|[()]", re.IGNORECASE)
_KEPT = 32


class RunTable:
    """All runs of a place at one moment; a later table replaces an earlier one."""

    def __init__(self, entries: Mapping[str, RunEntry], before: "RunTable | None" = None) -> None:
        self.entries: dict[str, RunEntry] = dict(entries)
        self.newest_first: list[RunEntry] = newest_first(self.entries.values())
        self.has_folders: bool = any("/" in run for run in self.entries)
        self.known: Columns = self._columns(before)
        self._usual: tuple[str, ...] | None = None
        self._chosen: dict[tuple[str, str, bool], Chosen] = {}
        self._orders: dict[str, list[RunEntry]] = {}
        # The best run does not depend on the order.
        self._best: dict[tuple[str, bool], dict[str, str | None]] = {}

    def _columns(self, before: "RunTable | None") -> Columns:
        if before is not None:
            known = before.known
            hyperparameters, metrics, goals = {*known.hyperparameters}, {*known.metrics}, known.goals.items()
            if all(
                entry.hyperparameters.keys() <= hyperparameters
                and entry.metrics.keys() <= metrics
                and goals_in([entry.hyperparameters]).items() <= goals
                for run, entry in self.entries.items()
                if before.entries.get(run) is not entry
            ):
                return known
        return Columns(self.entries.values())

    @property
    def usual_columns(self) -> tuple[str, ...]:
        """Names of the default columns, with hyperparameters in which new runs differ and their common metrics."""
        if self._usual is None:
            self._usual = self.usual_among(self.newest_first[:_LOOKED_AT])
        return self._usual

    def usual_among(self, entries: Sequence[RunEntry]) -> tuple[str, ...]:
        folder = ("folder",) if self.has_folders else ()
        return (*folder, "status", *differing(entries, _DIFFERING), *self._measured_by(entries), *_LAST)

    def _measured_by(self, entries: Sequence[RunEntry]) -> list[str]:
        count: Counter[str] = Counter()
        for names, runs in Counter(tuple(entry.metrics) for entry in entries).items():
            count.update({name: runs for name in names if name.startswith(("metrics/", "loss/"))})
        rare = {name for name in count if 2 * count[name] < len(entries)}
        losses = [name for name in count if name.startswith("loss/")]
        loss = min(losses, key=lambda name: (name in rare, name != LOSS, name), default=None)
        better = {name: self.known.direction(name) for name in count if name.startswith("metrics/")}
        measured = sorted(
            better,
            key=lambda name: (
                *(name in rare, better[name] is None, "/train/" in name, better[name] == "min"),
                *(-count[name], name),
            ),
        )
        best = [f"{name}.best" if better[name] else name for name in measured[:_METRICS]]
        return [*([loss] if loss else []), *best]

    def columns(self, names: Sequence[str] | None = None) -> list[Column]:
        """Return these columns, without those that no run has; by default :attr:`usual_columns`."""
        found = {}
        for name in self.usual_columns if names is None else names:
            column = self.column_or_none(name)
            if column is not None:
                found[column.name] = column
        heads = Counter(column.head for column in found.values())
        return [
            column._replace(title=column.metric or column.name) if heads[column.head] > 1 else column
            for column in found.values()
        ]

    def column(self, name: str) -> Column:
        return self.known.find(name)

    def column_or_none(self, name: str) -> Column | None:
        try:
            return self.known.find(name) if name else None
        except ConfigurationError:
            return None

    def where(self, entries: Sequence[RunEntry], expression: str) -> list[RunEntry]:
        predicate = parse_filter(expression, self.known)
        return [entry for entry in entries if predicate(entry)]

    def sort(self, entries: Sequence[RunEntry], order: str) -> list[RunEntry]:
        """Sort by a column, downwards with a minus sign: numbers before texts, runs without a value last."""
        value_of, reverse = self.column(order.removeprefix("-")).value, order.startswith("-")
        values = [sortable(value_of(entry)) for entry in entries]
        known = [(value, entry) for value, entry in zip(values, entries, strict=True) if value is not None]
        if all(isinstance(value, str) for value, _ in known):
            known = [(value.lower(), entry) for value, entry in known]
        elif not all(isinstance(value, int | float) for value, _ in known):
            known = [
                ((0, value) if isinstance(value, int | float) else (1, str(value).lower()), entry)
                for value, entry in known
            ]
        known.sort(key=itemgetter(0), reverse=reverse)
        unknown = [entry for value, entry in zip(values, entries, strict=True) if value is None]
        return [*(entry for _, entry in known), *unknown]

    def best(self, entries: Iterable[RunEntry], metric: str, mode: Mode | None = None) -> RunEntry | None:
        """Return the run with the best finite value of a metric, or ``None``. Raises ConfigurationError."""
        if mode not in (None, "min", "max"):
            raise ConfigurationError(f"mode {mode!r} is not known: use min or max")
        name = self.known.metric_names.find(metric, "no run has the metric")
        column = self.known.of_metric(name, mode or "best")
        ranked = _finite_values(entries, column.value)
        choose = min if (mode or column.direction) == "min" else max
        return choose(ranked, key=itemgetter(0), default=(None, None))[1]

    def choose(self, find: str, order: str = NEWEST_FIRST, archived: bool = False) -> "Chosen":
        """Return the runs that a filter, or words in name, tags or note, select; pinned runs first."""
        key = (find, order, archived)
        if key not in self._chosen:
            if len(self._chosen) >= _KEPT:
                self._chosen.clear()
                self._best.clear()
            self._chosen[key] = self._choose(find.strip(), order, archived)
        return self._chosen[key]

    def _choose(self, find: str, order: str, archived: bool) -> "Chosen":
        entries, error = self.newest_first, None
        best = self._best.setdefault((find, archived), {})
        if self._is_expression(find):
            archived = archived or re.search(r"\barchived\b", find) is not None
            try:
                entries = self.where(entries, find)
            except ConfigurationError as mistake:
                entries, error = [], str(mistake)
        elif words := find.lower().split():
            texts = ("\n".join((entry.run, *entry.tags, entry.note)).lower() for entry in entries)
            entries = [entry for entry, text in zip(entries, texts, strict=True) if all(word in text for word in words)]
        shown = entries if archived else [entry for entry in entries if not entry.archived]
        left_out = len(entries) - len(shown)
        if order != NEWEST_FIRST:
            requested = {entry.run for entry in shown}
            shown = [entry for entry in self._ordered(order) if entry.run in requested]
        pinned, others = [one for one in shown if one.pinned], [one for one in shown if not one.pinned]
        return Chosen(pinned + others, best, left_out, error)

    def _is_expression(self, find: str) -> bool:
        # Words may be columns too, so a text without an operator must be a filter as a whole.
        if _SIGN.search(find):
            return True
        if find not in OF_RUN and not _EXPRESSION_WORD.search(find):
            return False
        try:
            parse_filter(find, self.known)
        except ConfigurationError:
            return False
        return True

    def _ordered(self, order: str) -> list[RunEntry]:
        """Return all runs in that order; the newest first if no run has the column any more."""
        if order not in self._orders:
            try:
                found = self.sort(self.newest_first, order)
            except ConfigurationError:
                return self.newest_first
            if len(self._orders) >= _KEPT:
                self._orders.clear()
            self._orders[order] = found
        return self._orders[order]


class Chosen:
    def __init__(
        self, entries: list[RunEntry], best: dict[str, str | None], archived: int = 0, error: str | None = None
    ) -> None:
        self.entries = entries
        self.archived = archived
        self.error = error
        self._best = best
        self._groups: dict[tuple[str, str], list[Group]] = {}

    def best(self, column: Column) -> str | None:
        """Return the run with the best value in a metric's column, if runs differ there."""
        if column.direction is None:
            return None
        if column.name not in self._best:
            known = _finite_values(self.entries, column.value)
            choose = max if column.direction == "max" else min
            differs = any(value != known[0][0] for value, _ in known)
            self._best[column.name] = choose(known, key=itemgetter(0))[1].run if differs else None
        return self._best[column.name]

    def groups(self, by: Column, order: str = "", column: Column | None = None) -> "list[Group]":
        """Group by a column, sorted by means in ``column`` or by first runs, runs without a value last."""
        key = by.name, order
        if key not in self._groups:
            self._groups[key] = _grouped(self.entries, by, column, downwards=order.startswith("-"))
        return self._groups[key]


class Group:
    def __init__(self, text: str) -> None:
        self.text = text  # text of that value; empty for runs without one
        self.entries: list[RunEntry] = []
        self._heads: dict[str, tuple[str, str]] = {}

    def mean(self, column: Column) -> float | None:
        known = [value for value, _ in _finite_values(self.entries, column.value)]
        return math.fsum(known) / len(known) if known else None

    def head(self, column: Column) -> tuple[str, str]:
        """Return the mean, the counts of statuses, or the common text of a column; and the range of numbers."""
        if column.name not in self._heads:
            self._heads[column.name] = self._head(column)
        return self._heads[column.name]

    def _head(self, column: Column) -> tuple[str, str]:
        if column.kind == "status":
            counts = Counter(entry.status for entry in self.entries)
            return one_line(" · ".join(f"{count:,} {status}" for status, count in counts.items())), ""
        if column.kind in NUMBERS:
            known = [value for value, _ in _finite_values(self.entries, column.value)]
            if not known:
                return "", ""
            mean = math.fsum(known) / len(known)
            text, low, high = (column.format(value, self.entries[0]) for value in (mean, min(known), max(known)))
            return text, "" if low == high else f"{low} to {high}"
        if column.kind == "text":
            texts = {column.text(entry) for entry in self.entries}
            return (texts.pop(), "") if len(texts) == 1 else ("", "")
        return "", ""


def _grouped(entries: Iterable[RunEntry], by: Column, order: Column | None, *, downwards: bool) -> list[Group]:
    groups: dict[str, Group] = {}
    for entry in entries:
        text = by.text(entry, whole=True)
        if text not in groups:
            groups[text] = Group(text)
        groups[text].entries.append(entry)
    found = list(groups.values())
    if order is not None and order.kind in NUMBERS:
        means = {one.text: mean for one in found if (mean := one.mean(order)) is not None}
        found.sort(key=lambda one: means.get(one.text, 0.0), reverse=downwards)
        found.sort(key=lambda one: one.text not in means)
    found.sort(key=lambda one: not one.text)
    return found


def differences(entries: Sequence[RunEntry]) -> dict[str, list[Any]]:
    """Return hyperparameters in which runs differ, each with the value of every run, ``None`` where missing."""
    names = sorted({name for entry in entries for name in entry.hyperparameters})
    found = {name: [entry.hyperparameters.get(name) for entry in entries] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def differing(entries: Sequence[RunEntry], most: int) -> list[str]:
    """Return the hyperparameters of the training with several values, the most useful for comparison first."""
    values: dict[str, set[str]] = {}
    count: Counter[str] = Counter()
    for entry in entries:
        for name, value in entry.hyperparameters.items():
            if is_of_the_training(name):
                values.setdefault(name, set()).add(str(value))
                count[name] += 1
    several = [name for name, known in values.items() if len(known) > 1 and not name.endswith(_SHOWN_ELSEWHERE)]
    # The learning rate and parameters of the start say most, then those with few values; an unset seed says nothing.
    several.sort(
        key=lambda name: (
            2 * count[name] < len(entries),
            name == "seed",
            not name.endswith("/lr"),
            not name.startswith("config/"),
            len(values[name]),
            name,
        )
    )
    titles: dict[str, str] = {}
    for name in several:
        titles.setdefault(name.rpartition("/")[2], name)
    return list(titles.values())[:most]


def _finite_values(entries: Iterable[RunEntry], value_of: ValueOf) -> list[tuple[float, RunEntry]]:
    known = [(value_of(entry), entry) for entry in entries]
    return [(value, entry) for value, entry in known if type(value) in (int, float) and math.isfinite(value)]
