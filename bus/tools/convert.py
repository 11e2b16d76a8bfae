"""Recordings of one attempt of a run as one recording: repaired, joined, or a part of them."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from offloop.bus.errors import ConfigurationError
from offloop.bus.files import atomic_output
from offloop.bus.printing import shorten
from offloop.bus.protocol.order import Ending, Gap
from offloop.bus.recording.source import CutRange, Recorded, RecordSource, is_mark, ranks_in, snapshot_of
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


def nothing_chosen(path: Path, damage: Sequence[str]) -> ConfigurationError:
    return ConfigurationError(
        f"{'no whole event' if damage else 'nothing'} of {path} is chosen: "
        f"{''.join(f'{line}; ' for line in shorten(damage, 'places like these'))}"
        f"'offloop show {path}' shows its events and how far the training came"
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

    The recordings may be one that is damaged or cut off, or those of different ranks, as hosts have them. Events of
    several recordings are ordered by time. They keep their numbers and times, byte for byte. The stream's marks (its
    ending, commands) are kept in any case. A mark ``$cut`` replaces events that are left out; events that are missing
    in the originals have no mark.

    Args:
        paths: The recordings.
        output: The file to write, replaced only with ``force``.
        start, until: First and last moment of a part, see :func:`offloop.bus.recording.window.parse_bound`. A replay
            between them shows the same events.

    Raises ConfigurationError if the recordings are not of one attempt of one run, two have the same rank, no event is
    chosen, or ``output`` exists; InvalidTimeError for ``start`` or ``until``;
    RecordingError if a file is not a recording; RunDirectoryError if ``output`` cannot be written."""
    sources = [RecordSource(path) for path in paths]
    run, attempt, run_id = _identity(sources)
    first, last = (parse_bound(moment) if isinstance(moment, str) else moment for moment in (start, until))
    is_part = first is not None or last is not None
    window = Window(first, last)
    records: Iterable[Recorded] = sources[0]
    if len(sources) > 1:
        sources = _by_rank(paths)
        # Times within a rank never decrease, so this keeps its order. The lower rank is first at equal times.
        records = heapq.merge(*sources, key=lambda record: record.event.time)
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
            raise nothing_chosen(paths[0], [line for source in sources for line in source.damage])

    written = RecordSource(output)
    for _ in written:
        pass  # what was left out is known at the end
    gaps = tuple(gap for source in sources for gap in source.gaps)
    return Written(
        path=output,
        events=events,
        dropped=dropped,
        ending=written.ending,
        damage=tuple(dict.fromkeys(line for source in sources for line in source.damage)),
        gaps=gaps,
        left_out=tuple(written.left_out),
        lost=any(source.lost for source in sources) and (bool(gaps) or written.ending is None),
    )


def _by_rank(paths: Sequence[Path]) -> list[RecordSource]:
    found: dict[int, Path] = {}
    for path in paths:
        for rank in ranks_in(path):
            if found.setdefault(rank, path) != path:
                raise ConfigurationError(f"rank {rank} is in {found[rank]} and {path}: name recordings of other ranks")
    return [RecordSource(path, [rank]) for rank, path in sorted(found.items())]


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


class _RankStream:
    """The records of one rank, with as few marks as possible for events left out."""

    def __init__(self, run: str, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._last: Recorded | None = None
        self._left_out: CutRange | None = None  # pending: further events may be left out after it

    def leave_out(self, stated: CutRange) -> Iterator[Recorded]:
        """Leave out a range; yields the mark of an earlier range that it does not extend."""
        if self._last is not None and stated.first <= self._last.event.seq:
            stated = stated._replace(first=self._last.event.seq + 1, base_first=self._last.event.base_seq + 1)
        if (pending := self._left_out) is not None and stated.first > pending.last + 1:
            yield from self.rest()
        elif pending is not None:
            stated = stated._replace(first=pending.first, base_first=pending.base_first)
        self._left_out = stated

    def add(self, record: Recorded) -> Iterator[Recorded]:
        yield from self.rest()
        self._last, self._left_out = record, None
        yield record

    def rest(self) -> Iterator[Recorded]:
        if self._left_out is not None:
            yield self._left_out.encode(self._run, self._attempt)
