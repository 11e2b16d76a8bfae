"""Where two recorded runs begin to differ, and which metrics do."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from offloop.bus.errors import ConfigurationError
from offloop.bus.printing import shorten
from offloop.bus.protocol.frames import COMMAND, CUT, END
from offloop.bus.protocol.order import Gap
from offloop.bus.recording.source import Recorded, RecordSource, is_base, is_mark, ranks_in
from offloop.bus.strict_json import flatten
from offloop.bus.tools.rows import COUNTERS, DURATIONS, as_row
from offloop.bus.types.hyperparameters import EVENTS as WITH_HYPERPARAMETERS
from offloop.bus.types.hyperparameters import FIELD as HYPERPARAMETERS
from offloop.bus.types.hyperparameters import hyperparameters_in, is_of_the_training
from offloop.bus.types.source import FIELDS as SOURCE_FIELDS
from offloop.bus.types.timestamp import TrainingTime

_TIMES = ("time", *DURATIONS)
_NEVER = ("run", "attempt", "rank", "seq", "event", "utc", "id", "decided_at", "on_demand", "not_sent", HYPERPARAMETERS)
_OF_THE_CLOCK = frozenset(("system", *SOURCE_FIELDS, "phases", "gpu_utilization", "late", "total_eval_wct", *_TIMES))
_INNER_TIMES = ("eval_timestamp", "predict_timestamp")
_FACTS = frozenset(
    (
        "batch_size",
        "seed",
        "global_train_batch_size",
        "device_train_microbatch_size",
        "train_samples",
        "eval_samples",
        "microbatch",
        *COUNTERS,
        *_TIMES,
        *_INNER_TIMES,
    )
)
_COUNTED = 10
_LISTED = 20


@dataclass(frozen=True)
class FieldDifference:
    """One field of an event that differs."""

    name: str
    """Maps within maps are joined by ``/``."""
    a: Any
    """Its value in A; ``None`` when it is not there."""
    b: Any
    """Its value in B; ``None`` when it is not there."""
    only: str | None = None
    """``A`` or ``B`` when the other one does not have the field."""


@dataclass(frozen=True)
class EventDifference:
    """An event that differs, or that only one of the runs has."""

    rank: int
    event: str
    epoch: int
    batch: int
    a: int | None
    """Its number in A; ``None`` when A does not have it."""
    b: int | None
    """Its number in B; ``None`` when B does not have it."""
    fields: tuple[FieldDifference, ...] = ()


@dataclass(frozen=True)
class HyperparameterDifference(FieldDifference):
    """A hyperparameter that differs."""

    of_the_training: bool = True
    """Whether it makes the runs differ: not when it says by what and where they were started."""


@dataclass
class MetricDifference:
    """A number that differs, over all events that both runs have."""

    name: str
    rank: int
    """Where it differs first."""
    event: str
    batch: int
    a: Any
    """Its value in A there."""
    b: Any
    events: int = 0
    """At how many events it differs."""
    largest_absolute: float = 0.0
    """The largest distance; infinite between a number and NaN."""
    largest_absolute_batch: int = 0
    largest_relative: float = 0.0
    """The largest share that the distance is of the larger value."""
    largest_relative_batch: int = 0


@dataclass(frozen=True)
class Diff:
    """What :func:`diff` found."""

    a: Path
    b: Path
    events: int
    """Events that both have, and that were compared."""
    differing: int
    """Events that both have and that differ."""
    alone: dict[str, int]
    """Events that one alone has, of ``A`` and of ``B``."""
    differing_marks: int
    """Commands and endings that differ, or that only one has: they are compared, but are not events."""
    first: EventDifference | None
    """The first of them: the earliest batch, there the first event, of equal ones the lowest rank."""
    metrics: tuple[MetricDifference, ...]
    """Numbers that differ, by where they do first."""
    hyperparameters: tuple[HyperparameterDifference, ...]
    """Hyperparameters that differ, those of the training first."""
    notes: tuple[str, ...]
    """What was not compared because only one of them can have it, each in a line."""
    incomplete: tuple[str, ...]
    """What was not compared because it is missing in a recording or damaged, each in a line."""

    @property
    def same(self) -> bool:
        """Whether no difference was found."""
        return self.first is None and not any(one.of_the_training for one in self.hyperparameters)


def diff(a: Path, b: Path, *, tolerance: float = 0.0, times: bool = False) -> Diff:
    """Compares two recordings, event by event: those of the same rank, batch and name, commands and endings among
    them.

    Hyperparameters are compared by name. Those that say by what and where a run was started (``command``, ``git/``,
    ``version/``, ``machine/``) are listed and make no difference, nor do all of them where one run alone has any.

    What differs in any case is not compared: the run's name, attempt and machine, numbers of events, and, unless
    ``times`` is true, when things happened and how long they took. Two numbers are the same when they are equal, both
    NaN, or, unless both are whole, not further apart than ``tolerance``, taken absolutely or as a share of the larger
    one. Events and fields
    that were recorded because a consumer asked for them are compared where both have them; so are base events where a
    cut has left some out.

    Raises:
        ConfigurationError: ``tolerance`` is negative or not a number, or the recordings have no event in common.
        RecordingError: one of them is not a recording.
    """
    if not 0 <= tolerance < math.inf:
        raise ConfigurationError(f"the tolerance is a number of 0 or more, not {tolerance}")
    for path in (a, b):
        RecordSource(path)  # refuses what is none
    comparison = _Comparison(tolerance, times)
    of_a, of_b = ranks_in(a), ranks_in(b)
    sides: list[_Side] = []
    for rank in sorted(of_a & of_b):
        pair = _Side("A", RecordSource(a, [rank])), _Side("B", RecordSource(b, [rank]))
        _compare_rank(rank, *pair, comparison)
        sides += pair
    notes = [
        f"rank {rank} is in {name} alone"
        for name, mine, others in (("A", of_a, of_b), ("B", of_b, of_a))
        for rank in sorted(mine - others)
    ]
    hyperparameters_a, hyperparameters_b = (
        {name: value for side in sides[place::2] for name, value in side.hyperparameters.items()} for place in (0, 1)
    )
    if bool(hyperparameters_a) is not bool(hyperparameters_b):
        notes.append(f"{'A' if hyperparameters_a else 'B'} alone says its hyperparameters")
        hyperparameters_a = hyperparameters_b = {}
    if not comparison.events:
        raise ConfigurationError(f"{a} and {b} have no event in common, so there is nothing to compare")
    return Diff(
        a,
        b,
        comparison.events,
        comparison.differing,
        comparison.alone,
        comparison.differing_marks,
        comparison.first[1] if comparison.first else None,
        tuple(sorted(comparison.metrics.values(), key=lambda one: (one.batch, one.rank))),
        _differing(hyperparameters_a, hyperparameters_b, tolerance),
        (*notes, *comparison.notes(), *(line for side in sides for line in side.left_out())),
        tuple(dict.fromkeys(line for side in sides for line in side.incomplete_lines())),
    )


def first_difference(a: Path, b: Path, most: int = 20_000) -> tuple[EventDifference | None, int]:
    """The first event of the first rank in which two recordings differ, as :func:`diff` compares them, and how many
    events were compared: no more batches are read after it, or after ``most`` events.

    Raises:
        RecordingError: one of them is not a recording.
    """
    comparison = _Comparison(0.0, False, most=most)
    _compare_rank(0, _Side("A", RecordSource(a, [0])), _Side("B", RecordSource(b, [0])), comparison)
    return comparison.first and comparison.first[1], comparison.events


# -- walking through both ---------------------------------------------------------------------------------------------


class _Side:
    """The events of one rank in one of the recordings, with the batches in which some are missing."""

    def __init__(self, name: str, source: RecordSource) -> None:
        self.name = name
        self.source = source
        self._records = iter(source)
        self._seq = 0
        self._holes: list[tuple[int, float]] = []
        self.batch = 0
        """Of the next event."""
        self.next: Recorded | None = None
        self.hyperparameters: dict[str, Any] = {}
        """What the first rank has said of them so far."""
        self._advance()

    def take(self) -> Recorded:
        """The next event."""
        record = self.next
        assert record is not None  # by the caller
        self._advance()
        return record

    def _advance(self) -> None:
        before = self.batch
        for record in self._records:
            name, seq = record.topic.name, record.event.seq
            # An end has no training time of its own, nor may other events of a loop that is not ours.
            batch = max(self.batch, record.event.timestamp.batch)
            if name == CUT or seq > self._seq + 1:
                self._holes.append((before, batch))
            self._seq, self.batch = seq, batch
            if not name.startswith("$") or name in (COMMAND, END):
                if not record.topic.rank and name in WITH_HYPERPARAMETERS:
                    self.hyperparameters |= hyperparameters_in(record.event.fields)
                self.next = record
                return
        if any(gap.first > self._seq for gap in self.source.gaps):
            self._holes.append((before, math.inf))
        self.next = None

    def may_lack(self, batch: int) -> bool:
        """Whether events of a batch may be missing."""
        self._holes = [hole for hole in self._holes if hole[1] >= batch]
        return any(begin <= batch for begin, _ in self._holes)

    def left_out(self) -> Iterator[str]:
        ranges = self.source.left_out
        for gap in ranges[:_LISTED]:
            yield f"{self.name} is a cut without {_numbers(gap)}"
        if len(ranges) > _LISTED:
            more, rank = len(ranges) - _LISTED, ranges[0].rank
            yield f"{self.name} is a cut without {more:,} more ranges of events of rank {rank}"

    def incomplete_lines(self) -> Iterator[str]:
        for line in self.source.damage:
            yield f"{self.name}: {line}"
        lost = (f"{self.name} lacks {_numbers(gap)}, which are lost" for gap in self.source.gaps)
        yield from shorten(lost, f"ranges of events that {self.name} lacks", _LISTED)


def _numbers(gap: Gap) -> str:
    return f"events {gap.first} to {gap.last} of rank {gap.rank}"


class _Key(NamedTuple):
    """What makes two events of a batch the same one."""

    name: str
    label: Any
    """Of the dataloader, as there may be several evaluators."""
    batch: tuple[int, int]
    """Of the evaluation and the prediction."""
    nth: int
    """Which of those, from 1."""


def _compare_rank(rank: int, a: _Side, b: _Side, comparison: "_Comparison") -> None:
    sides = (a, b)
    while not comparison.is_enough and (batches := [side.batch for side in sides if side.next is not None]):
        batch = min(batches)
        # By turns, so that hardly any event has to wait for its partner.
        waiting: dict[_Key, tuple[_Side, Recorded, int]] = {}
        counts: dict[_Side, Counter[Any]] = {a: Counter(), b: Counter()}
        while turn := [side for side in sides if side.next is not None and side.batch == batch]:
            for side in turn:
                place = counts[side].total()
                record = side.take()
                key = _key(record, counts[side])
                partner = waiting.pop(key, None)
                if partner is None:
                    waiting[key] = side, record, place
                else:
                    _, other, _ = partner
                    pair = (record, other) if side is a else (other, record)
                    comparison.compare(batch, place, *pair)
        for side, record, place in waiting.values():
            other_side = b if side is a else a
            if not is_base(record):
                comparison.note_only(side.name, record.topic.name)
            elif not other_side.may_lack(batch):
                comparison.note_missing(side.name, batch, place, record)


def _key(record: Recorded, counts: "Counter[Any]") -> _Key:
    event = record.event
    values = {**event.context, **event.fields}
    eval_batch, predict_batch = (_batch_of(values.get(name)) for name in _INNER_TIMES)
    name, label = record.topic.name, str(values.get("dataloader_label"))
    which = (name, label, eval_batch, predict_batch)
    counts[which] += 1
    return _Key(name, label, (eval_batch, predict_batch), counts[which])


def _batch_of(timestamp: Any) -> int:
    if not isinstance(timestamp, list) or len(timestamp) < len(TrainingTime._fields):
        return 0
    batch = TrainingTime._make(timestamp[: len(TrainingTime._fields)]).batch
    return batch if isinstance(batch, int) else 0


def _differing(a: Mapping[str, Any], b: Mapping[str, Any], tolerance: float) -> tuple[HyperparameterDifference, ...]:
    found = [
        HyperparameterDifference(name, a.get(name), b.get(name), only, is_of_the_training(name))
        for name in {**a, **b}
        for only in [None if name in a and name in b else "A" if name in a else "B"]
        if only or not _is_same(a[name], b[name], tolerance)
    ]
    return tuple(sorted(found, key=lambda one: not one.of_the_training))


# -- comparing --------------------------------------------------------------------------------------------------------


@dataclass
class _Comparison:
    """What has been found so far."""

    tolerance: float
    times: bool
    events: int = 0
    differing: int = 0
    alone: dict[str, int] = field(default_factory=lambda: {"A": 0, "B": 0})
    differing_marks: int = 0
    first: tuple[tuple[int, int, int], EventDifference] | None = None
    metrics: dict[str, MetricDifference] = field(default_factory=dict)
    only: "Counter[tuple[str, str, str]]" = field(default_factory=Counter)
    """Side, kind and name of what only one can have."""
    most: int | None = None
    """After so many events, or the first difference, it is enough; ``None`` compares everything."""

    @property
    def is_enough(self) -> bool:
        """Whether nothing more is to be compared."""
        return self.most is not None and (self.first is not None or self.events >= self.most)

    def compare(self, batch: int, place: int, a: Recorded, b: Recorded) -> None:
        """Compares two events."""
        self.events += not is_mark(a)
        differences = list(self._differences(a, b))
        if not differences:
            return
        found = EventDifference(
            a.topic.rank,
            a.topic.name,
            a.event.timestamp.epoch,
            batch,
            a.event.seq,
            b.event.seq,
            tuple(differences),
        )
        self._note(batch, place, found)
        for difference in differences:
            if difference.only is None and difference.name not in _FACTS:
                self._note_metric(found, difference)

    def note_missing(self, side: str, batch: int, place: int, record: Recorded) -> None:
        """Takes in an event that only one of them has."""
        seq, epoch = record.event.seq, record.event.timestamp.epoch
        of_a, of_b = (seq, None) if side == "A" else (None, seq)
        self._note(batch, place, EventDifference(record.topic.rank, record.topic.name, epoch, batch, of_a, of_b))

    def note_only(self, side: str, name: str, kind: str = "event") -> None:
        """Takes in what only one of them can have."""
        self.only[side, kind, name] += 1

    def notes(self) -> Iterator[str]:
        for (side, kind, name), count in sorted(self.only.items()):
            yield f"only in {side}, for it was requested: {kind} {name} ({count} times)"

    def _note(self, batch: int, place: int, found: EventDifference) -> None:
        if found.event.startswith("$"):
            self.differing_marks += 1
        elif found.a is None or found.b is None:
            self.alone["B" if found.a is None else "A"] += 1
        else:
            self.differing += 1
        position = (batch, place, found.rank)
        if self.first is None or position < self.first[0]:
            self.first = position, found

    def _differences(self, a: Recorded, b: Recorded) -> Iterator[FieldDifference]:
        values_a, values_b = self._values(a), self._values(b)
        asked_a, asked_b = _asked_for(a), _asked_for(b)
        for name in {**values_a, **values_b}:
            only = None if name in values_a and name in values_b else "A" if name in values_a else "B"
            value_a, value_b = values_a.get(name), values_b.get(name)
            if only is not None:
                field_name = name.split("/", 1)[0]
                if field_name in (asked_a if only == "A" else asked_b) and field_name not in asked_a & asked_b:
                    self.note_only(only, field_name, "field")
                    continue
            elif _is_same(value_a, value_b, self.tolerance):
                continue
            yield FieldDifference(name, value_a, value_b, only)

    def _values(self, record: Recorded) -> dict[str, Any]:
        row = as_row(record)
        for name in (*_NEVER, *(() if self.times else _OF_THE_CLOCK)):
            row.pop(name, None)
        for name in _INNER_TIMES if not self.times else ():
            if isinstance(row.get(name), list):
                row[name] = row[name][:_COUNTED]
        if "logged" in row:
            row["logged"] = _logged(row["logged"])
        return flatten(row)

    def _note_metric(self, where: EventDifference, difference: FieldDifference) -> None:
        pairs = _numbers_in(difference.a, difference.b)
        if pairs is None:
            return
        name = difference.name
        if name not in self.metrics:
            self.metrics[name] = MetricDifference(
                name, where.rank, where.event, where.batch, difference.a, difference.b
            )
        metric = self.metrics[name]
        if where.batch < metric.batch:
            metric.rank, metric.event, metric.batch = where.rank, where.event, where.batch
            metric.a, metric.b = difference.a, difference.b
        metric.events += 1
        absolute = max(_distance(one, other) for one, other in pairs)
        relative = max(_share(one, other) for one, other in pairs)
        if absolute > metric.largest_absolute:
            metric.largest_absolute, metric.largest_absolute_batch = absolute, where.batch
        if relative > metric.largest_relative:
            metric.largest_relative, metric.largest_relative_batch = relative, where.batch


def _asked_for(record: Recorded) -> set[str]:
    names = record.event.fields.get("on_demand")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _logged(entries: Any) -> Any:
    """What algorithms logged, by name; of several steps the last."""
    try:
        return {name: value for _, values in entries for name, value in values.items()}
    except (TypeError, ValueError, AttributeError):
        return entries


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_same(a: Any, b: Any, tolerance: float) -> bool:
    if _is_number(a) and _is_number(b):
        if a == b or (a != a and b != b):
            return True
        # What is counted is counted exactly.
        is_measured = isinstance(a, float) or isinstance(b, float)
        return is_measured and tolerance > 0 and math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_is_same(one, other, tolerance) for one, other in zip(a, b, strict=True))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_is_same(value, b[name], tolerance) for name, value in a.items())
    return type(a) is type(b) and bool(a == b)


def _numbers_in(a: Any, b: Any) -> list[tuple[float, float]] | None:
    if _is_number(a) and _is_number(b):
        return [(a, b)]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b) > 0:
        pairs = list(zip(a, b, strict=True))
        return pairs if all(_is_number(one) and _is_number(other) for one, other in pairs) else None
    return None


def _distance(a: float, b: float) -> float:
    if a == b or (a != a and b != b):
        return 0.0
    distance = abs(a - b)
    return math.inf if distance != distance else float(distance)


def _share(a: float, b: float) -> float:
    distance = _distance(a, b)
    if not distance or distance == math.inf:
        return distance
    return distance / max(abs(a), abs(b))
