"""From frames to snapshots in order: what the event feed and recordings have in common."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from offloop.bus.errors import InvalidRunNameError, ProtocolError
from offloop.bus.protocol.frames import (
    ALL,
    BASE,
    CHECKPOINT,
    COMMAND,
    CUT,
    DELIMITER,
    DEMAND,
    END,
    HEARTBEAT,
    EventBody,
    Topic,
    check_run_name,
    decode_event,
    decode_whole_event,
    parse_topic,
)
from offloop.bus.protocol.numbering import START, Numbering, Numbers
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.commands import Command, Outcome
from offloop.bus.types.demand import BASE_EVENTS, Demand
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp

BATCH = 256
"""Snapshots in a list at most."""

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
            name = check_run_name(checkpoint_run)
        except InvalidRunNameError as error:
            raise ProtocolError(str(error)) from None
        return cls(action, name, Timestamp.from_values(event.timestamp), event.seq, event.time)


class DemandActive(NamedTuple):
    """From where on a rank publishes what was asked for."""

    seq: int
    """Every event after this number."""
    timestamp: Timestamp
    """Training time there."""


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
    from a recording (:meth:`from_record`) and from the event feed (:meth:`from_live`), and may overlap.

    A reader that requests base events alone receives all of those and counts them by ``base_seq``; one that requests
    others too receives everything and counts by ``seq``. Either way what it receives is numbered without holes, so a
    loss shows at the very next frame, before anything is given out of order. :attr:`topics` are the subscriptions for
    that.

    ``demand`` is what the reader asks of the training; :attr:`in_effect` says from where on it is met. ``after`` is
    where an earlier reader stopped: of each rank ``(seq, base_seq)`` of the last event that need not come
    again."""

    def __init__(
        self,
        run: str,
        attempt: int,
        events: Iterable[Event] | None,
        after: Mapping[int, tuple[int, int]] | None = None,
        demand: Demand | None = None,
    ) -> None:
        self.run = run
        self.attempt = attempt
        self.events = None if events is None else frozenset(events)
        self.gaps: list[Gap] = []
        self.skipped = 0
        """Records that were not messages of the protocol, or of an event that this version does not know."""
        self._base_only = self.events is not None and self.events <= BASE_EVENTS
        self._routes: dict[str | bytes, _Route | None] = {}
        self._numbering = Numbering(after)
        self._ends: dict[int, Ending] = {}
        self.expected_ranks = 1
        """Number of ranks that publish here, once one of them has ended."""
        self.outcomes: list[Outcome] = []
        """The commands that the first rank has answered, as far as it was read."""
        self.checkpoints: list[CheckpointMark] = []
        """The checkpoints that the first rank has saved and loaded, as far as it was read."""
        self._demand = (demand or Demand()).content
        self.in_effect: dict[int, DemandActive] = {}
        """Of each rank that has said so: from where on it meets the demand, up to the last event that was read."""

    @property
    def topics(self) -> list[str]:
        """The subscriptions on the event feed."""
        return [f"{self.run}/{name}/" for name in (BASE if self._base_only else ALL, HEARTBEAT)]

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

    def from_record(self, topic: str | bytes, body: bytes) -> Snapshot | CheckpointMark | None:
        """The snapshot in a record, if it is requested and new, or the first rank's mark of a checkpoint. What is
        missing before it is missing for good: a gap."""
        found = self._find(topic, body)
        return None if found is None else self._take_recorded(*found)

    def in_batches(self, records: Iterable[tuple[str, bytes]]) -> Iterator[list[Snapshot] | CheckpointMark]:
        """As :meth:`from_record` for several records, with the snapshots in lists. A list ends where anything else
        comes than an event that follows the one before it: that takes effect once the list has been handled."""
        reached, run, base_only = self._numbering.reached, self.run, self._base_only
        routes, attempt = self._routes, self.attempt
        batch: list[Snapshot] = []
        for topic, body in records:
            route = routes.get(topic) or self._route(topic)
            if route is None:
                continue
            event = self._decode(route, body)
            if event is None or event.attempt != attempt:
                continue
            seq, base_seq = event.seq, event.base_seq
            last_seq, last_base_seq = reached.get(route.rank, START)
            if (
                route.event is not None
                and base_seq == last_base_seq + route.is_base
                and (seq == last_seq + 1 or (base_only and seq > last_seq))
            ):
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
            taken = self._take_recorded(route, event)
            if isinstance(taken, CheckpointMark):
                yield taken
            elif taken is not None:
                batch.append(taken)
        if batch:
            yield batch

    def _take_recorded(self, route: _Route, event: EventBody) -> Snapshot | CheckpointMark | None:
        numbers = self._numbers(route, event)
        if numbers is None:
            return None
        number, expected = numbers
        if number > expected and (first := self._first_covered(route, event, number)) > expected:
            self.gaps.append(Gap(route.rank, expected, first - 1))
        return self._accept(route, event)

    def from_records(self, records: Iterable[tuple[str, bytes]]) -> Iterator[Snapshot | CheckpointMark]:
        """As :meth:`from_record`, of several records."""
        for found in self.in_batches(records):
            if isinstance(found, CheckpointMark):
                yield found
            else:
                yield from found

    def from_live(self, topic: bytes, body: bytes) -> Snapshot | CheckpointMark | Missing | None:
        """The snapshot in a live frame, if it is requested, new and next, or the first rank's mark of a checkpoint;
        what is missing before it, if something is; else ``None``."""
        found = self._find(topic, body)
        numbers = None if found is None else self._numbers(*found)
        if found is None or numbers is None:
            return None
        (route, event), (number, expected) = found, numbers
        if number > expected and self._first_covered(route, event, number) > expected:
            return Missing(route.rank, Numbers(event.seq, event.base_seq))
        return self._accept(route, event)

    def from_batch(
        self, frames: Sequence[bytes], take: Callable[[Snapshot | CheckpointMark], object]
    ) -> Missing | None:
        """Passes to ``take`` what :meth:`from_live` gives of each frame of a batch. What is missing before one, if
        something is: then the frames from there on are missing, too."""
        reached, run, base_only, attempt = self._numbering.reached, self.run, self._base_only, self.attempt
        topic, front, size, route = b"", DELIMITER, 0, None
        for frame in frames:
            if not frame.startswith(front):
                topic, _, _ = frame.partition(DELIMITER)
                front, size, route = topic + DELIMITER, len(topic) + 1, self._route(topic)
            body = frame[size:]
            if route is not None and route.event is not None:
                # Nearly all follow the event before them.
                try:
                    event = decode_event(body)
                except ProtocolError:
                    self.skipped += 1
                    continue
                seq, base_seq = event.seq, event.base_seq
                last_seq, last_base_seq = reached.get(route.rank, START)
                if (
                    base_seq == last_base_seq + route.is_base
                    and (seq == last_seq + 1 or (base_only and seq > last_seq))
                    and event.attempt == attempt
                ):
                    reached[route.rank] = seq, base_seq
                    if route.is_requested:
                        take(Snapshot(route.event, run, route.rank, event))
                    continue
            found = self.from_live(topic, body)
            if isinstance(found, Missing):
                with suppress(ProtocolError):
                    last = decode_event(frames[-1].partition(DELIMITER)[2])
                    found = found._replace(numbers=Numbers(last.seq, last.base_seq))
                return found
            if found is not None:
                take(found)
        return None

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
        for rank, position in positions.items():
            self._numbering.skip_to(rank, Numbers(*position))

    def accept_gap(self, missing: Missing) -> None:
        """Counts the missing events as lost for good: a gap."""
        self.gaps.append(Gap(missing.rank, self._last_number(missing.rank) + 1, self._number(missing.numbers)))
        self._numbering.skip_to(missing.rank, missing.numbers)

    @property
    def problems(self) -> list[str]:
        """The wrong numbers of the events that were read, one line for each rank."""
        return self._numbering.problems

    def _last_number(self, rank: int) -> int:
        return self._number(self._numbering.last(rank))

    def _number(self, position: tuple[int, int]) -> int:
        return position[1] if self._base_only else position[0]

    def _numbers(self, route: _Route, event: EventBody) -> tuple[int, int] | None:
        """The number of an event and the one that is next; ``None`` if it is old, or none of ours."""
        # By ``seq``, which every event has of its own: a wrong ``base_seq`` makes no event old.
        if event.seq <= self._numbering.last(route.rank).seq:
            return None
        number = event.base_seq if self._base_only else event.seq
        if self._base_only and route.name == CUT and event.fields.get("base_first") == number + 1:
            # In the place of events that this reader is not given either: the number that it bears is of one before.
            return None
        return number, self._last_number(route.rank) + 1

    def _first_covered(self, route: _Route, event: EventBody, number: int) -> int:
        """The first of the numbers that a frame stands for: its own, or the first that was left out on purpose."""
        first = event.fields.get("base_first" if self._base_only else "first") if route.name == CUT else None
        return min(first, number) if type(first) is int else number

    def _accept(self, route: _Route, event: EventBody) -> Snapshot | CheckpointMark | None:
        self._numbering.follow(route.rank, route.name, event.seq, event.base_seq)
        if route.event is not None:
            return Snapshot(route.event, self.run, route.rank, event) if route.is_requested else None
        if route.name == END:
            self._note_end(route.rank, event)
        elif route.name == DEMAND:
            self._note_demand(route.rank, event)
        elif route.name == COMMAND:
            self._note_command(route.rank, event)
        elif route.name == CHECKPOINT:
            return self._checkpoint_mark(route.rank, event)
        elif route.name != CUT:
            self.skipped += 1
        return None

    def _note_demand(self, rank: int, event: EventBody) -> None:
        try:
            demand = Demand.from_wire(event.fields.get("demand")).content
        except ProtocolError:
            self.skipped += 1
            return
        if Demand.merge([demand, self._demand]) != demand:
            self.in_effect.pop(rank, None)
        else:
            self.in_effect.setdefault(rank, DemandActive(event.seq, Timestamp.from_values(event.timestamp)))

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

    def _decode(self, route: _Route, body: bytes) -> EventBody | None:
        try:
            # All readers have to understand marks; the maps of other events may never be looked at.
            return decode_event(body) if route.event is not None else decode_whole_event(body)
        except ProtocolError:
            self.skipped += 1
            return None

    def _find(self, topic: str | bytes, body: bytes) -> tuple[_Route, EventBody] | None:
        """The event in a frame, old or new, unless it is none of ours."""
        route = self._route(topic)
        event = None if route is None else self._decode(route, body)
        return None if route is None or event is None or event.attempt != self.attempt else (route, event)

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
