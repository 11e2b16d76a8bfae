"""Order of a stream: turns frames of the event feed and of recordings into snapshots."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from offloop.bus.errors import ConfigurationError, InvalidRunNameError, ProtocolError
from offloop.bus.protocol import frames
from offloop.bus.protocol.frames import (
    DELIMITER,
    EventBody,
    Topic,
    decode_event,
    decode_head,
    decode_scalars,
    decode_whole_event,
    parse_topic,
)
from offloop.bus.protocol.snapshot import CommandSender, Snapshot
from offloop.bus.tensors.view import Fetch
from offloop.bus.types.actor import is_actor
from offloop.bus.types.commands import Command, Outcome
from offloop.bus.types.demand import BASE_EVENTS
from offloop.bus.types.event import OWN, Event
from offloop.bus.types.timestamp import Timestamp

BATCH = 64  # most snapshots in a list: with more, Python's garbage collection runs several times as often

_BASE = frozenset(
    {*(event.value for event in BASE_EVENTS), frames.END, frames.DEMAND, frames.COMMAND, frames.CHECKPOINT}
)
_INNER = frozenset(event.value for event in Event) - _BASE
_STEPS = {event.value: int(event.value in _BASE) for event in Event}

SEVERITY = ("finished", "stopped", "failed", "lost")
"""Statuses of an ending, from best to worst. A run has the worst status of its ranks."""


@dataclass(frozen=True)
class Ending:
    """The ending of a run, or of this reading of it."""

    status: str
    """``finished``, ``stopped`` (on request), ``failed`` (by an exception), or ``lost`` (no ending was recorded)."""
    error: str | None = None
    """Text of the failure."""
    reason: str | None = None
    """Reason of a stop, and its sender."""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Ending":
        """Read the fields of an ``$end`` mark."""
        status, error, reason = (fields.get(name) for name in ("status", "error", "reason"))
        return cls(
            status if status in SEVERITY else "lost",
            None if error is None else str(error),
            None if reason is None else str(reason),
        )

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of an ``$end`` mark."""
        fields = {"status": self.status, "error": self.error}
        return fields if self.reason is None else {**fields, "reason": self.reason}

    def __str__(self) -> str:
        if self.error:
            return f"{self.status}: {self.error}"
        return f"{self.status} ({self.reason})" if self.reason else self.status


def worst_of(endings: Iterable[Ending]) -> Ending:
    """Return the run's ending: the first of its ranks' worst endings, preferably one with a reason."""
    return max(endings, key=lambda ending: (SEVERITY.index(ending.status), ending.reason is not None))


class Gap(NamedTuple):
    """Events of one rank that were published and are lost: numbers ``first`` to ``last``."""

    rank: int
    first: int
    last: int


class CheckpointMark(NamedTuple):
    """Mark in the stream: the training saves a checkpoint here, or has loaded one."""

    action: Literal["save", "load"]
    run: str  # run of the checkpoint
    timestamp: Timestamp  # training time in the checkpoint, which identifies it
    seq: int  # the mark's number in its attempt
    time_ns: int = 0  # time of the mark, in nanoseconds since 1970 (UTC)

    @classmethod
    def from_event(cls, run: str, event: EventBody) -> "CheckpointMark":
        """Read a ``$checkpoint`` mark of a run, or raise ProtocolError."""
        action, checkpoint_run = event.fields.get("action"), event.fields.get("run", run)
        if action not in ("save", "load"):
            raise ProtocolError("a $checkpoint mark neither saves nor loads")
        try:
            name = frames.check_run_name(checkpoint_run)
        except InvalidRunNameError as error:
            raise ProtocolError(str(error)) from None
        return cls(action, name, Timestamp.from_values(event.timestamp), event.seq, event.time)


class Numbers(NamedTuple):
    """Numbers of one event of a rank."""

    seq: int
    base_seq: int


START = Numbers(0, 0)  # numbers before the first event


def base_step(name: str) -> int | None:
    """Return by how much an event of this name increases ``base_seq``; ``None`` for marks and unknown events."""
    return 0 if name.startswith(OWN) else _STEPS.get(name)


def base_seq_problem(name: str, seq: int, base_seq: int, last: tuple[int, int]) -> str | None:
    """Describe a wrong ``base_seq``, or return ``None``. ``last`` are the numbers of an earlier event.

    The events between, and events with unknown names, may be base events or not."""
    last_seq, last_base_seq = last
    low = last_base_seq + (name in _BASE)
    high = last_base_seq + seq - last_seq - (name in _INNER or name.startswith(OWN))
    if low <= base_seq <= high:
        return None
    expected = str(low) if low == high else f"{low} to {high}"
    return f"event {seq} ({name}) has the base_seq {base_seq}, where {expected} belongs"


class Missing(NamedTuple):
    """Events that a reader of the event feed must read from the recording: a rank's events up to these numbers."""

    rank: int
    numbers: Numbers


class _Route(NamedTuple):
    """Parsed topic. ``event`` is ``None`` for marks and for events unknown to this version."""

    rank: int
    name: str
    event: Event | None
    is_base: bool
    is_requested: bool
    decode: Callable[[bytes], Any]


class StreamOrder:
    """Turns frames of one attempt into snapshots: each requested event once, in order. Detects gaps.

    It keeps the reader's position: the last event of each rank. Frames may come from a recording
    (:meth:`from_records`) and from the event feed (:meth:`from_feed`), and may overlap.

    A reader of base events receives all of these and counts them by ``base_seq``. A reader of other events receives all
    events and counts by ``seq``. Either way its events are numbered without holes. So the next frame reveals a loss,
    before any snapshot is returned out of order. :attr:`topics` are the subscriptions for this.

    ``after`` is the position of an earlier reader: for each rank ``(seq, base_seq)`` of the last event already read."""

    def __init__(
        self, run: str, attempt: int, events: Iterable[Event] | None, after: Mapping[int, tuple[int, int]] | None = None
    ) -> None:
        self.run = run
        self.attempt = attempt
        self.events: frozenset[Event] | None = None if events is None else frozenset(events)
        self.gaps: list[Gap] = []
        self.skipped: int = 0  # number of malformed records and of unknown events
        self._base_only = self.events is not None and self.events <= BASE_EVENTS
        self._routes: dict[str | bytes, _Route | None] = {}
        self._reached: dict[int, tuple[int, int]] = dict(after or {})
        # The context of the last event, packed and decoded. Nearly all events have the same.
        self._packed_context: Any = None
        self._context: Any = None
        self.send: CommandSender | None = None
        """Receives the commands sent through its snapshots, see :meth:`Snapshot.bind`."""
        self.fetch: Fetch | None = None
        self._ends: dict[int, Ending] = {}
        self.expected_ranks: int = 1  # number of ranks that publish here, once one of them has ended
        self.outcomes: list[Outcome] = []  # commands answered by the first rank, so far
        self.checkpoints: list[CheckpointMark] = []  # checkpoints saved and loaded by the first rank, so far

    @property
    def topics(self) -> list[str]:
        return [f"{self.run}/{name}/" for name in (frames.BASE if self._base_only else frames.ALL, frames.HEARTBEAT)]

    @property
    def endings(self) -> list[Ending]:
        return list(self._ends.values())

    @property
    def ending(self) -> Ending | None:
        """The run's ending, once every rank that publishes here has ended."""
        if not self._ends or len(self._ends) < self.expected_ranks:
            return None
        return worst_of(self._ends.values())

    def from_record(self, topic: str, body: bytes) -> Snapshot | CheckpointMark | None:
        """Return the snapshot of a record, if requested and new, or the first rank's checkpoint mark."""
        for found in self.from_records([(topic, body)]):
            return found if isinstance(found, CheckpointMark) else found[0]
        return None

    def from_records(self, records: Iterable[tuple[str, bytes]]) -> Iterator[list[Snapshot] | CheckpointMark]:
        """Yield requested and new snapshots in lists, and the first rank's checkpoint marks.

        Events missing before a record are a gap. A list ends before a record with any other effect than a next event:
        that effect comes after the list was handled."""
        for found in self._follow(records, is_live=False):
            if not isinstance(found, Missing):
                yield found

    def from_feed(self, frames: Sequence[bytes]) -> Iterator[list[Snapshot] | CheckpointMark | Missing]:
        """Process a batch of the event feed, as :meth:`from_records`.

        At a loss it ends: :class:`Missing` covers the lost events and the rest of the batch."""
        for found in self._follow((frame.partition(DELIMITER)[::2] for frame in frames), is_live=True):
            if isinstance(found, Missing):
                with suppress(ProtocolError):
                    last = decode_head(frames[-1].partition(DELIMITER)[2])
                    found = found._replace(numbers=Numbers(last.seq, last.base_seq))
            yield found

    def _follow(
        self, records: Iterable[tuple[str | bytes, bytes]], is_live: bool
    ) -> Iterator[list[Snapshot] | CheckpointMark | Missing]:
        reached, run, base_only = self._reached, self.run, self._base_only
        routes, attempt = self._routes, self.attempt
        packed_context, context = self._packed_context, self._context
        send, fetch = self.send, self.fetch
        batch: list[Snapshot] = []
        for topic, body in records:
            route = routes.get(topic) or self._route(topic)
            if route is None:
                continue
            rank, _, kind, is_base, is_requested, decode = route
            try:
                event = decode(body)
            except ProtocolError:
                self.skipped += 1
                continue
            if event.attempt != attempt:
                continue
            seq, base_seq = event.seq, event.base_seq
            last_seq, last_base_seq = reached.get(rank, START)
            if (
                base_seq == last_base_seq + is_base
                and (seq == last_seq + 1 or (base_only and seq > last_seq))
                and kind is not None
            ):
                # Nearly every event follows its predecessor.
                reached[rank] = seq, base_seq
                if is_requested:
                    if event.context_ != packed_context:
                        packed_context, context = event.context_, decode_scalars(event.context_)
                        self._packed_context, self._context = packed_context, context
                    event.context_ = context
                    batch.append(Snapshot(kind, run, rank, event, send, fetch))
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
        """Return events missing at the broker's positions, ``{rank: (seq, base_seq)}``; ``None`` if none are."""
        for rank, position in positions.items():
            if self._number(position) > self._last_number(rank):
                return Missing(rank, Numbers(*position))
        return None

    def lag(self, positions: dict[int, tuple[int, int]]) -> int:
        """Return the number of events, of all ranks, by which the broker's positions are ahead."""
        return sum(max(0, self._number(position) - self._last_number(rank)) for rank, position in positions.items())

    def is_filled(self, missing: Missing) -> bool:
        return self._last_number(missing.rank) >= self._number(missing.numbers)

    def skip_to(self, positions: Mapping[int, tuple[int, int]]) -> None:
        """Continue after positions of ``(seq, base_seq)``; earlier events are not missing."""
        self._reached |= positions

    def accept_gap(self, missing: Missing) -> None:
        """Count missing events as lost for good."""
        self.gaps.append(Gap(missing.rank, self._last_number(missing.rank) + 1, self._number(missing.numbers)))
        self._reached[missing.rank] = missing.numbers

    def _last_number(self, rank: int) -> int:
        return self._number(self._reached.get(rank, START))

    def _number(self, position: tuple[int, int]) -> int:
        return position[1] if self._base_only else position[0]

    def _numbers(self, route: _Route, event: EventBody) -> tuple[int, int] | None:
        """Return an event's number and the expected number; ``None`` for an old or irrelevant event."""
        # Only seq makes an event old: every event has its own, while base_seq may be wrong.
        if event.seq <= self._reached.get(route.rank, START)[0]:
            return None
        number = event.base_seq if self._base_only else event.seq
        if self._base_only and route.name == frames.CUT and event.fields.get("base_first") == number + 1:
            # The cut has no base events; its base_seq belongs to an earlier event.
            return None
        return number, self._last_number(route.rank) + 1

    def _first_covered(self, route: _Route, event: EventBody, number: int) -> int:
        """Return the first number that a frame covers: its own, or the first that a cut removed."""
        first = event.fields.get("base_first" if self._base_only else "first") if route.name == frames.CUT else None
        return min(first, number) if type(first) is int else number

    def _accept(self, route: _Route, event: EventBody) -> Snapshot | CheckpointMark | None:
        self._reached[route.rank] = event.seq, event.base_seq
        if route.event is not None:
            if not route.is_requested:
                return None
            return Snapshot(route.event, self.run, route.rank, event, self.send, self.fetch)
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
        if is_actor(rank):
            return
        self._ends[rank] = Ending.from_fields(event.fields)
        # On several hosts, each recording has the ranks of one host.
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
        except ConfigurationError:
            # An unknown event is numbered like others, and must not appear as lost.
            return _Route(topic.rank, topic.name, None, False, False, decode_whole_event)
        is_base = event in BASE_EVENTS
        if self._base_only and not is_base:
            return None
        is_requested = self.events is None or event.is_in(self.events)
        decode = decode_event if is_requested else decode_head
        return _Route(topic.rank, topic.name, event, is_base, is_requested, decode)
