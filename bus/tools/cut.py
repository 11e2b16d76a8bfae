"""A part of a recording as a recording of its own."""

from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from offloop.bus.files import atomic_output
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.source import CutRange, Recorded, RecordSource, is_mark, snapshot_of
from offloop.bus.recording.window import Bound, Window, parse_bound, recording_began
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.tools.written import Written, check_any, check_ranks
from offloop.bus.types.event import Event


@dataclass(frozen=True, kw_only=True)
class Cut(Written):
    """What :func:`cut` wrote."""

    dropped: int
    """Events that the original has and the cut has not."""


def cut(
    path: Path,
    output: Path,
    start: str | Bound | None = None,
    until: str | Bound | None = None,
    *,
    events: Collection[Event] | None = None,
    ranks: Collection[int] | None = None,
    force: bool = False,
) -> Cut:
    """Writes the events of a recording from ``start`` to ``until`` to ``output``, a recording as every other.

    The moments are those of :func:`offloop.bus.recording.window.parse_bound`, and choose what a replay between them
    shows: events at either moment are kept, and the events before the training (``init``, ``fit_start``) as well.
    ``events`` and ``ranks`` choose further. Kept events keep their numbers and times, byte for byte. The stream's marks
    (how it ended, its commands) are kept whatever is chosen. In the place of events that are left out there is a mark
    ``$cut``, which says which ones; numbers that are missing in the original are missing in the cut too, without such a
    mark.

    Raises:
        ConfigurationError: ``output`` exists and ``force`` is not set, there is no such rank, or no event is chosen.
        InvalidTimeError: ``start`` or ``until`` is not such a time.
        RecordingError: ``path`` is not a recording.
        RunDirectoryError: ``output`` cannot be written.
    """
    source = RecordSource(path)
    first, last = (parse_bound(moment) if isinstance(moment, str) else moment for moment in (start, until))
    window = Window(first, last, recording_began(Recording(path)) if first or last else 0)
    names = None if events is None else frozenset(event.value for event in events)

    def is_kept(record: Recorded) -> bool:
        # The window counts on being asked about every event.
        within = window.takes(snapshot_of(record))
        topic = record.topic
        return within and (names is None or topic.name in names) and (ranks is None or topic.rank in ranks)

    kept = dropped = 0
    with (
        atomic_output(output, [path], force) as draft,
        closing(RecordingWriter(draft, source.run, source.attempt, source.run_id)) as writer,
    ):
        marks = CutMarks(source.run, source.attempt)
        for record in source:
            stated = CutRange.of(record)
            if stated is None and not is_mark(record) and not is_kept(record):
                stated = CutRange.one(record)
                dropped += 1
            if stated is not None:
                append(writer, marks.add(stated))
                continue
            append(writer, marks.before(record.topic.rank))
            append(writer, [record])
            kept += not is_mark(record)
        append(writer, marks.rest())
        check_ranks(path, ranks, source.ranks)
        # The setup is kept whatever the part.
        check_any(path, kept if window.begun else 0)
    return Cut(path=output, events=kept, dropped=dropped, **source.found())


class CutMarks:
    """Makes as few marks as possible for what is left out of a stream: one for each range of each rank."""

    def __init__(self, run: str, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._pending: dict[int, CutRange] = {}

    def add(self, left_out: CutRange) -> Iterator[Recorded]:
        """Takes in the next range of a rank; gives the mark for what it does not continue."""
        pending = self._pending.get(left_out.rank)
        if pending is not None and pending.last + 1 == left_out.first:
            left_out = left_out._replace(first=pending.first, base_first=pending.base_first)
        else:
            yield from self.before(left_out.rank)
        self._pending[left_out.rank] = left_out

    def before(self, rank: int) -> Iterator[Recorded]:
        """Gives the mark that belongs in front of the rank's next record, if there is one."""
        pending = self._pending.pop(rank, None)
        if pending is not None:
            yield pending.encode(self._run, self._attempt)

    def rest(self) -> Iterator[Recorded]:
        """Gives the marks for what is left out at the end."""
        for rank in list(self._pending):
            yield from self.before(rank)


def append(writer: RecordingWriter, records: "Iterator[Recorded] | list[Recorded]") -> None:
    """Appends records as they are."""
    for topic, event, body in records:
        writer.append(topic.encode()[:-1], event.seq, event.base_seq, event.time, body)
