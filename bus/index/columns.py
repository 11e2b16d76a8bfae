"""The columns of a table of runs."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias

from offloop.bus.errors import ConfigurationError, close_matches
from offloop.bus.index.entry import MetricValues, Mode, RunEntry
from offloop.bus.printing import one_line
from offloop.bus.types.hyperparameters import value_text
from offloop.bus.types.metrics import GOALS, MetricNames, direction_of, goals_in
from offloop.bus.types.time import Time, TimeUnit
from offloop.bus.types.units import BYTES, Scale, duration, lasted, number_text, scale_of, when

REACHED = "reached"  # the column of a run's progress; its value is the number of batches

OF_RUN = (
    *("run", "id", "status", "error", "reason", "started", "ended", "duration", "attempts", REACHED, "epoch", "batch"),
    *("sample", "planned", "size", "tags", "note", "pinned", "archived", "checkpoints", "folder"),
)  # columns of every run, besides hyperparameters and metrics

OF_METRIC = ("last", "min", "max", "best")  # values of a metric, after its name and a dot; last is the default

Kind: TypeAlias = Literal["text", "number", "time", "status", "progress", "tags", "note"]
ValueOf: TypeAlias = Callable[[RunEntry], Any]

NUMBERS = ("number", "progress")  # kinds of columns that have a mean

_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("started", "ended"), "time"),
    **dict.fromkeys(("duration", "size", "attempts", "epoch", "batch", "sample", "checkpoints"), "number"),
    REACHED: "progress",
    "status": "status",
    "tags": "tags",
    "note": "note",
}
_DOWNWARDS_FIRST = ("started", "ended", "duration", REACHED, "size", "epoch", "batch", "sample", "pinned", "attempts")
_OF_VALUES: dict[str, Callable[[MetricValues], float]] = {
    "last": attrgetter("last"),
    "min": attrgetter("low"),
    "max": attrgetter("high"),
}
_FORMATS: dict[str, Callable[[Any], str]] = {
    "duration": duration,
    "size": lambda value: number_text(value, BYTES),
    "checkpoints": lambda value: f"{len(value):,}" if value else "",
    "tags": lambda value: one_line(", ".join(value)),
    REACHED: lambda value: f"batch {number_text(value)}",
    **dict.fromkeys(("started", "ended"), when),
    **dict.fromkeys(("pinned", "archived"), lambda value: "yes" if value else ""),
    **dict.fromkeys(
        ("attempts", "epoch", "batch", "sample"),
        lambda value: f"{value:,}" if isinstance(value, int) else number_text(value),
    ),
}
_LOOKED_AT = 200
_LONGEST = 300
_SHORT_TITLE = 18


class Column(NamedTuple):
    name: str  # full name, for sorting and filters
    title: str  # short name, for the head
    kind: Kind
    value: ValueOf
    downwards: bool = False  # true if the greatest values are shown first
    metric: str | None = None  # full name of the metric that it shows
    which: str = ""  # best, min or max of a metric, else empty
    direction: Mode | None = None  # min or max, the better values of the metric

    @property
    def head(self) -> str:
        return f"{self.title}.{self.which}" if self.which else self.title

    @property
    def is_hyperparameter(self) -> bool:
        return self.metric is None and self.name not in OF_RUN

    def text(self, entry: RunEntry, *, whole: bool = False) -> str:
        """Return the text of a run's cell. ``whole`` hyperparameters have all digits."""
        if self.kind == "progress":
            return reached_text(entry)
        value = self.value(entry)
        return "" if value is None else self.format(value, entry, whole=whole)

    def format(self, value: Any, entry: RunEntry, *, whole: bool = False) -> str:
        """Return the text of a value, such as a mean, in the units of that run."""
        if self.metric is not None:
            return number_text(value, self.scale(entry))
        if self.name in _FORMATS:
            return _FORMATS[self.name](value)
        if isinstance(value, float) and not whole:
            return number_text(value)
        return one_line(value_text(value)[:_LONGEST])

    def scale(self, entry: RunEntry) -> Scale:
        if self.name == "size":
            return BYTES
        return () if self.metric is None else scale_of(self.metric, entry.hyperparameters)


class Columns:
    """Finds columns of some runs by name.

    A name is one of :data:`OF_RUN`, a hyperparameter (``optimizer/lr``), or a metric (``loss``, see
    :class:`offloop.bus.types.metrics.MetricNames`), optionally with a dot and one of :data:`OF_METRIC` (``loss.min``).
    A full name takes precedence over a metric's short name, and this over the unique end of a hyperparameter's name,
    which is enough (``config/lr`` before others); ``lr`` is the hyperparameter if there is one. For a run without the
    first hyperparameter, the next applies, so that ``lr`` works for different kinds of runs."""

    def __init__(self, entries: Iterable[RunEntry]) -> None:
        entries = list(entries)
        hyperparameters: dict[str, None] = {}
        metrics: dict[str, None] = {}
        for entry in entries:
            hyperparameters.update(dict.fromkeys(entry.hyperparameters))
            metrics.update(dict.fromkeys(entry.metrics))
        self.hyperparameters: tuple[str, ...] = tuple(hyperparameters)
        self.metrics: tuple[str, ...] = tuple(metrics)
        self.metric_names: MetricNames = MetricNames(metrics)
        self.goals: dict[str, Mode] = goals_in(entry.hyperparameters for entry in entries)
        self._some = entries[:_LOOKED_AT]
        self._found: dict[str, Column] = {}

    def find(self, name: str) -> Column:
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def _find(self, name: str) -> Column:
        name = "run" if name == "name" else name
        if name in OF_RUN:
            value_of = attrgetter("batch" if name == REACHED else name)
            return Column(name, name, _KINDS.get(name, "text"), value_of, name in _DOWNWARDS_FIRST)
        metric, dot, which = name.rpartition(".")
        if not dot or which not in OF_METRIC:
            metric, which = name, "last"
        named = self.metric_names.matches(metric)
        is_short = metric != "lr" and [metric] == list(map(self.metric_names.short, named))
        for hyperparameters, metrics in (
            ({name} & {*self.hyperparameters}, {metric} & {*self.metrics}),
            ((), named if is_short else ()),
            ({f"config/{name}"} & {*self.hyperparameters}, ()),
            (self._ending(name), ()),
            ((), named),
        ):
            found = sorted({*hyperparameters, *metrics})
            if len(found) > 1:
                raise ConfigurationError(self.metric_names.ambiguous(name, found), name=name)
            if hyperparameters:
                rest = self._ending(name) - {found[0], f"config/{name}"}
                return self._of_hyperparameter(found[0], f"config/{name}", *(rest if len(rest) == 1 else ()))
            if metrics:
                return self.of_metric(found[0], which)
        short = list(map(self.metric_names.short, self.metrics))
        known = [*OF_RUN, *(one.rpartition("/")[2] for one in self.hyperparameters), *short]
        raise ConfigurationError(
            f"no run has {name!r}: {close_matches(metric, known)}use one of {', '.join(OF_RUN)}, "
            f"a hyperparameter{_such_as(self.hyperparameters)}, or a metric{_such_as(short)}"
        )

    def _ending(self, end: str) -> set[str]:
        return {name for name in self.hyperparameters if name.endswith(f"/{end}")}

    def _of_hyperparameter(self, *names: str) -> Column:
        def value(entry: RunEntry) -> Any:
            known = entry.hyperparameters
            return next((known[name] for name in names if name in known), None)

        first = next((one for one in map(value, self._some) if one is not None), None)
        is_number = isinstance(first, int | float) and not isinstance(first, bool)
        title = names[0].removeprefix("config/")
        title = title if len(title) <= _SHORT_TITLE else title.rpartition("/")[2]
        return Column(names[0], title, "number" if is_number else "text", value)

    def of_metric(self, metric: str, which: str) -> Column:
        """Return the column of a metric by its full name. Raises ConfigurationError without a best value."""
        direction = self.direction(metric)
        title = self.metric_names.short(metric)
        if which == "best" and direction is None:
            raise ConfigurationError(
                f"{title!r} has no best value: its name does not say which values are better; use {title}.min or "
                f"{title}.max (mode='min' or 'max'), or start runs with config={{{GOALS!r}: {{{title!r}: 'max'}}}}"
            )
        of = _OF_VALUES[direction or "last" if which == "best" else which]

        def value(entry: RunEntry) -> float | None:
            values = entry.metrics.get(metric)
            return None if values is None else of(values)

        name, which = (metric, "") if which == "last" else (f"{metric}.{which}", which)
        return Column(name, title, "number", value, direction != "min", metric, which, direction)

    def direction(self, metric: str) -> Mode | None:
        return direction_of(metric, self.goals)


def facts_of(entry: RunEntry) -> Iterator[tuple[str, str]]:
    """Yield facts about a run for people, without its status, note and size; some are empty."""
    yield "started", when(entry.started)
    yield "lasted", lasted(entry.started, entry.ended, live=entry.is_going_on)
    yield "reached", reached_text(entry)
    yield "attempts", str(entry.attempts) if entry.attempts > 1 else ""
    yield "archived", "yes" if entry.archived else ""
    yield "checkpoints", str(sum(one.exists for one in entry.checkpoints) or "")
    yield "tables", ", ".join(f"{name} {rows:,} rows" for name, rows in entry.tables.items())
    yield "trouble", entry.problem or ""
    yield "tags", ", ".join(entry.tags)


def reached_text(entry: RunEntry) -> str:
    """Format the progress of a run: ``epoch 3 of 10``, ``batch 1,200``."""
    unit, count, planned = _progress(entry)
    if count is None:
        return ""
    return f"{unit.name.lower()} {count:,}" + ("" if planned is None else f" of {planned:,}")


def progress_of(entry: RunEntry) -> float | None:
    """Return the completed share of a run that has not ended, from 0 to 1; ``None`` if unknown."""
    _, count, planned = _progress(entry)
    return min(count / planned, 1.0) if entry.is_going_on and count is not None and planned else None


def _progress(entry: RunEntry) -> tuple[TimeUnit, int | None, int | None]:
    counts = {TimeUnit.EPOCH: entry.epoch, TimeUnit.BATCH: entry.batch, TimeUnit.SAMPLE: entry.sample}
    try:
        planned = None if entry.planned is None else Time.from_timestring(entry.planned)
    except (ValueError, ConfigurationError):
        planned = None
    if planned is not None and (count := counts.get(planned.unit)) is not None:
        return planned.unit, count, int(planned.value)
    return TimeUnit.BATCH, entry.batch, None


def _such_as(names: Iterable[str]) -> str:
    return "".join(f" such as {name}" for name in islice(names, 1))
