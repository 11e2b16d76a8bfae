"""The table of all runs of a folder: which of them it has, in which order, and what its cells say."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from offloop.bus.errors import ConfigurationError
from offloop.bus.index.entry import RunEntry, newest_first
from offloop.bus.index.query import OF_RUN, Columns, sort, where
from offloop.bus.printing import one_line
from offloop.bus.types.hyperparameters import is_of_the_training
from offloop.bus.types.hyperparameters import value_text as hyperparameter_text
from offloop.bus.types.metrics import LOSS, Mode, goals_in
from offloop.bus.types.time import Time, TimeUnit
from offloop.consumers.dashboard.view.progress import duration

NEWEST_FIRST = "-started"
"""The usual order. A name with a minus sign in front is sorted downwards."""

REACHED = "reached"
"""The column that says how far a run is; it is sorted by batches."""

OF_EVERY_RUN = (REACHED, *(name for name in OF_RUN if name not in ("run", "id", "planned", "archived", "pinned")))
"""Columns that need neither a hyperparameter nor a metric."""

_TIMES = (REACHED, "started", "duration")
_ANNOTATED = ("tags", "note")
_LOOKED_AT = 200
_DIFFERING = 3
_METRICS = 2
_LONGEST = 300
_SAID_ELSEWHERE = ("run_name", "max_duration")
"""Hyperparameters that other columns show already."""
_SHORT_NAME = 18
_SIGN = re.compile(r"[=<>~]")
_EXPRESSION_WORD = re.compile(r"\b(?:and|or|not)\b|[()]", re.IGNORECASE)
_DOWNWARDS_FIRST = ("started", "ended", "duration", REACHED, "size", "epoch", "batch", "sample", "pinned", "attempts")

Kind: TypeAlias = Literal["text", "number", "time", "status", "progress", "tags", "note"]


class Column(NamedTuple):
    """A column of the table."""

    name: str
    """By which it is sorted and found in a filter."""
    title: str
    """Short, for its head."""
    which: str
    """Of a metric's values ``best``, ``min`` or ``max``; empty for the last one, and for what is no metric."""
    kind: Kind
    downwards: bool
    """Whether people want to see its greatest values first."""
    metric: str | None
    """The metric that it is of."""
    direction: Mode | None
    """Which of the metric's values are better; ``None`` where none are."""
    value: Callable[[RunEntry], Any]


class RunTable:
    """All runs of a folder as they stand at one moment. It does not change: a later one takes its place."""

    def __init__(self, entries: Mapping[str, RunEntry], before: "RunTable | None" = None) -> None:
        self.entries = dict(entries)
        self.archived = sum(entry.archived for entry in self.entries.values())
        """How many are archived."""
        self.names = self._names(before)
        """What the columns can be."""
        self._chosen: dict[tuple[str, str, bool], Chosen] = {}
        self._orders: dict[str, list[RunEntry]] = {}
        self._best: dict[tuple[str, bool], dict[str, str | None]] = {}
        """The best of the runs that are found, in whichever order."""
        self._usual: tuple[str, ...] | None = None
        self.has_folders = any("/" in run for run in self.entries)
        """Whether they are of several places."""
        self._newest_first = newest_first(self.entries.values())

    def _names(self, before: "RunTable | None") -> Columns:
        if before is not None:
            known, hyperparameters, metrics = before.entries, {*before.names.hyperparameters}, {*before.names.metrics}
            goals = before.names.goals
            if all(
                entry.hyperparameters.keys() <= hyperparameters
                and entry.metrics.keys() <= metrics
                and goals_in([entry.hyperparameters]).items() <= goals.items()
                for run, entry in self.entries.items()
                if known.get(run) is not entry
            ):
                return before.names
        return Columns(self.entries.values())

    @property
    def usual_columns(self) -> tuple[str, ...]:
        """The columns that are shown unless others are chosen: among them the hyperparameters in which the newest runs
        differ, and what they are measured by; first those that most of them have."""
        if self._usual is None:
            newest = self._newest_first[:_LOOKED_AT]
            folder = ("folder",) if self.has_folders else ()
            self._usual = (
                *folder,
                "status",
                *differing(newest, _DIFFERING),
                *self._metrics_of(newest),
                *_TIMES,
                *_ANNOTATED,
            )
        return self._usual

    def _metrics_of(self, entries: Sequence[RunEntry]) -> list[str]:
        """The loss, and metrics that most runs have, by their best values where they have such."""
        count: dict[str, int] = {}
        for entry in entries:
            for name in entry.metrics:
                if name.startswith(("metrics/", "loss/")):
                    count[name] = count.get(name, 0) + 1
        losses = [name for name in count if name.startswith("loss/")]
        rare = {name for name in count if 2 * count[name] < len(entries)}
        loss = min(losses, key=lambda name: (name in rare, name != LOSS, name), default=None)
        better = {name: self.names.direction(name) for name in count if name.startswith("metrics/")}
        measured = sorted(
            better,
            key=lambda name: (
                *(name in rare, better[name] is None, "/train/" in name, better[name] == "min"),
                *(-count[name], name),
            ),
        )
        return [
            *([loss] if loss else []),
            *(f"{name}.best" if better[name] else name for name in measured[:_METRICS]),
        ]

    def columns(self, names: Sequence[str] | None) -> list[Column]:
        """These columns, without those that no run has; by default :attr:`usual_columns`."""
        found = {}
        for name in self.usual_columns if names is None else names:
            try:
                column = self.column(name)
            except ConfigurationError:
                continue
            found[column.name] = column
        titles = [column.title for column in found.values()]
        return [
            column._replace(title=column.metric or column.name) if titles.count(column.title) > 1 else column
            for column in found.values()
        ]

    def column(self, name: str) -> Column:
        """The column of that name.

        Raises:
            ConfigurationError: there is none, or there are several.
        """
        if name == REACHED:
            return Column(REACHED, REACHED, "", "progress", True, None, None, lambda entry: entry.batch)
        whole, value = self.names.find(name)
        if whole in OF_RUN:
            title = "name" if whole == "run" else whole
            return Column(whole, title, "", _KINDS.get(whole, "text"), whole in _DOWNWARDS_FIRST, None, None, value)
        if whole in self.names.hyperparameters:
            kind: Kind = "number" if self._has_numbers(value) else "text"
            return Column(whole, _title(whole), "", kind, False, None, None, value)
        metric, which = whole, ""
        if whole not in self.names.metrics:
            metric, _, which = whole.rpartition(".")
        direction = self.names.direction(metric)
        title = self.names.metric_names.short(metric)
        return Column(whole, title, which, "number", direction != "min", metric, direction, value)

    def _has_numbers(self, value: Callable[[RunEntry], Any]) -> bool:
        known = (value(entry) for entry in self._newest_first[:_LOOKED_AT])
        first = next((one for one in known if one is not None), None)
        return isinstance(first, int | float) and not isinstance(first, bool)

    def choose(self, find: str, order: str = NEWEST_FIRST, archived: bool = False) -> "Chosen":
        """The runs that are asked for: those that a filter is true of, see :func:`offloop.bus.index.query.where`, or
        that have some words in their names, tags or notes; in that order, but pinned ones first, and archived ones only
        when they are asked for."""
        key = (find, order, archived)
        found = self._chosen.get(key)
        if found is None:
            if len(self._chosen) >= _KEPT:
                self._chosen.clear()
                self._best.clear()
            found = self._chosen[key] = self._choose(find.strip(), order, archived)
        return found

    def _choose(self, find: str, order: str, archived: bool) -> "Chosen":
        entries = self._newest_first
        best = self._best.setdefault((find, archived), {})
        error = None
        if find:
            if is_expression(find, self.names):
                archived = archived or re.search(r"\barchived\b", find) is not None
                try:
                    entries = where(entries, find, self.names)
                except ConfigurationError as mistake:
                    error = str(mistake)
                    entries = []
            else:
                entries = _with_words(entries, find)
        left_out = 0
        if not archived:
            shown = [entry for entry in entries if not entry.archived]
            left_out, entries = len(entries) - len(shown), shown
        if order != NEWEST_FIRST:
            requested = {entry.run for entry in entries}
            entries = [entry for entry in self._ordered(order) if entry.run in requested]
        return Chosen(
            [entry for entry in entries if entry.pinned] + [e for e in entries if not e.pinned], left_out, error, best
        )

    def _ordered(self, order: str) -> list[RunEntry]:
        """All runs in that order; by time where nobody has such a column any more."""
        if order not in self._orders:
            name = order.removeprefix("-")
            column = "batch" if name == REACHED else name
            try:
                found = sort(self._newest_first, column, reverse=order.startswith("-"), columns=self.names)
            except ConfigurationError:
                return self._newest_first
            if len(self._orders) >= _KEPT:
                self._orders.clear()
            self._orders[order] = found
        return self._orders[order]


_KEPT = 32
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("started", "ended"), "time"),
    **dict.fromkeys(("duration", "size", "attempts", "epoch", "batch", "sample", "checkpoints"), "number"),
    "status": "status",
    "tags": "tags",
    "note": "note",
}


class Chosen:
    """Some of all runs, in an order."""

    def __init__(
        self,
        entries: list[RunEntry],
        archived: int = 0,
        error: str | None = None,
        best: dict[str, str | None] | None = None,
    ) -> None:
        self.entries = entries
        self.archived = archived
        """So many others are not shown because they are archived."""
        self.error = error
        """What is wrong with the filter, in words."""
        self.kept: dict[object, Any] = {}
        """What was made of these runs, by what it is."""
        self._best = {} if best is None else best

    def best(self, column: Column) -> str | None:
        """The run with the best value in a metric's column, if there are runs to compare it with."""
        if column.direction is None:
            return None
        if column.name not in self._best:
            value_of, is_finite = column.value, math.isfinite
            known = [
                (value, entry.run)
                for entry in self.entries
                if (value := value_of(entry)) is not None and is_finite(value)
            ]
            choose = max if column.direction == "max" else min
            differs = any(value != known[0][0] for value, _ in known)
            self._best[column.name] = choose(known, key=lambda one: one[0])[1] if differs else None
        return self._best[column.name]


def is_expression(find: str, columns: Columns) -> bool:
    """Whether a text is a filter, and not words to look for: it has a sign such as ``>``, or is what every run has such
    as ``pinned``, or combines such names."""
    if _SIGN.search(find):
        return True
    if find not in OF_RUN and not _EXPRESSION_WORD.search(find):
        return False
    try:
        where([], find, columns)
    except ConfigurationError:
        return False
    return True


def reached_text(entry: RunEntry) -> str:
    """How far a run is: ``epoch 3 of 10``, ``batch 1,200``."""
    if entry.batch is None:
        return ""
    planned = _planned(entry)
    unit = TimeUnit.BATCH if planned is None else planned.unit
    counts = {TimeUnit.EPOCH: entry.epoch, TimeUnit.BATCH: entry.batch, TimeUnit.SAMPLE: entry.sample}
    count = counts.get(unit)
    if count is None:
        return f"batch {entry.batch:,}"
    return f"{unit.name.lower()} {count:,}" + ("" if planned is None else f" of {planned.value:,}")


def progress_of(entry: RunEntry) -> float | None:
    """Which part of a run that goes on is done, from 0 to 1; ``None`` where nobody knows."""
    planned = _planned(entry)
    if planned is None or not entry.is_going_on:
        return None
    counts = {TimeUnit.EPOCH: entry.epoch, TimeUnit.BATCH: entry.batch, TimeUnit.SAMPLE: entry.sample}
    count = counts.get(planned.unit)
    return None if count is None or not planned.value else min(count / planned.value, 1.0)


def plain_text(name: str, value: Any) -> str:
    """What a cell says of something that every run has, or of a hyperparameter."""
    if value is None or value == () or value == "":
        return ""
    if name == "duration":
        return duration(value)
    if name == "checkpoints":
        return f"{len(value):,}"
    if isinstance(value, bool) and name in OF_RUN:
        return "yes" if value else ""
    if isinstance(value, int) and name in OF_RUN:
        return f"{value:,}"
    return one_line(hyperparameter_text(value)[:_LONGEST])


def _planned(entry: RunEntry) -> Time | None:
    try:
        return None if entry.planned is None else Time.from_timestring(entry.planned)
    except (ValueError, ConfigurationError):
        return None


def _with_words(entries: Sequence[RunEntry], find: str) -> list[RunEntry]:
    words = find.lower().split()
    return [entry for entry in entries if _has_words(entry, words)]


def _has_words(entry: RunEntry, words: Sequence[str]) -> bool:
    text = "\n".join((entry.run, *entry.tags, entry.note)).lower()
    return all(word in text for word in words)


def differing(entries: Sequence[RunEntry], most: int) -> list[str]:
    """The hyperparameters of which there are several values; first those that half of the runs have, and that people
    compare runs by."""
    values: dict[str, set[str]] = {}
    count: dict[str, int] = {}
    for entry in entries:
        for name, value in entry.hyperparameters.items():
            if is_of_the_training(name):
                values.setdefault(name, set()).add(str(value))
                count[name] = count.get(name, 0) + 1
    several = [name for name, known in values.items() if len(known) > 1 and not name.endswith(_SAID_ELSEWHERE)]
    # What it was started with says most; then what has few values, of which runs are compared.
    several.sort(
        key=lambda name: (2 * count[name] < len(entries), not name.startswith("config/"), len(values[name]), name)
    )
    titles: dict[str, str] = {}
    for name in several:
        titles.setdefault(name.rpartition("/")[2], name)
    return list(titles.values())[:most]


def _title(hyperparameter: str) -> str:
    name = hyperparameter.removeprefix("config/")
    return name if len(name) <= _SHORT_NAME else name.rpartition("/")[2]
