"""Serves a recording as if it were live: sends a broker the publishers' events at a chosen speed."""

import contextlib
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import msgpack
import zmq

from offloop.bus.errors import BrokerError, ConfigurationError, RecordingError
from offloop.bus.protocol.frames import CUT, END, MAX_FRAME, Topic, event_encoder, mark_context
from offloop.bus.protocol.order import Ending, worst_of
from offloop.bus.publisher.session import BrokerSession, connect
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.source import Recorded, RecordSource, is_mark, ranks_in
from offloop.bus.replay.replay import Pace
from offloop.bus.runs.directory import Origin
from offloop.bus.types.timeouts import Timeouts
from offloop.bus.types.timestamp import Timestamp

MAX_RANKS = 1024
ROUND_EVENTS = 256
POLL_SECONDS = 0.1
KEPT_BYTES = 8 * 1024 * 1024
BACKLOG_BYTES = KEPT_BYTES + 2 * MAX_FRAME  # capacity of the session, with room for one put beyond KEPT_BYTES
_BROKER_RETURN_SECONDS = 60.0
_TAKEN_SECONDS = 5.0  # wait for the broker's confirmation before asking again
_NUMBERS_BYTES = 64

_REFUSAL = "this is a replay: its training has ended, so commands are refused"
_NO_END = Ending("lost", "the recording has no ending of the run")
_STOPPED = Ending("stopped")


class ServedReplay(NamedTuple):
    run_name: str
    events: int  # number of events served, without marks such as commands
    ending: Ending
    damage: str | None  # unreadable places of the recording


class Feed:
    """One rank's session with the broker, which refuses commands.

    Events are sent in order, and again to a restarted broker. All methods raise BrokerError if the broker is gone for
    good, or no longer takes the run."""

    def __init__(self, session: BrokerSession, rank: int) -> None:
        self._rank = rank
        self._session = session
        self._outbox = session.state.outbox
        self._attempt: int = session.welcome["attempt"]
        self.is_taken = True  # true if the broker has taken everything up to the last ask()
        self._asked = 0.0
        self._progress = 0, True
        self._progressed = time.monotonic()
        self._base_seq = self._time = 0
        self.ending: Ending | None = None

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        return self._session.socket

    @property
    def is_full(self) -> bool:
        return self._outbox.size > KEPT_BYTES

    @property
    def is_settled(self) -> bool:
        return self._session.state.acknowledged >= self._outbox.seq

    def put(self, record: Recorded) -> bool:
        """Queue an event; false, and missing in the served run, if it becomes too long with the run's name."""
        event = record.event
        topic = record.topic._replace(run=self._session.run_name)
        frame = topic.encode() + _of_attempt(record.body, self._attempt)
        if len(frame) > MAX_FRAME:
            return False
        self._put(event.seq, frame)
        self._base_seq, self._time = event.base_seq, event.time
        if topic.name == END:
            self.ending = Ending.from_fields(event.fields)
        return True

    def end(self, ending: Ending, began: int, context: bytes) -> None:
        self.ending = ending
        encode = event_encoder(Topic(self._session.run_name, END, self._rank), self._attempt)
        number, time_ns = self._outbox.seq + 1, max(self._time, began)
        frame = encode(number, self._base_seq + 1, time_ns, Timestamp().values, None, ending.to_fields(), context)
        self._put(number, frame)

    def _put(self, number: int, frame: bytes) -> None:
        if number != self._outbox.seq + 1:
            self._outbox.skip_to(number - 1)
        self._outbox.put(frame)
        self._session.state.end(number)

    def exchange(self) -> None:
        session, state, now = self._session, self._session.state, time.monotonic()
        while (message := session.receive()) is not None:
            if message.kind == "statistics":
                self.is_taken = True
            elif message.kind == "welcome":
                self._asked = 0.0
            elif message.kind == "command" and self._rank == 0:
                session.say("applied", {"id": message.content.get("id"), "error": _REFUSAL})
        self._outbox.send()
        session.tick()
        if not self.is_taken and not len(self._outbox) and now - self._asked > _TAKEN_SECONDS:
            # The question may have been lost with a connection.
            self._asked = now
            session.say("statistics", {"run": self._session.run_name})
        if (progress := (state.acknowledged, self.is_taken)) != self._progress or (self.is_settled and self.is_taken):
            self._progress, self._progressed = progress, now
        run, patience = self._session.run_name, _BROKER_RETURN_SECONDS
        if state.lost:
            raise BrokerError(f"the broker of the replay {run!r} does not resume it: start it again")
        if now - self._progressed > patience:
            raise BrokerError(f"the broker of the replay {run!r} has recorded nothing for {patience:g} s")

    def ask(self) -> None:
        """Ask the broker to confirm everything so far, so that events of another rank come after it."""
        self._asked = 0.0
        self.is_taken = False

    def close(self) -> None:
        """End the connection; waits briefly for our own broker to end."""
        self._session.close()


def _of_attempt(body: bytes, attempt: int) -> bytes:
    unpacker = msgpack.Unpacker()
    unpacker.feed(body[:_NUMBERS_BYTES])
    packer = msgpack.Packer(autoreset=False)
    packer.pack_array_header(unpacker.read_array_header())
    packer.pack(unpacker.unpack())
    packer.pack(attempt)
    unpacker.skip()
    return bytes(packer.bytes()) + body[unpacker.tell() :]


class ReplayServer:
    """Serves a recording as a new run to any number of consumers.

    Events keep time, number and content; only the name of the run and the attempt differ. Missing events stay missing,
    and without a recorded ending the run is lost. ``run_name``, ``runs_dir`` and ``timeouts`` are as for
    :class:`~offloop.bus.Publisher`; ``place`` is the source of the recording, by default its path."""

    def __init__(
        self,
        recording: Recording,
        run_name: str,
        *,
        pace: Pace,
        runs_dir: str | os.PathLike[str] | None = None,
        place: str | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        self._timeouts = timeouts or Timeouts.default
        self.run_name = run_name
        self._recording = recording
        self._pace = pace
        self._runs_dir = runs_dir
        self._place = place or str(recording.path.absolute())
        path = recording.path
        first = next(iter(recording), None)
        if first is None:
            raise ConfigurationError(f"{path} holds no event: 'offloop show {path}' shows what it has")
        self._began = first.time_ns
        self._world_size, self._numbers = _ranks_of(recording, first.world_size)
        self.stopping = False  # makes serve() end soon, and the run with it; may be set in a signal handler
        self._feeds: dict[int, Feed] = {}
        self._speaking: Feed | None = None
        self._served = 0
        self._damage: str | None = None

    def serve(self, on_start: Callable[[], object] = lambda: None) -> ServedReplay:
        """Replay once, as a new attempt. ``on_start`` is called when consumers can attach. Raises OffloopError."""
        self._served, self._feeds, self._speaking = 0, {}, None
        self._pace.rewind()
        with contextlib.ExitStack() as opened:
            self._connect(opened)
            on_start()
            self._feed_all()
            context = mark_context(self._world_size, len(self._numbers))
            for feed in self._feeds.values():
                if feed.ending is None:
                    self._take_turn(feed)
                    feed.end(_STOPPED if self.stopping else _NO_END, self._began, context)
            while not all(feed.is_settled for feed in self._feeds.values()):
                self._exchange(POLL_SECONDS)
        ending = worst_of(feed.ending for feed in self._feeds.values() if feed.ending is not None)
        return ServedReplay(self.run_name, self._served, ending, self._damage)

    def _connect(self, opened: contextlib.ExitStack) -> None:
        recording = self._recording
        origin = Origin(recording.run_name, recording.attempt, self._place)
        address: str | None = None
        for number in self._numbers:
            session = connect(
                *(self.run_name, self._runs_dir, address, number, self._world_size),
                origin.info(),
                backlog_bytes=BACKLOG_BYTES,
                timeouts=self._timeouts,
                is_replay=True,
                local_world_size=len(self._numbers),
            )
            address = session.address
            feed = self._feeds[number] = Feed(session, number)
            # Closed in the order of opening: the first one may wait for the broker to end.
            opened.callback(feed.close)

    def _feed_all(self) -> None:
        source = RecordSource(self._recording.path)
        for count, record in enumerate(source, 1):
            if count % ROUND_EVENTS == 0:
                self._exchange(0)
            if record.topic.name == CUT:
                # Left-out events take no time.
                self._pace.rewind()
            else:
                while not self.stopping and (left := self._pace.due_in(record.event.time)):
                    self._exchange(min(left, POLL_SECONDS))
            if self.stopping:
                return
            feed = self._feeds[record.topic.rank]
            self._take_turn(feed)
            if feed.put(record) and not is_mark(record):
                self._served += 1
        self._damage = "; ".join(source.damage) or None

    def _take_turn(self, feed: Feed) -> None:
        """Wait until a feed accepts an event."""
        before, self._speaking = self._speaking, feed
        if before is not None and before is not feed:
            # The order of events of different ranks is part of the recording.
            before.ask()
            while not before.is_taken:
                self._exchange(POLL_SECONDS)
        while feed.is_full:
            self._exchange(POLL_SECONDS)

    def _exchange(self, seconds: float) -> None:
        feeds = self._feeds.values()
        for feed in feeds:
            feed.exchange()
        if seconds:
            poller = zmq.Poller()
            for feed in feeds:
                poller.register(feed.socket, zmq.POLLIN)
            poller.poll(max(1, round(1000 * seconds)))
            for feed in feeds:
                feed.exchange()


def _ranks_of(recording: Recording, world_size: int) -> tuple[int, list[int]]:
    found = ranks_in(recording.path)
    size = max(world_size, max(found) + 1)
    is_one_of_hosts = 0 not in found or (len(found) < size and recording.has_all_ranks(found))
    numbers = sorted(found) if is_one_of_hosts else list(range(size))
    if len(numbers) > MAX_RANKS:
        raise RecordingError(f"{recording.path} is of a run with {len(numbers)} ranks, and {MAX_RANKS} can be served")
    return size, numbers
