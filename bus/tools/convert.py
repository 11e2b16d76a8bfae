"""Recordings of one attempt of a run as one recording: repaired, joined, or a part of them."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from offloop.bus.errors import ConfigurationError
from offloop.bus.files import atomic_output
from offloop.bus.protocol.frames import END
from offloop.bus.protocol.order import Ending, Gap
from offloop.bus.recording.source import CutRange, Recorded, RecordSource, base_before, is_mark, ranks_in, snapshot_of
from offloop.bus.recording.window import Window, parse_bound
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.types.time import Time


@dataclass(frozen=True, kw_only=True)
class Written:
    """A file that a tool wrote, and the findings about the recordings that it read."""

    path: Path
    events: int  # number of events in the file
    marks: int = 0  # rows of an export that are not events: commands, and the end of the run. 0 for a timeline
    dropped: int = 0  # events left out of a part
    ending: Ending | None  # ending of the run; None unless a recording has it for all ranks
    damage: tuple[str, ...]  # unreadable places, each with its file and offset
    gaps: tuple[Gap, ...]  # missing events of each rank
    left_out: tuple[Gap, ...]  # missing events of recordings that were written as a part
    lost: bool  # true if the recordings held something unreadable that is not in the file


def nothing_chosen(path: Path) -> ConfigurationError:
    return ConfigurationError(
        f"nothing of {path} is chosen: 'offloop show {path}' shows its events and how far the training came"
    )


def convert(
    paths: Sequence[Path],
    output: Path,
    start: str | Time | None = None,
    until: str | Time | None = None,
    *,
    force: bool = False,
) -> Written:
    """Write the intact parts of recordings of one attempt to one recording.

    The recordings may be one that is damaged or cut off, those of different ranks or hosts, or pieces of one recording.
    Events of several recordings are ordered by time, those of a rank by number, and written once. They keep their
    numbers and times, byte for byte. The stream's marks (its ending, commands) are kept in any case. A mark ``$cut``
    replaces events that are left out; events that are missing in the originals have no mark.

    Args:
        paths: The recordings.
        output: The file to write, replaced only with ``force``.
        start, until: First and last moment of a part, see :func:`offloop.bus.recording.window.parse_bound`. A replay
            between them shows the same events.

    Raises ConfigurationError if the recordings are not of one attempt of one run, two have different events of the same
    rank and number, no event is chosen, or ``output`` exists; InvalidTimeError for ``start`` or ``until``;
    RecordingError if a file is not a recording; RunDirectoryError if ``output`` cannot be written."""
    sources = [RecordSource(path) for path in paths]
    run, attempt, run_id = _identity(sources)
    first, last = (parse_bound(moment) if isinstance(moment, str) else moment for moment in (start, until))
    is_part = first is not None or last is not None
    window = Window(first, last)
    records: Iterable[Recorded] = sources[0]
    if len(sources) > 1:
        sources, records = _merge_ranks(paths)
    events = dropped = 0
    streams: dict[int, _RankStream] = {}
    with atomic_output(output, paths, force) as draft, closing(RecordingWriter(draft, run, attempt, run_id)) as writer:
        for record in records:
            if record.topic.rank not in streams:
                streams[record.topic.rank] = _RankStream(run, attempt)
            stream, stated = streams[record.topic.rank], CutRange.of(record)
            if stated is None and not is_mark(record) and not window.takes(snapshot_of(record)):
                stated = CutRange.one(record)
                dropped += 1
            if stated is None:
                _write(writer, stream.add(record))
                events += not is_mark(record)
            else:
                _write(writer, stream.leave_out(stated))
        for stream in streams.values():
            _write(writer, stream.rest())
        if is_part and not window.begun:
            raise nothing_chosen(paths[0])

    written = RecordSource(output)
    for _ in written:
        pass  # missing events are known at the end
    gaps = [*written.gaps, *_missing_at_the_end(sources, streams)]
    return Written(
        path=output,
        events=events,
        dropped=dropped,
        ending=written.ending,
        damage=tuple(dict.fromkeys(line for source in sources for line in source.damage)),
        gaps=tuple(gaps),
        left_out=tuple(written.left_out),
        lost=any(source.lost for source in sources) and (bool(gaps) or written.ending is None),
    )


def _merge_ranks(paths: Sequence[Path]) -> tuple[list[RecordSource], Iterable[Recorded]]:
    by_rank: dict[int, list[RecordSource]] = {}
    for path in paths:
        # A recording without events is read too, because its damage is known only then.
        for rank in ranks_in(path) or (0,):
            by_rank.setdefault(rank, []).append(RecordSource(path, [rank]))
    # Times within a rank never decrease, so this keeps its order. The lower rank is first at equal times.
    ranks = [_records_of_rank(by_rank[rank]) for rank in sorted(by_rank)]
    return [*chain(*by_rank.values())], heapq.merge(*ranks, key=lambda record: record.event.time)


def _identity(sources: Sequence[RecordSource]) -> tuple[str, int, str | None]:
    first, *others = sources
    for other in others:
        if (other.run, other.attempt) != (first.run, first.attempt):
            raise ConfigurationError(
                f"{other.path} is of run {other.run!r}, attempt {other.attempt}, and {first.path} of run "
                f"{first.run!r}, attempt {first.attempt}: name recordings of one attempt of one run"
            )
    ids = {source.run_id for source in sources}
    return first.run, first.attempt, ids.pop() if len(ids) == 1 else None


def _write(writer: RecordingWriter, records: Iterable[Recorded]) -> None:
    for topic, event, body in records:
        writer.append(topic.encode()[:-1], event.seq, event.base_seq, event.time, body)


def _missing_at_the_end(sources: Sequence[RecordSource], streams: "dict[int, _RankStream]") -> Iterator[Gap]:
    """Events that a recording names as recorded, after the last one that any of them has."""
    recorded: dict[int, int] = {}
    for gap in (gap for source in sources for gap in source.gaps):
        recorded[gap.rank] = max(gap.last, recorded.get(gap.rank, 0))
    for rank, last in sorted(recorded.items()):
        first = streams[rank].number + 1 if rank in streams else 1
        if first <= last:
            yield Gap(rank, first, last)


class _RankStream:
    """The records of one rank, with as few marks as possible for events left out."""

    def __init__(self, run: str, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._last: Recorded | None = None
        self._left_out: CutRange | None = None  # pending: further events may be left out after it, or occur within it

    @property
    def number(self) -> int:
        there = 0 if self._last is None else self._last.event.seq
        return max(there, 0 if self._left_out is None else self._left_out.last)

    def leave_out(self, stated: CutRange) -> Iterator[Recorded]:
        """Leave out a range, except present events; yields the mark of an earlier range that it does not extend."""
        if self._last is not None and stated.first <= self._last.event.seq:
            stated = stated._replace(first=self._last.event.seq + 1, base_first=self._last.event.base_seq + 1)
        if stated.first > stated.last:
            return
        if (pending := self._left_out) is not None:
            if stated.first > pending.last + 1:
                yield pending.encode(self._run, self._attempt)
            else:
                longer = stated if stated.last >= pending.last else pending
                stated = longer._replace(first=pending.first, base_first=pending.base_first)
        self._left_out = stated

    def add(self, record: Recorded) -> Iterator[Recorded]:
        pending, event = self._left_out, record.event
        self._last, self._left_out = record, None
        if pending is not None and pending.last >= event.seq:
            yield from self.leave_out(pending)
            pending = pending._replace(
                last=event.seq - 1, base_last=base_before(record), time=event.time, timestamp=event.timestamp
            )
        if pending is not None and pending.first <= pending.last:
            yield pending.encode(self._run, self._attempt)
        yield record

    def rest(self) -> Iterator[Recorded]:
        if self._left_out is not None:
            yield self._left_out.encode(self._run, self._attempt)


def _records_of_rank(sources: Sequence[RecordSource]) -> Iterator[Recorded]:
    """Yield a rank's records, each number once. Raises ConfigurationError if two recordings contradict."""
    stream = _RankStream(sources[0].run, sources[0].attempt)
    last: Recorded | None = None
    obituary: Recorded | None = None

    def first_number(record: Recorded) -> int:
        left_out = CutRange.of(record)
        return record.event.seq if left_out is None else left_out.first

    for record in heapq.merge(*sources, key=first_number):
        if (left_out := CutRange.of(record)) is not None:
            yield from stream.leave_out(left_out)
        elif _is_obituary(record):
            obituary = record
        elif last is None or record.event.seq > last.event.seq:
            yield from stream.add(record)
            last = record
        elif (record.topic, record.body) != (last.topic, last.body):
            raise ConfigurationError(
                f"{' and '.join(str(source.path) for source in sources)} have different events {record.event.seq} of "
                f"rank {record.topic.rank}: they are not recordings of the same attempt"
            )
    if obituary is not None and (last is None or obituary.event.seq > last.event.seq):
        yield from stream.add(obituary)
    yield from stream.rest()


def _is_obituary(record: Recorded) -> bool:
    """Return whether a broker wrote this ending when it lost the publisher, whose later events replace it."""
    return record.topic.name == END and record.event.fields.get("status") == "lost"
