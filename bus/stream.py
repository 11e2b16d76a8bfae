"""From frames to snapshots in order: what live streams and recordings have in common."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from bus.errors import ProtocolError
from bus.event import Event
from bus.snapshot import Snapshot
from bus.wire import END, EventBody, Topic, decode_event, parse_topic

__all__ = ["Ending", "Gap", "Missing", "StreamOrder"]

_SEVERITY = ("finished", "stopped", "failed", "lost")


@dataclass(frozen=True)
class Ending:
    """How a run ended, or this reading of it."""

    status: str
    """``finished``, ``stopped`` (on request), ``failed`` (an exception ended it), or ``lost`` (it ended without a word)."""
    error: str | None = None
    """The text of the failure."""

    def __str__(self) -> str:
        return f"{self.status}: {self.error}" if self.error else self.status


class Gap(NamedTuple):
    """Events that were published and never arrived: numbers ``first`` to ``last`` of one event on one rank."""

    rank: int
    event: Event
    first: int
    last: int


class Missing(NamedTuple):
    """What a reader of the live stream lacks and has to take from the recording: everything up to that number of that event."""

    rank: int
    event: Event
    number: int


class _Place(NamedTuple):
    """What a topic's text means; the end of a rank has no event."""

    rank: int
    event: Event | None


class StreamOrder:
    """Turns frames of one attempt of a run into snapshots: each wanted event once, in order, with gaps noticed.

    It holds the position of a reader: per rank the last number handled, per rank and event the last of its kind. Frames may come from a
    recording (:meth:`from_record`) and from the live stream (:meth:`from_live`), and may overlap.
    """

    def __init__(self, run: str, attempt: int, events: Iterable[Event] | None) -> None:
        self.run = run
        self.attempt = attempt
        self.events = None if events is None else frozenset(events)
        self.gaps: list[Gap] = []
        self.skipped = 0
        """Records that were not messages of the protocol, or of an event that this version does not know."""
        self._places: dict[str, _Place | None] = {}
        self._last: dict[int, int] = {}
        self._numbers: dict[tuple[int, Event], int] = {}
        self._ends: dict[int, Ending] = {}
        self._world_size = 1

    @property
    def ending(self) -> Ending | None:
        """How the run ended, once every rank has ended: the worst of the ranks' endings."""
        if not self._ends or len(self._ends) < self._world_size:
            return None
        return max(self._ends.values(), key=lambda ending: _SEVERITY.index(ending.status))

    def from_record(self, topic: str, body: bytes) -> Snapshot | None:
        """The snapshot in a record, if it is wanted and new. What is missing before it is missing for good: a gap."""
        place = self._place(topic)
        if place is None:
            return None
        event = self._decode(body)
        if event is None or event.seq <= self._last.get(place.rank, 0):
            return None
        if place.event is not None:
            expected = self._numbers.get((place.rank, place.event), 0) + 1
            if event.number > expected:
                self.gaps.append(Gap(place.rank, place.event, expected, event.number - 1))
        return self._accept(place, event)

    def from_live(self, topic: str, body: bytes) -> Snapshot | Missing | None:
        """The snapshot in a live frame, if it is wanted, new and next; what is missing before it, if something is; else ``None``."""
        place = self._place(topic)
        if place is None:
            return None
        event = self._decode(body)
        if event is None or event.seq <= self._last.get(place.rank, 0):
            return None
        if place.event is None:
            missing = self.behind(place.rank, event.fields.get("numbers"))
            if missing is not None:
                return missing
        elif event.number > self._numbers.get((place.rank, place.event), 0) + 1:
            return Missing(place.rank, place.event, event.number)
        return self._accept(place, event)

    def behind(self, rank: int, numbers: Any) -> Missing | None:
        """Compares with how many events of each name there were on a rank; what is missing, if something is."""
        for name, number in numbers.items() if isinstance(numbers, dict) else ():
            place = self._place(f"{self.run}/{name}/{rank}")
            if place and place.event and number > self._numbers.get((rank, place.event), 0):
                return Missing(rank, place.event, number)
        return None

    def has(self, missing: Missing) -> bool:
        """Whether what was missing has been read."""
        return self._numbers.get((missing.rank, missing.event), 0) >= missing.number

    def _accept(self, place: _Place, event: EventBody) -> Snapshot | None:
        self._last[place.rank] = event.seq
        if place.event is None:
            self._note_end(place.rank, event)
            return None
        self._numbers[place.rank, place.event] = event.number
        return Snapshot(place.event, self.run, place.rank, event)

    def _note_end(self, rank: int, event: EventBody) -> None:
        status, error = event.fields.get("status"), event.fields.get("error")
        self._ends[rank] = Ending(status if status in _SEVERITY else "lost", None if error is None else str(error))
        world_size = event.context.get("world_size", 1)
        self._world_size = world_size if isinstance(world_size, int) else 1

    def _decode(self, body: bytes) -> EventBody | None:
        try:
            event = decode_event(body)
        except ProtocolError:
            self.skipped += 1
            return None
        return event if event.attempt == self.attempt else None

    def _place(self, text: str) -> _Place | None:
        try:
            return self._places[text]
        except KeyError:
            place = self._places[text] = self._find_place(text)
            return place

    def _find_place(self, text: str) -> _Place | None:
        try:
            topic: Topic = parse_topic(text.encode())
        except ProtocolError:
            self.skipped += 1
            return None
        if topic.run != self.run:
            return None
        if topic.name == END:
            return _Place(topic.rank, None)
        try:
            event = Event(topic.name)
        except ValueError:
            self.skipped += 1
            return None
        wanted = self.events is None or event in self.events
        return _Place(topic.rank, event) if wanted else None
