"""From frames to snapshots in order: what the event feed and recordings have in common."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from offloop.bus.errors import InvalidRunNameError, ProtocolError
from offloop.bus.protocol import frames
from offloop.bus.protocol.frames import DELIMITER, EventBody, Topic, decode_event, decode_whole_event, parse_topic
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.commands import Command, Outcome
from offloop.bus.types.demand import BASE_EVENTS
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp

BATCH = 256
"""Snapshots in a list at most."""

_BASE = frozenset(
    {*(event.value for event in BASE_EVENTS), frames.END, frames.DEMAND, frames.COMMAND, frames.CHECKPOINT}
)
_INNER = frozenset(event.value for event in Event) - _BASE
BASE_STEPS = {event.value: int(event.value in _BASE) for event in Event}
"""The increase of ``base_seq`` by an event; of events alone, not of marks."""

SEVERITY = ("finished", "stopped", "failed", "lost")
"""The statuses of a rank's ending, the worst last; the worst of all ranks is the run's."""


@dataclass(frozen=True)
class Ending:
    """The ending of a run, or of this reading of it."""

    status: str
    """``finished``, ``stopped`` (on request), ``failed`` (an exception ended it), or ``lost`` (it ended without a
    word)."""
    error: str | None = None
    """The text of the failure."""
    reason: str | None = None
    """Why it was stopped, and by whom."""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Ending":
        """Reads the fields of an ``$end`` mark."""
        status, error, reason = (fields.get(name) for name in ("status", "error", "reason"))
        return cls(
            status if status in SEVERITY else "lost",
            None if error is None else str(error),
            None if reason is None else str(reason),
        )

    def to_fields(self) -> dict[str, Any]:
        """The fields of an ``$end`` mark."""
        fields = {"status": self.status, "error": self.error}
        return fields if self.reason is None else {**fields, "reason": self.reason}

    def __str__(self) -> str:
        if self.error:
            return f"{self.status}: {self.error}"
        return f"{self.status} ({self.reason})" if self.reason else self.status


def worst_of(endings: Iterable[Ending]) -> Ending:
    """The ending of a run by those of its ranks: the first of the worst, with a reason if one has it."""
    return max(endings, key=lambda ending: (SEVERITY.index(ending.status), ending.reason is not None))


class Gap(NamedTuple):
    """Events of one rank that were published and are lost: numbers ``first`` to ``last``."""

    rank: int
    first: int
    last: int


class CheckpointMark(NamedTuple):
    """At this place of the stream the training saves a checkpoint, or has loaded one."""

    action: Literal["save", "load"]
    run: str
    """The run that the checkpoint is of."""
    timestamp: Timestamp
    """The training time in the checkpoint, which distinguishes it from others."""
    seq: int
    """The mark's number in its attempt."""
    time_ns: int = 0
    """When that was, in nanoseconds since 1970 (UTC)."""

    @classmethod
    def from_event(cls, run: str, event: EventBody) -> "CheckpointMark":
        """Reads a ``$checkpoint`` mark of a run. Raises ProtocolError for a malformed one."""
        action, checkpoint_run = event.fields.get("action"), event.fields.get("run", run)
        if action not in ("save", "load"):
            raise ProtocolError("a $checkpoint mark neither saves nor loads")
        try:
            name = frames.check_run_name(checkpoint_run)
        except InvalidRunNameError as error:
            raise ProtocolError(str(error)) from None
        return cls(action, name, Timestamp.from_values(event.timestamp), event.seq, event.time)


class Numbers(NamedTuple):
    """The numbers of one event of a rank."""

    seq: int
    base_seq: int


START = Numbers(0, 0)
"""Those before the first event."""


def base_seq_problem(name: str, seq: int, base_seq: int, last: tuple[int, int]) -> str | None:
    """Describes a wrong ``base_seq`` of an event; ``last`` are ``seq`` and ``base_seq`` of one before it. Those
    between the two may be base events or not, and so may one of a name that is not known."""
    last_seq, last_base_seq = last
    low = last_base_seq + (name in _BASE)
    high = last_base_seq + seq - last_seq - (name in _INNER)
    if low <= base_seq <= high:
        return None
    expected = str(low) if low == high else f"{low} to {high}"
    return f"event {seq} ({name}) has the base_seq {base_seq}, where {expected} belongs"


class Missing(NamedTuple):
    """Events that a reader of the event feed has to take from the recording: all of a rank up to those numbers."""

    rank: int
    numbers: Numbers


class _Route(NamedTuple):
    """The meaning of a topic's text; marks, and events that this version does not know, have no event."""

    rank: int
    name: str
    event: Event | None
    is_base: bool
    """It is counted among the base events."""
    is_requested: bool


class StreamOrder:
    """Turns frames of one attempt of a run into snapshots: each requested event once, in order, with gaps noticed.

    It holds the position of a reader: the number of the last event of each rank that it has seen. Frames may come
    from a recording (:meth:`from_records`) and from the event feed (:meth:`from_feed`), and may overlap.

    A reader that requests base events alone receives all of those and counts them by ``base_seq``; one that requests
    others too receives everything and counts by ``seq``. Either way what it receives is numbered without holes, so a
    loss shows at the very next frame, before anything is given out of order. :attr:`topics` are the subscriptions for
    that.

    ``after`` is where an earlier reader stopped: of each rank ``(seq, base_seq)`` of the last event that need not come
    again."""

    def __init__(
        self, run: str, attempt: int, events: Iterable[Event] | None, after: Mapping[int, tuple[int, int]] | None = None
    ) -> None:
        self.run = run
        self.attempt = attempt
        self.events = None if events is None else frozenset(events)
        self.gaps: list[Gap] = []
        self.skipped = 0
        """Records that were not messages of the protocol, or of an event that this version does not know."""
        self._base_only = self.events is not None and self.events <= BASE_EVENTS
        self._routes: dict[str | bytes, _Route | None] = {}
        self._reached: dict[int, tuple[int, int]] = dict(after or {})
        self._ends: dict[int, Ending] = {}
        self.expected_ranks = 1
        """Number of ranks that publish here, once one of them has ended."""
        self.outcomes: list[Outcome] = []
        """The commands that the first rank has answered, as far as it was read."""
        self.checkpoints: list[CheckpointMark] = []
        """The checkpoints that the first rank has saved and loaded, as far as it was read."""

    @property
    def topics(self) -> list[str]:
        """The subscriptions on the event feed."""
        return [f"{self.run}/{name}/" for name in (frames.BASE if self._base_only else frames.ALL, frames.HEARTBEAT)]

    @property
    def endings(self) -> list[Ending]:
        """The endings of the ranks that have ended."""
        return list(self._ends.values())

    @property
    def ending(self) -> Ending | None:
        """The run's ending, once every rank that publishes here has ended: the worst of theirs."""
        if not self._ends or len(self._ends) < self.expected_ranks:
            return None
        return worst_of(self._ends.values())

    def from_record(self, topic: str, body: bytes) -> Snapshot | CheckpointMark | None:
        """The snapshot in a record, if it is requested and new, or the first rank's mark of a checkpoint."""
        for found in self.from_records([(topic, body)]):
            return found if isinstance(found, CheckpointMark) else found[0]
        return None

    def from_records(self, records: Iterable[tuple[str, bytes]]) -> Iterator[list[Snapshot] | CheckpointMark]:
        """The requested and new snapshots in records, in lists, and the first rank's marks of checkpoints. What is
        missing before a record is missing for good: a gap. A list ends where anything else comes than an event that
        follows the one before it: that takes effect once the list has been handled."""
        for found in self._follow(records, is_live=False):
            if not isinstance(found, Missing):
                yield found

    def from_feed(self, frames: Sequence[bytes]) -> Iterator[list[Snapshot] | CheckpointMark | Missing]:
        """As :meth:`from_records`, of a batch of the event feed: it ends with what is missing before one of its
        events, if something is, and with that all that follows in the batch."""
        parts = [frame.partition(DELIMITER) for frame in frames]
        for found in self._follow(((topic, body) for topic, _, body in parts), is_live=True):
            if isinstance(found, Missing):
                with suppress(ProtocolError):
                    last = decode_event(parts[-1][2])
                    found = found._replace(numbers=Numbers(last.seq, last.base_seq))
            yield found

    def _follow(
        self, records: Iterable[tuple[str | bytes, bytes]], is_live: bool
    ) -> Iterator[list[Snapshot] | CheckpointMark | Missing]:
        reached, run, base_only = self._reached, self.run, self._base_only
        routes, attempt = self._routes, self.attempt
        batch: list[Snapshot] = []
        for topic, body in records:
            route = routes.get(topic) or self._route(topic)
            if route is None:
                continue
            try:
                # All readers have to understand marks; the maps of other events may never be looked at.
                event = decode_event(body) if route.event is not None else decode_whole_event(body)
            except ProtocolError:
                self.skipped += 1
                continue
            if event.attempt != attempt:
                continue
            seq, base_seq = event.seq, event.base_seq
            last_seq, last_base_seq = reached.get(route.rank, START)
            if (
                route.event is not None
                and base_seq == last_base_seq + route.is_base
                and (seq == last_seq + 1 or (base_only and seq > last_seq))
            ):
                # Nearly all follow the event before them.
                reached[route.rank] = seq, base_seq
                if route.is_requested:
                    batch.append(Snapshot(route.event, run, route.rank, event))
                    if len(batch) == BATCH:
                        yield batch
                        batch = []
                continue
            if batch:
                yield batch
                batch = []
            numbers = self._numbers(route, event)
            if numbers is None:
                continue
            number, expected = numbers
            if number > expected and (first := self._first_covered(route, event, number)) > expected:
                if is_live:
                    yield Missing(route.rank, Numbers(seq, base_seq))
                    return
                self.gaps.append(Gap(route.rank, expected, first - 1))
            accepted = self._accept(route, event)
            if isinstance(accepted, CheckpointMark):
                yield accepted
            elif accepted is not None:
                batch.append(accepted)
        if batch:
            yield batch

    def missing_at(self, positions: dict[int, tuple[int, int]]) -> Missing | None:
        """The events missing at the broker's positions, ``{rank: (seq, base_seq)}``; ``None`` if none are."""
        for rank, position in positions.items():
            if self._number(position) > self._last_number(rank):
                return Missing(rank, Numbers(*position))
        return None

    def lag(self, positions: dict[int, tuple[int, int]]) -> int:
        """Number of events that the broker's positions are ahead, of all ranks."""
        return sum(max(0, self._number(position) - self._last_number(rank)) for rank, position in positions.items())

    def is_filled(self, missing: Missing) -> bool:
        """The missing events have been read."""
        return self._last_number(missing.rank) >= self._number(missing.numbers)

    def skip_to(self, positions: Mapping[int, tuple[int, int]]) -> None:
        """Continues after these positions, of each rank ``(seq, base_seq)``: what lies before is not missing."""
        self._reached |= positions

    def accept_gap(self, missing: Missing) -> None:
        """Counts the missing events as lost for good: a gap."""
        self.gaps.append(Gap(missing.rank, self._last_number(missing.rank) + 1, self._number(missing.numbers)))
        self._reached[missing.rank] = missing.numbers

    def _last_number(self, rank: int) -> int:
        return self._number(self._reached.get(rank, START))

    def _number(self, position: tuple[int, int]) -> int:
        return position[1] if self._base_only else position[0]

    def _numbers(self, route: _Route, event: EventBody) -> tuple[int, int] | None:
        """The number of an event and the one that is next; ``None`` if it is old, or none of ours."""
        # By ``seq``, which every event has of its own: a wrong ``base_seq`` makes no event old.
        if event.seq <= self._reached.get(route.rank, START)[0]:
            return None
        number = event.base_seq if self._base_only else event.seq
        if self._base_only and route.name == frames.CUT and event.fields.get("base_first") == number + 1:
            # In the place of events that this reader is not given either: the number that it bears is of one before.
            return None
        return number, self._last_number(route.rank) + 1

    def _first_covered(self, route: _Route, event: EventBody, number: int) -> int:
        """The first of the numbers that a frame stands for: its own, or the first that was left out on purpose."""
        first = event.fields.get("base_first" if self._base_only else "first") if route.name == frames.CUT else None
        return min(first, number) if type(first) is int else number

    def _accept(self, route: _Route, event: EventBody) -> Snapshot | CheckpointMark | None:
        self._reached[route.rank] = event.seq, event.base_seq
        if route.event is not None:
            return Snapshot(route.event, self.run, route.rank, event) if route.is_requested else None
        if route.name == frames.END:
            self._note_end(route.rank, event)
        elif route.name == frames.COMMAND:
            self._note_command(route.rank, event)
        elif route.name == frames.CHECKPOINT:
            return self._checkpoint_mark(route.rank, event)
        elif route.name not in (frames.CUT, frames.DEMAND):
            self.skipped += 1
        return None

    def _note_command(self, rank: int, event: EventBody) -> None:
        try:
            command = Command.from_wire(event.fields)
        except ProtocolError:
            self.skipped += 1
            return
        if rank == 0:
            outcome = {"batch": event.timestamp.batch, **event.fields}
            self.outcomes.append(Outcome.from_wire(command, outcome)._replace(time_ns=event.time))

    def _checkpoint_mark(self, rank: int, event: EventBody) -> CheckpointMark | None:
        try:
            mark = CheckpointMark.from_event(self.run, event)
        except ProtocolError:
            self.skipped += 1
            return None
        if rank:
            return None
        self.checkpoints.append(mark)
        return mark

    def _note_end(self, rank: int, event: EventBody) -> None:
        world_size = event.context.get("world_size")
        if isinstance(world_size, int) and rank >= world_size:
            return  # an actor that is not a rank: the run does not end with it
        self._ends[rank] = Ending.from_fields(event.fields)
        # Of a run on several hosts each recording has the ranks of one.
        size = event.context.get("local_world_size", event.context.get("world_size", 1))
        self.expected_ranks = size if isinstance(size, int) else 1

    def _route(self, text: str | bytes) -> _Route | None:
        try:
            return self._routes[text]
        except KeyError:
            route = self._routes[text] = self._parse_route(text)
            return route

    def _parse_route(self, text: str | bytes) -> _Route | None:
        try:
            topic: Topic = parse_topic(text.encode() if isinstance(text, str) else text)
        except ProtocolError:
            self.skipped += 1
            return None
        if topic.run != self.run:
            return None
        try:
            event = Event(topic.name)
        except ValueError:
            # It is numbered like every other, so it must not look like a loss.
            return _Route(topic.rank, topic.name, None, False, False)
        is_base = event in BASE_EVENTS
        if self._base_only and not is_base:
            return None
        return _Route(topic.rank, topic.name, event, is_base, self.events is None or event in self.events)
