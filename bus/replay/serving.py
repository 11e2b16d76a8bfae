"""Serves a recording as if it were live: a broker is fed what the publishers of the run once sent, at their pace."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from bus.errors import ProtocolError, RecordingError
from bus.net.curve import ClientSecurity
from bus.protocol.frames import (
    CUT,
    END,
    MAX_FRAME,
    EventBody,
    Topic,
    decode_event,
    event_encoder,
    pack_map,
    parse_topic,
)
from bus.protocol.numbering import Numbering
from bus.protocol.order import SEVERITY, Ending
from bus.protocol.snapshot import Snapshot
from bus.publisher.connection import connect
from bus.recording.reader import RecordingReader
from bus.recording.recording import Recording
from bus.recording.window import Bound, Window, recording_began
from bus.replay.feed import Feed, reframe, wait_for_any
from bus.replay.pace import Pace
from bus.runs.origin import Origin
from bus.types.demand import BASE_EVENTS
from bus.types.event import Event
from bus.types.timeouts import Timeouts
from bus.types.timestamp import Timestamp

MAX_RANKS = 1024
ROUND_EVENTS = 256

_NO_END = Ending("lost", "the recording ends without saying how the run ended")
_STOPPED = Ending("stopped")


class ServedReplay(NamedTuple):
    """What became of one replay."""

    run_name: str
    events: int
    """How many were served, marks such as commands not counted."""
    ending: Ending
    """How the served run ended."""
    damage: str | None
    """What of the recording could not be read."""


class _Recorded(NamedTuple):
    """One record of the run."""

    topic: Topic
    event: EventBody
    body: bytes
    left_out: int = 0
    """How many events of its rank before it are not replayed."""
    base_left_out: int = 0

    @property
    def covers(self) -> tuple[int, int]:
        """How many numbers it stands for, among all events and among base events."""
        event = self.event
        first, base_first = event.fields.get("first"), event.fields.get("base_first")
        if self.topic.name == CUT and type(first) is type(base_first) is int:
            return event.seq - first + 1, event.base_seq - base_first + 1
        return 1, int(self.topic.name.startswith("$") or self.topic.name in _BASE_NAMES)


_BASE_NAMES = frozenset(event.value for event in BASE_EVENTS)


class _Rank:
    """One rank of the served run."""

    def __init__(self, feed: Feed, topic: Topic) -> None:
        self.feed = feed
        self.topic = topic
        self.seq = self.base_seq = self.time = 0
        """Of the last event, as they are served."""
        self.left_out = self.base_left_out = 0
        """How many events were left out so far because they are not to be replayed."""
        self.ending: Ending | None = None


class ReplayServer:
    """Serves a recording, to any number of consumers, as a run of its own: each event as it was recorded, with its
    time, its number, and what it holds. Only the name of the run and the attempt are those of the new one. A part of a
    recording is numbered from 1. Where events are missing in the recording, they are missing in the run; when it does
    not say how it ended, the run is lost.

    ``run_name``, ``runs_dir``, ``broker``, ``security`` and ``timeouts`` are those of
    :class:`~bus.publisher.Publisher`; ``start`` and ``until`` those of :class:`~bus.replay.Replay`."""

    def __init__(
        self,
        recording: Recording,
        run_name: str,
        *,
        pace: Pace,
        start: Bound | None = None,
        until: Bound | None = None,
        runs_dir: str | os.PathLike[str] | None = None,
        broker: str | None = None,
        security: ClientSecurity | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        self._timeouts = timeouts or Timeouts.default
        self.run_name = run_name
        self._recording = recording
        self._pace = pace
        self._bounds = start, until
        self._runs_dir = runs_dir
        self._broker = broker
        self._security = security
        self._began = recording_began(recording)
        self._world_size = _world_size(recording)
        self._stopping = False
        self._ranks: dict[int, _Rank] = {}
        self._speaking: _Rank | None = None
        self._served = 0
        self._damage: str | None = None

    def stop(self) -> None:
        """Makes :meth:`serve` end soon, and the run with it; may be called from a signal handler."""
        self._stopping = True

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stopping

    def serve(self, on_start: Callable[[], object] = lambda: None) -> ServedReplay:
        """Replays it once, as a new attempt of the run. ``on_start`` is called when consumers can attach.

        Raises:
            OffloopError: the run cannot be started, or its broker is gone.
        """
        self._served, self._ranks, self._speaking = 0, {}, None
        self._pace.rewind()
        with contextlib.ExitStack() as opened:
            self._connect(opened)
            on_start()
            self._feed_all()
            for rank in self._ranks.values():
                if rank.ending is None:
                    self._end(rank)
            while not all(rank.feed.is_settled for rank in self._ranks.values()):
                self._exchange(self._timeouts.replay_poll)
        endings = [rank.ending for rank in self._ranks.values() if rank.ending is not None]
        return ServedReplay(
            self.run_name, self._served, max(endings, key=lambda ending: SEVERITY.index(ending.status)), self._damage
        )

    def _connect(self, opened: contextlib.ExitStack) -> None:
        recording = self._recording
        origin = Origin(recording.run_name, recording.attempt, str(recording.path.absolute()))
        address = self._broker
        for number in range(self._world_size):
            connection = connect(
                *(self.run_name, self._runs_dir, address, number, self._world_size),
                origin.info(),
                BASE_EVENTS,
                self._security,
                is_replay=True,
                timeouts=self._timeouts,
            )
            # The broker's own address, where one was started for the first rank.
            address = connection.address
            feed = Feed(connection, number, self._timeouts)
            # Closed in the order in which they were opened: the first one may wait for the broker to end.
            opened.callback(feed.close)
            self._ranks[number] = _Rank(feed, Topic(self.run_name, END, number))

    def _feed_all(self) -> None:
        start, until = self._bounds
        window = Window(start, until, self._began)
        before: list[_Recorded] = []
        for count, recorded in enumerate(self._records(), 1):
            if count % ROUND_EVENTS == 0:
                self._exchange(0)
            rank = self._ranks[recorded.topic.rank]
            if self._takes(window, recorded):
                before.append(recorded._replace(left_out=rank.left_out, base_left_out=rank.base_left_out))
            else:
                left_out, base_left_out = recorded.covers
                rank.left_out += left_out
                rank.base_left_out += base_left_out
            if before and window.begun:
                self._wait_until(recorded.event.time)
                while before and not self._stopping:
                    self._serve_one(before.pop(0))
            if self._stopping or window.over:
                return

    def _takes(self, window: Window, recorded: _Recorded) -> bool:
        topic, event = recorded.topic, recorded.event
        if topic.name == CUT and self._bounds != (None, None):
            # A part is numbered anew, without those that were left out before.
            return False
        if topic.name == END:
            # It has no training time of its own.
            return window.begun and not window.is_past(topic.rank)
        try:
            kind = Event(topic.name)
        except ValueError:
            # Marks, and events of a newer version, are where they are.
            kind = Event.BATCH_END
        return window.takes(Snapshot(kind, topic.run, topic.rank, event))

    def _records(self) -> Iterator[_Recorded]:
        """The run's records in order, each once."""
        numbering = Numbering()
        with RecordingReader(self._recording.path) as reader:
            for records in reader.read():
                for record in records:
                    try:
                        topic, event = parse_topic(record.topic.encode()), decode_event(record.body)
                    except ProtocolError:
                        continue
                    is_new = event.seq > numbering.last(topic.rank).seq
                    if is_new and topic.run == self._recording.run_name and event.attempt == self._recording.attempt:
                        numbering.follow(topic.rank, topic.name, event.seq, event.base_seq)
                        yield _Recorded(topic, event, record.body)
            problems = [*reader.damage, *([reader.cut] if reader.cut else []), *numbering.problems]
            self._damage = "; ".join(problems) or None

    def _wait_until(self, at: int) -> None:
        while not self._stopping and (left := self._pace.due_in(at)):
            self._exchange(min(left, self._timeouts.replay_poll))

    def _serve_one(self, recorded: _Recorded) -> None:
        rank = self._ranks[recorded.topic.rank]
        event = recorded.event
        frame = reframe(
            rank.topic._replace(name=recorded.topic.name),
            recorded.body,
            rank.feed.attempt,
            recorded.left_out,
            recorded.base_left_out,
        )
        if len(frame) > MAX_FRAME:
            # The new name has made it longer than an event may be: it is missing.
            return
        self._put(rank, event.seq - recorded.left_out, frame)
        rank.base_seq, rank.time = event.base_seq - recorded.base_left_out, event.time
        if recorded.topic.name == END:
            rank.ending = Ending.from_fields(event.fields)
        elif not recorded.topic.name.startswith("$"):
            self._served += 1

    def _put(self, rank: _Rank, number: int, frame: bytes) -> None:
        before, self._speaking = self._speaking, rank
        if before is not None and before is not rank:
            # The order of the ranks among each other is part of the recording.
            before.feed.ask()
            while not before.feed.is_taken:
                self._exchange(self._timeouts.replay_poll)
        while rank.feed.is_full:
            self._exchange(self._timeouts.replay_poll)
        rank.feed.put(number, frame)
        rank.seq = number

    def _end(self, rank: _Rank) -> None:
        """Ends a rank of which no end is recorded, or that is ended before it."""
        is_ours = self._stopping or self._bounds != (None, None)
        rank.ending = _STOPPED if is_ours else _NO_END
        fields = rank.ending.to_fields()
        numbers = rank.seq + 1, rank.base_seq + 1, max(rank.time, self._began)
        encode = event_encoder(rank.topic, rank.feed.attempt)
        context = pack_map({"world_size": self._world_size})
        self._put(rank, rank.seq + 1, encode(*numbers, Timestamp().values, None, fields, context))

    def _exchange(self, seconds: float) -> None:
        """Lets every connection send and listen, after waiting so many seconds at most for the broker."""
        feeds = [rank.feed for rank in self._ranks.values()]
        for feed in feeds:
            feed.exchange()
        if seconds:
            wait_for_any(feeds, seconds)
            for feed in feeds:
                feed.exchange()


def _world_size(recording: Recording) -> int:
    """How many ranks the run had.

    Raises:
        RecordingError: more than can be served.
    """
    ranks = {0}
    with RecordingReader(recording.path) as reader:
        for records in reader.read():
            for topic in {record.topic for record in records}:
                with contextlib.suppress(ProtocolError):
                    ranks.add(parse_topic(topic.encode()).rank)
    size = max(next(iter(recording)).world_size, max(ranks) + 1)
    if size > MAX_RANKS:
        raise RecordingError(f"{recording.path} is of a run with {size} ranks, and {MAX_RANKS} can be served")
    return size
