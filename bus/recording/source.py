"""A recording as decoded records with the gaps between them, for commands that process all of it."""

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from offloop.bus.errors import ConfigurationError, ProtocolError
from offloop.bus.printing import Damage
from offloop.bus.protocol import frames
from offloop.bus.protocol.frames import CUT, EventBody, Topic
from offloop.bus.protocol.order import Ending, Gap, StreamOrder, base_step
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.reader import RecordingReader
from offloop.bus.recording.recording import Recording
from offloop.bus.types.commands import Outcome
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import TrainingTime


class CutRange(NamedTuple):
    """Events of one rank that a cut removed. It is recorded as the mark ``$cut``, numbered as the last of them."""

    rank: int
    first: int
    last: int
    base_first: int  # number of the first base event among them, or ``base_last + 1`` if there is none
    base_last: int  # number of base events up to the last event
    time: int  # time of the last event, in nanoseconds since 1970
    timestamp: TrainingTime  # training time of the last event, see ``Timestamp.values``

    def encode(self, run: str, attempt: int) -> "Recorded":
        fields = {"first": self.first, "base_first": self.base_first}
        mark = EventBody(1, attempt, self.last, self.base_last, self.time, self.timestamp, None, fields, {})
        return Recorded(Topic(run, CUT, self.rank), mark, frames.encode_body(mark))

    @classmethod
    def one(cls, record: "Recorded") -> "CutRange":
        event, rank = record.event, record.topic.rank
        base_first = event.base_seq - is_base(record) + 1
        return cls(rank, event.seq, event.seq, base_first, event.base_seq, event.time, event.timestamp)

    @classmethod
    def of(cls, record: "Recorded") -> "CutRange | None":
        if record.topic.name != CUT:
            return None
        event = record.event
        first, base_first = event.fields.get("first"), event.fields.get("base_first")
        if type(first) is not int or type(base_first) is not int:
            return None
        if not (1 <= first <= event.seq and 1 <= base_first <= event.base_seq + 1):
            return None
        return cls(record.topic.rank, first, event.seq, base_first, event.base_seq, event.time, event.timestamp)


class Recorded(NamedTuple):
    topic: Topic
    event: EventBody
    body: bytes  # the recorded bytes


def is_mark(record: Recorded) -> bool:
    return record.topic.name.startswith("$")


def is_base(record: Recorded) -> bool:
    """Return whether it counts as a base event. Marks do."""
    return is_mark(record) or base_step(record.topic.name) == 1


def is_known(record: Recorded) -> bool:
    return base_step(record.topic.name) is not None


def snapshot_of(record: Recorded) -> Snapshot:
    """Return the event as callbacks see it; an unknown event appears as ``batch_end``."""
    try:
        event = Event(record.topic.name)
    except ConfigurationError:
        event = Event.BATCH_END
    return Snapshot(event, record.topic.run, record.topic.rank, record.event)


class RecordSource:
    """Iterates over all intact records of a recording, in the order of the file; can be iterated again.

    At the end ``damage`` names damaged and foreign records, which are skipped. ``gaps`` are lost numbers, ``left_out``
    are ranges removed by a cut. ``ranks`` limits the records to some ranks."""

    def __init__(self, path: Path, ranks: Collection[int] | None = None) -> None:
        recording = Recording(path)
        self.path = path
        self.run: str = recording.run_name
        self.attempt: int = recording.attempt
        self.run_id: str | None = recording.run_id
        self._ranks = ranks
        self._begin()

    def _begin(self) -> None:
        self.damage: list[str] = []
        self.gaps: list[Gap] = []
        self.left_out: list[Gap] = []
        self._left_out_records = Damage()
        self.lost: bool = False  # some bytes or records cannot be read
        self.ranks: set[int] = set()  # ranks with records
        self._topics: dict[str, Topic] = {}
        self._last: dict[int, int] = {}
        self._order = StreamOrder(self.run, self.attempt, None)

    @property
    def ending(self) -> Ending | None:
        return self._order.ending

    @property
    def outcomes(self) -> list[Outcome]:
        return self._order.outcomes

    def __iter__(self) -> Iterator[Recorded]:
        self._begin()
        with RecordingReader(self.path) as reader:
            for records in reader.read():
                for topic, body in records:
                    record = self._read(topic, body)
                    if record is not None and self._follow(record):
                        yield record
            for rank, position in reader.positions.items():
                self.ranks.add(rank)
                if self._requests(rank):
                    self._note_missing(rank, position.seq + 1)
            cut = [reader.cut] if reader.cut else []
            self.damage = [*reader.damage, *cut, *self._left_out_records.lines()]
            self.lost = self.lost or reader.lost

    def _requests(self, rank: int) -> bool:
        return self._ranks is None or rank in self._ranks

    def _read(self, name: str, body: bytes) -> Recorded | None:
        try:
            topic = self._topics.get(name) or self._topics.setdefault(name, frames.parse_topic(name.encode()))
            if topic.run != self.run:
                raise ProtocolError(f"it is not of run {self.run!r}")
            self.ranks.add(topic.rank)
            if not self._requests(topic.rank):
                return None
            event = frames.decode_whole_event(body)
            if event.attempt != self.attempt:
                raise ProtocolError(f"it is of attempt {event.attempt}, not {self.attempt}")
        except ProtocolError as error:
            self._left_out_records.add(f"{self.path}: a record of {name!r} is left out: {error}")
            self.lost = True
            return None
        return Recorded(topic, event, body)

    def _follow(self, record: Recorded) -> bool:
        rank, seq = record.topic.rank, record.event.seq
        if seq <= self._last.get(rank, 0):
            return False
        left_out = CutRange.of(record)
        if left_out is not None:
            self.left_out.append(Gap(rank, left_out.first, left_out.last))
        self._note_missing(rank, seq if left_out is None else left_out.first)
        self._last[rank] = seq
        if is_mark(record) and left_out is None:
            self._order.from_record("/".join(map(str, record.topic)), record.body)
        return True

    def _note_missing(self, rank: int, number: int) -> None:
        expected = self._last.get(rank, 0) + 1
        if number > expected:
            self.gaps.append(Gap(rank, expected, number - 1))


def ranks_in(path: Path) -> set[int]:
    with RecordingReader(path) as reader:
        names = {name for records in reader.read() for name, _ in records}
        found = set(reader.positions)
    for name in names:
        with suppress(ProtocolError):
            found.add(frames.parse_topic(name.encode()).rank)
    return found
