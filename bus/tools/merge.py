"""Several recordings of one attempt as one."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from offloop.bus.errors import ConfigurationError, RecordingError
from offloop.bus.files import atomic_output
from offloop.bus.protocol.frames import END, EVENT_ELEMENTS
from offloop.bus.protocol.order import Gap
from offloop.bus.recording.source import CutRange, Recorded, RecordSource, base_before, is_mark, ranks_in
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.tools.cut import append
from offloop.bus.tools.written import Written


@dataclass(frozen=True, kw_only=True)
class Merged(Written):
    """What :func:`merge` wrote. What is damaged or missing in one recording and whole in another is not lost."""

    duplicates: int
    """Events that more than one of the recordings had, each counted as often as it was dropped."""


def merge(paths: Sequence[Path], output: Path, *, force: bool = False) -> Merged:
    """Writes what the recordings ``paths`` hold together to ``output``: recordings of different ranks of one attempt,
    such as one for each host, or pieces of one recording.

    Events are ordered by their times, those of each rank by their numbers. One that several of them have is written
    once. Bytes are kept as they are. What a cut had left out and another one has is no longer marked as left out.

    Raises:
        ConfigurationError: they are not of one attempt of one run, two of them have different events of the same rank
            and number, or ``output`` exists and ``force`` is not set.
        RecordingError: one of them is not a recording, or nothing is in any of them.
        RunDirectoryError: ``output`` cannot be written.
    """
    sources = [RecordSource(path) for path in paths]
    run, attempt = _identity(sources)
    ids = {source.run_id for source in sources}
    run_id = ids.pop() if len(ids) == 1 else None
    there = {path: ranks_in(path) for path in paths}
    ranks = sorted({rank for path in paths for rank in there[path]})
    without_ranks = [source for source in sources if not there[source.path]]
    for source in without_ranks:
        # What is damaged in it is known only then.
        for _ in source:
            pass
    if not ranks:
        raise RecordingError(f"none of {', '.join(map(str, paths))} holds an event: there is nothing to merge")
    merged = {rank: _Rank([RecordSource(path, [rank]) for path in paths if rank in there[path]]) for rank in ranks}
    events = 0
    reached: dict[int, int] = {}
    with atomic_output(output, paths, force) as draft, closing(RecordingWriter(draft, run, attempt, run_id)) as writer:
        # In a rank the times never decrease, so that merging by time keeps its order; of equal times the lower rank is
        # first.
        for record in heapq.merge(*merged.values(), key=lambda record: record.event.time):
            append(writer, [record])
            events += not is_mark(record)
            reached[record.topic.rank] = record.event.seq
    written = RecordSource(output)
    for _ in written:
        pass
    parts = [*(source for rank in merged.values() for source in rank.sources), *without_ranks]
    gaps = [*written.gaps, *_missing_at_the_end(parts, reached)]
    return Merged(
        path=output,
        events=events,
        duplicates=sum(rank.duplicates for rank in merged.values()),
        ending=written.ending,
        damage=tuple(dict.fromkeys(line for source in parts for line in source.damage)),
        gaps=tuple(gaps),
        left_out=tuple(written.left_out),
        lost=any(source.lost for source in parts) and (bool(gaps) or written.ending is None),
    )


def _identity(sources: Sequence[RecordSource]) -> tuple[str, int]:
    if len(sources) < 2:
        raise ConfigurationError("one recording has nothing to be merged with: name two or more")
    first, *others = sources
    for other in others:
        if (other.run, other.attempt) != (first.run, first.attempt):
            raise ConfigurationError(
                f"{other.path} is of run {other.run!r}, attempt {other.attempt}, and {first.path} of run "
                f"{first.run!r}, attempt {first.attempt}: only recordings of one attempt of one run can be merged"
            )
    return first.run, first.attempt


def _missing_at_the_end(parts: Sequence[RecordSource], reached: Mapping[int, int]) -> Iterator[Gap]:
    """What none of them has of what one of them says was recorded last; ``reached`` is the last number of each rank."""
    recorded: dict[int, int] = {}
    for gap in (gap for source in parts for gap in source.gaps):
        recorded[gap.rank] = max(gap.last, recorded.get(gap.rank, 0))
    for rank, last in sorted(recorded.items()):
        if (first := reached.get(rank, 0) + 1) <= last:
            yield Gap(rank, first, last)


class _Head:
    """The next record of one of the recordings."""

    def __init__(self, source: RecordSource) -> None:
        self.path = source.path
        self._records = iter(source)
        self.record: Recorded | None = None
        self.left_out: CutRange | None = None
        """What the record says, if it is a mark for what was left out."""
        self.advance()

    def advance(self) -> None:
        self.record = next(self._records, None)
        self.left_out = None if self.record is None else CutRange.of(self.record)

    @property
    def is_obituary(self) -> bool:
        """Whether the record is an end that a broker wrote because it had lost the publisher. What the publisher has
        sent to another broker since takes its place."""
        record = self.record
        return record is not None and record.topic.name == END and record.event.fields.get("status") == "lost"

    @property
    def number(self) -> int:
        assert self.record is not None  # by the caller
        return self.record.event.seq


class _Rank:
    """The records of one rank of all recordings, each number once and in order."""

    def __init__(self, sources: list[RecordSource]) -> None:
        self.sources = sources
        self.duplicates = 0

    def __iter__(self) -> Iterator[Recorded]:
        heads = [_Head(source) for source in self.sources]
        stated: list[CutRange] = []
        last: Recorded | None = None
        while heads := [head for head in heads if head.record is not None]:
            number = min(head.number for head in heads)
            first = [head for head in heads if head.number == number]
            stated += [head.left_out for head in first if head.left_out is not None]
            events = [head for head in first if head.left_out is None]
            if any(head.left_out is None and not head.is_obituary for head in heads):
                events = [head for head in events if not head.is_obituary]
            if events:
                record = _agreed(events)
                self.duplicates += 0 if is_mark(record) else len(events) - 1
                all_left_out = [*stated, *(head.left_out for head in heads if head.left_out is not None)]
                yield from self._marks(_still_left_out(all_left_out, last, record))
                yield record
                last, stated = record, []
            for head in first:
                head.advance()
        yield from self._marks(_still_left_out(stated, last, None))

    def _marks(self, ranges: list[CutRange]) -> Iterator[Recorded]:
        source = self.sources[0]
        return (one.encode(source.run, source.attempt) for one in ranges)


def _agreed(heads: list[_Head]) -> Recorded:
    """The record that they all have.

    Raises:
        ConfigurationError: they have different ones.
    """
    first, *others = heads
    record = first.record
    assert record is not None  # by the caller
    for other in others:
        assert other.record is not None  # by the caller
        if (record.topic, record.body) != (other.record.topic, other.record.body):
            raise ConfigurationError(
                f"{first.path} and {other.path} both have event {record.event.seq} of rank {record.topic.rank}, and "
                f"differ in {_difference(record, other.record)}: they are not recordings of the same attempt"
            )
    return record


def _difference(one: Recorded, other: Recorded) -> str:
    if one.topic.name != other.topic.name:
        return f"what it is: {one.topic.name} or {other.topic.name}"
    names: list[str] = []
    for name, mine, yours in zip(EVENT_ELEMENTS, one.event, other.event, strict=True):
        if isinstance(mine, dict) and isinstance(yours, dict):
            # Not compared as values: a NaN is not equal to itself.
            names += [str(key) for key in {**mine, **yours} if repr(mine.get(key)) != repr(yours.get(key))]
        elif mine != yours:
            names.append(name)
    return ", ".join(names) or "how they are encoded"


def _still_left_out(stated: list[CutRange], last: Recorded | None, following: Recorded | None) -> list[CutRange]:
    """What was left out between two records of a rank that follow each other in all recordings together; ``None`` for
    the beginning and the end."""
    begin = 1 if last is None else last.event.seq + 1
    ranges: list[CutRange] = []
    for one in sorted(stated, key=lambda one: (one.first, one.last)):
        if one.first < begin:
            one = one._replace(first=begin, base_first=1 if last is None else last.event.base_seq + 1)
        if following is not None and one.last >= following.event.seq:
            event = following.event
            one = one._replace(
                last=event.seq - 1,
                base_last=base_before(following),
                time=event.time,
                timestamp=event.timestamp,
            )
        if one.first > one.last:
            continue
        if ranges and one.first <= ranges[-1].last + 1:
            earlier = ranges.pop()
            one = one if one.last >= earlier.last else earlier
            one = one._replace(first=earlier.first, base_first=earlier.base_first)
        ranges.append(one)
    return ranges
