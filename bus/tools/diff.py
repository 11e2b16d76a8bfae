"""The first difference between two recorded runs."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offloop.bus.errors import ConfigurationError
from offloop.bus.printing import shorten
from offloop.bus.protocol.frames import COMMAND, CUT, END
from offloop.bus.protocol.order import Gap
from offloop.bus.recording.source import Recorded, RecordSource, is_base, is_mark, ranks_in
from offloop.bus.strict_json import flatten
from offloop.bus.tools.rows import COUNTERS, DURATIONS, as_row
from offloop.bus.types.hyperparameters import FIELD as HYPERPARAMETERS
from offloop.bus.types.source import FIELDS as SOURCE_FIELDS

_IDENTITY = ("run", "attempt", "rank", "seq", "event", "id", "on_demand", "not_sent", HYPERPARAMETERS)
_BY_THE_CLOCK = (
    *("time", "utc", "decided_at", *DURATIONS, "system", *SOURCE_FIELDS),
    *("phases", "gpu_utilization", "late", "total_eval_wct"),
)
_INNER_TIMES = ("eval_timestamp", "predict_timestamp")
_LISTED = 20


@dataclass(frozen=True)
class FieldDifference:
    name: str  # nested maps are joined by /
    a: Any  # value in A; None if missing
    b: Any  # value in B; None if missing
    only: str | None = None  # A or B if only that one has the field


@dataclass(frozen=True)
class EventDifference:
    rank: int
    event: str
    epoch: int
    batch: int
    place: int  # number of events of its rank and batch before it
    a: int | None  # number in A; None if missing
    b: int | None  # number in B; None if missing
    fields: tuple[FieldDifference, ...] = ()


@dataclass
class Diff:
    """Result of :func:`diff`."""

    a: Path
    b: Path
    tolerance: float = 0.0
    events: int = 0
    """Compared events."""
    differing: int = 0
    """Events, commands and endings that differ."""
    alone: dict[str, int] = field(default_factory=lambda: {"A": 0, "B": 0})
    """Events, commands and endings that only ``A`` or only ``B`` has."""
    first: EventDifference | None = None
    """The first difference: in the earliest batch the first event, of the lowest rank."""
    notes: list[str] = field(default_factory=list)
    """Further differences that were not compared because only one can have them, one per line."""
    incomplete: list[str] = field(default_factory=list)
    """Missing or damaged parts of a recording that were not compared, one per line."""

    @property
    def same(self) -> bool:
        """True if no difference was found."""
        return self.first is None

    def compare(self, batch: int, place: int, a: Recorded, b: Recorded) -> None:
        self.events += not is_mark(a)
        # What a consumer requested is compared where both have it.
        requested = {"A": _requested_fields(a), "B": _requested_fields(b), None: frozenset[str]()}
        differences = tuple(
            one
            for one in _compare_maps(_values(a), _values(b), self.tolerance)
            if one.name.partition("/")[0] not in requested[one.only]
        )
        if differences:
            self.differing += 1
            self._keep_first(batch, place, a, a.event.seq, b.event.seq, differences)

    def note_alone(self, side: "_Side", batch: int, place: int, record: Recorded) -> None:
        self.alone[side.name] += 1
        seq = record.event.seq
        self._keep_first(batch, place, record, *((seq, None) if side.name == "A" else (None, seq)))

    def _keep_first(
        self,
        batch: int,
        place: int,
        record: Recorded,
        a: int | None,
        b: int | None,
        fields: tuple[FieldDifference, ...] = (),
    ) -> None:
        (_, name, rank), first = record.topic, self.first
        if first is None or (batch, place, rank) < (first.batch, first.place, first.rank):
            self.first = EventDifference(rank, name, record.event.timestamp.epoch, batch, place, a, b, fields)


def diff(a: Path, b: Path, *, tolerance: float = 0.0) -> Diff:
    """Compare two recordings event by event: the events, commands and endings of each rank, by batch and name.

    Not compared are the run's name, attempt and machine, hyperparameters, numbers of events, and times. Two numbers are
    the same if they are equal, both NaN, or, unless both are whole, within ``tolerance``, absolute or relative to the
    larger one. Events and fields that a consumer requested, and base events of a partial recording, are compared where
    both have them.

    Raises ConfigurationError for an invalid ``tolerance``, or if the recordings have no event in common;
    RecordingError."""
    if not 0 <= tolerance < math.inf:
        raise ConfigurationError(f"invalid tolerance {tolerance}: use a number of at least 0")
    for path in (a, b):
        RecordSource(path)  # refuses what is none
    found = Diff(a, b, tolerance)
    of_a, of_b = ranks_in(a), ranks_in(b)
    for name, alone in (("A", of_a - of_b), ("B", of_b - of_a)):
        found.notes += [f"rank {rank} is in {name} alone" for rank in sorted(alone)]
    for rank in sorted(of_a & of_b):
        _compare_rank(_Side("A", a, rank), _Side("B", b, rank), found)
    found.incomplete = list(dict.fromkeys(found.incomplete))
    if not found.events:
        raise ConfigurationError(f"{a} and {b} have no event in common, so there is nothing to compare")
    return found


class _Side:
    """The events of one rank of a recording, and the batches with missing events."""

    def __init__(self, name: str, path: Path, rank: int) -> None:
        self.name = name
        self._source = RecordSource(path, [rank])
        self._records = iter(self._source)
        self._seq = 0
        self._holes: list[tuple[int, float]] = []
        self.batch: int = 0
        self.next: Recorded | None = None
        self._advance()

    def take(self) -> Recorded:
        record = self.next
        assert record is not None  # by the caller
        self._advance()
        return record

    def _advance(self) -> None:
        before = self.batch
        for record in self._records:
            name, seq = record.topic.name, record.event.seq
            # An ending has no training time, and neither may other events of a user's loop.
            batch = max(self.batch, record.event.timestamp.batch)
            if name == CUT or seq > self._seq + 1:
                self._holes.append((before, batch))
            self._seq, self.batch = seq, batch
            if not name.startswith("$") or name in (COMMAND, END):
                self.next = record
                return
        if any(gap.first > self._seq for gap in self._source.gaps):
            self._holes.append((before, math.inf))
        self.next = None

    def may_lack(self, batch: int) -> bool:
        self._holes = [hole for hole in self._holes if hole[1] >= batch]
        return any(begin <= batch for begin, _ in self._holes)

    def report(self, found: Diff) -> None:
        left_out = (f"{self.name} leaves out {_numbers(gap)}" for gap in self._source.left_out)
        found.notes += shorten(left_out, f"ranges of events that {self.name} leaves out", _LISTED)
        lost = (f"{self.name} lacks {_numbers(gap)}, which are lost" for gap in self._source.gaps)
        found.incomplete += [f"{self.name}: {line}" for line in self._source.damage]
        found.incomplete += shorten(lost, f"ranges of events that {self.name} lacks", _LISTED)


def _numbers(gap: Gap) -> str:
    return f"events {gap.first} to {gap.last} of rank {gap.rank}"


def _compare_rank(a: _Side, b: _Side, found: Diff) -> None:
    sides = (a, b)
    while batches := [side.batch for side in sides if side.next is not None]:
        batch = min(batches)
        # By turns, so that few events wait for their partners.
        waiting: dict[Any, tuple[_Side, Recorded, int]] = {}
        counts: dict[_Side, Counter[Any]] = {a: Counter(), b: Counter()}
        while turn := [side for side in sides if side.next is not None and side.batch == batch]:
            for side in turn:
                place = counts[side].total()
                record = side.take()
                kind = _kind(record)
                counts[side][kind] += 1
                key = (kind, counts[side][kind])
                if key not in waiting:
                    waiting[key] = side, record, place
                else:
                    _, other, _ = waiting.pop(key)
                    found.compare(batch, place, *((record, other) if side is a else (other, record)))
        for side, record, place in waiting.values():
            if is_base(record) and not (b if side is a else a).may_lack(batch):
                found.note_alone(side, batch, place, record)
    for side in sides:
        side.report(found)


def _kind(record: Recorded) -> tuple[Any, ...]:
    """Identify an event within its batch: by name, dataloader, and batch within the evaluation."""
    values = {**record.event.context, **record.event.fields}
    times = (values.get(name) for name in _INNER_TIMES)
    batches = (time[1] if isinstance(time, list) and len(time) > 1 else 0 for time in times)
    return record.topic.name, str(values.get("dataloader_label")), *map(str, batches)


def _values(record: Recorded) -> dict[str, Any]:
    row = as_row(record)
    for name in (*_IDENTITY, *_BY_THE_CLOCK):
        row.pop(name, None)
    for name in _INNER_TIMES:
        if isinstance(row.get(name), list):
            row[name] = row[name][: len(COUNTERS)]
    if "logged" in row:
        row["logged"] = _logged(row["logged"])
    return flatten(row)


def _logged(entries: Any) -> Any:
    """Return logged values by name; of several steps the last."""
    try:
        return {name: value for _, values in entries for name, value in values.items()}
    except (TypeError, ValueError, AttributeError):
        return entries


def _requested_fields(record: Recorded) -> frozenset[str]:
    names = record.event.fields.get("on_demand")
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def _compare_maps(a: Mapping[str, Any], b: Mapping[str, Any], tolerance: float) -> Iterator[FieldDifference]:
    for name in {**a, **b}:
        only = None if name in a and name in b else "A" if name in a else "B"
        if only or not _is_same(a[name], b[name], tolerance):
            yield FieldDifference(name, a.get(name), b.get(name), only)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_same(a: Any, b: Any, tolerance: float) -> bool:
    if _is_number(a) and _is_number(b):
        if a == b or (a != a and b != b):
            return True
        # Counts are compared exactly.
        is_measured = isinstance(a, float) or isinstance(b, float)
        return is_measured and tolerance > 0 and math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_is_same(one, other, tolerance) for one, other in zip(a, b, strict=True))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_is_same(value, b[name], tolerance) for name, value in a.items())
    return type(a) is type(b) and bool(a == b)
