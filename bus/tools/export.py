"""A recording in a form that other tools read."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from offloop.bus.errors import ConfigurationError, close_matches
from offloop.bus.files import atomic_output
from offloop.bus.protocol.frames import COMMAND, END
from offloop.bus.recording.source import Recorded, RecordSource, is_known, is_mark, snapshot_of
from offloop.bus.tools.rows import FORMATS
from offloop.bus.tools.tables import write_csv, write_jsonl, write_parquet
from offloop.bus.tools.trace import TraceWriter
from offloop.bus.tools.written import Written, nothing_chosen
from offloop.bus.types.event import Event

_Write = Callable[[Iterable[Recorded], Path], None]

_WRITERS: Mapping[str, _Write] = {
    "parquet": write_parquet,
    "csv": write_csv,
    "jsonl": write_jsonl,
}


def exported_path(recording: Path, to: str) -> Path:
    """Where an export is written when nothing else is said."""
    return recording.with_name(recording.stem + FORMATS[to])


def export(
    path: Path,
    output: Path,
    to: str,
    *,
    events: Collection[Event] | None = None,
    ranks: Collection[int] | None = None,
    force: bool = False,
) -> Written:
    """Writes the events of a recording to ``output``, in the order in which they were recorded.

    ``to`` is one of :data:`~offloop.bus.tools.rows.FORMATS`: ``parquet`` and ``csv`` have a row for each event and a
    column for each field, ``jsonl`` an object for each event, ``trace``
    is a timeline for Perfetto (see :class:`offloop.bus.tools.trace.TraceWriter`). Commands and how the run ended come
    too, as the rows ``$command`` and ``$end``, unless ``events`` chooses events. What is damaged is passed over and
    named. Memory does not grow with the recording, but for the list of the numbers that it lacks. It may still be
    written: what is there at the beginning is exported.

    Raises:
        ConfigurationError: there is no such form or rank, no event is chosen, ``output`` exists and ``force`` is not
            set, or PyArrow is not installed.
        RecordingError: ``path`` is not a recording.
        RunDirectoryError: ``output`` cannot be written.
    """
    if to not in FORMATS:
        raise ConfigurationError(
            f"{to!r} is not a form to export to: {close_matches(to, list(FORMATS))}use {', '.join(FORMATS)}"
        )
    write = _WRITERS.get(to)
    source = RecordSource(path, ranks)
    chosen = _Chosen(source, events)
    with atomic_output(output, [path], force) as draft:
        if write is None:
            _write_trace(chosen, draft)
        else:
            write(chosen, draft)
        for rank in sorted(set(ranks or ()) - source.ranks):
            there = ", ".join(map(str, sorted(source.ranks))) or "none"
            raise ConfigurationError(f"{path} has no rank {rank}: choose of {there} with '--ranks'")
        if not chosen.events:
            raise nothing_chosen(path)
    marks = 0 if write is None else chosen.marks
    return Written(path=output, events=chosen.events, marks=marks, **source.found())


class _Chosen:
    """The records that are exported: the same ones each time it is gone through, also while the recording grows."""

    def __init__(self, source: RecordSource, events: Collection[Event] | None) -> None:
        self.source = source
        self._names = None if events is None else frozenset(event.value for event in events)
        self._limit: int | None = None
        self.events = 0
        self.marks = 0

    def __iter__(self) -> Iterator[Recorded]:
        count = self.events = self.marks = 0
        for record in self.source:
            # To its end in any case: what is missing is known only then.
            if self._is_chosen(record) and (self._limit is None or count < self._limit):
                count += 1
                self.events += not is_mark(record)
                self.marks += is_mark(record)
                yield record
        self._limit = count

    def _is_chosen(self, record: Recorded) -> bool:
        name = record.topic.name
        if self._names is not None:
            return name in self._names
        return not is_mark(record) or name in (COMMAND, END)


def _write_trace(chosen: _Chosen, path: Path) -> None:
    source = chosen.source
    shown = 0
    with path.open("w", encoding="utf-8") as file:
        writer = TraceWriter(file)
        for record in chosen:
            if is_known(record):
                writer.see(snapshot_of(record))
            for outcome in source.outcomes[shown:] if record.topic.name == COMMAND else ():
                writer.command(outcome, record.event.time)
                shown += 1
        writer.close(source.ending)
