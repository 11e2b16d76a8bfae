"""Serves a recording as if it were live: a broker is fed what the publishers of the run once sent, at their pace."""

import contextlib
import os
from collections.abc import Callable
from typing import NamedTuple

from offloop.bus.errors import RecordingError
from offloop.bus.protocol.frames import (
    CUT,
    END,
    MAX_FRAME,
    Topic,
    event_encoder,
    mark_context,
)
from offloop.bus.protocol.order import SEVERITY, Ending
from offloop.bus.publisher.session import connect
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.source import CutRange, Recorded, RecordSource, is_mark, ranks_in, snapshot_of
from offloop.bus.recording.window import Bound, Window, recording_began
from offloop.bus.replay.feed import BACKLOG_BYTES, Feed, reframe, wait_for_any
from offloop.bus.replay.pace import Pace
from offloop.bus.runs.directory import Origin
from offloop.bus.types.demand import BASE_EVENTS
from offloop.bus.types.timeouts import Timeouts
from offloop.bus.types.timestamp import Timestamp

MAX_RANKS = 1024
ROUND_EVENTS = 256
POLL_SECONDS = 0.1

_NO_END = Ending("lost", "the recording ends without saying how the run ended")
_STOPPED = Ending("stopped")


class ServedReplay(NamedTuple):
    """The outcome of one replay."""

    run_name: str
    events: int
    """Number of events served, without marks such as commands."""
    ending: Ending
    """The ending of the served run."""
    damage: str | None
    """The unreadable places of the recording."""


class _Rank:
    """One rank of the served run."""

    def __init__(self, feed: Feed, topic: Topic) -> None:
        self.feed = feed
        self.topic = topic
        self.seq = self.base_seq = self.time = 0
        """Of the last event, as they are served."""
        self.left_out = self.base_left_out = 0
        """Number of events left out so far because they are not to be replayed."""
        self.ending: Ending | None = None


class ReplayServer:
    """Serves a recording, to any number of consumers, as a run of its own: each event as it was recorded, with its
    time, its number, and what it holds. Only the name of the run and the attempt are those of the new one. A part of a
    recording is numbered from 1. Where events are missing in the recording, they are missing in the run; when it does
    not say how it ended, the run is lost.

    ``run_name``, ``runs_dir`` and ``timeouts`` are those of
    :class:`~offloop.bus.Publisher`; ``start`` and ``until`` those of :class:`~offloop.bus.replay.Replay`.
    ``place`` says where the recording came from, by default its path."""

    def __init__(
        self,
        recording: Recording,
        run_name: str,
        *,
        pace: Pace,
        start: Bound | None = None,
        until: Bound | None = None,
        runs_dir: str | os.PathLike[str] | None = None,
        place: str | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        self._timeouts = timeouts or Timeouts.default
        self.run_name = run_name
        self._recording = recording
        self._pace = pace
        self._bounds = start, until
        self._runs_dir = runs_dir
        self._place = place or str(recording.path.absolute())
        self._began = recording_began(recording)
        self._world_size, self._numbers = _ranks_of(recording)
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
        """:meth:`stop` was called."""
        return self._stopping

    def serve(self, on_start: Callable[[], object] = lambda: None) -> ServedReplay:
        """Replays it once, as a new attempt of the run. ``on_start`` is called when consumers can attach.

        Raises OffloopError: the run cannot be started, or its broker is gone."""
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
                self._exchange(POLL_SECONDS)
        endings = [rank.ending for rank in self._ranks.values() if rank.ending is not None]
        return ServedReplay(
            self.run_name, self._served, max(endings, key=lambda ending: SEVERITY.index(ending.status)), self._damage
        )

    def _connect(self, opened: contextlib.ExitStack) -> None:
        recording = self._recording
        origin = Origin(recording.run_name, recording.attempt, self._place)
        address: str | None = None
        for number in self._numbers:
            session = connect(
                *(self.run_name, self._runs_dir, address, number, self._world_size),
                origin.info(),
                BASE_EVENTS,
                backlog_bytes=BACKLOG_BYTES,
                timeouts=self._timeouts,
                is_replay=True,
                local_world_size=len(self._numbers),
            )
            address = session.address
            feed = Feed(session, number)
            # Closed in the order in which they were opened: the first one may wait for the broker to end.
            opened.callback(feed.close)
            self._ranks[number] = _Rank(feed, Topic(self.run_name, END, number))

    def _feed_all(self) -> None:
        start, until = self._bounds
        window = Window(start, until, self._began)
        source = RecordSource(self._recording.path)
        # With each record, how many events and base events of its rank before it are not replayed.
        before: list[tuple[Recorded, int, int]] = []
        for count, record in enumerate(source, 1):
            if count % ROUND_EVENTS == 0:
                self._exchange(0)
            rank = self._ranks[record.topic.rank]
            if self._takes(window, record):
                before.append((record, rank.left_out, rank.base_left_out))
            else:
                left_out, base_left_out = (CutRange.of(record) or CutRange.one(record)).counts
                rank.left_out += left_out
                rank.base_left_out += base_left_out
            if before and window.begun:
                self._wait_until(record.event.time)
                while before and not self._stopping:
                    self._serve_one(*before.pop(0))
            if self._stopping or window.over:
                return
        self._damage = "; ".join(source.damage) or None

    def _takes(self, window: Window, record: Recorded) -> bool:
        if record.topic.name == CUT and self._bounds != (None, None):
            # A part is numbered anew, without those that were left out before.
            return False
        if record.topic.name == END:
            # It has no training time of its own.
            return window.begun and not window.is_past(record.topic.rank)
        return window.takes(snapshot_of(record))

    def _wait_until(self, at: int) -> None:
        while not self._stopping and (left := self._pace.due_in(at)):
            self._exchange(min(left, POLL_SECONDS))

    def _serve_one(self, record: Recorded, left_out: int, base_left_out: int) -> None:
        rank = self._ranks[record.topic.rank]
        event = record.event
        topic = rank.topic._replace(name=record.topic.name)
        frame = reframe(topic, record.body, rank.feed.attempt, left_out, base_left_out)
        if len(frame) > MAX_FRAME:
            # The new name has made it longer than an event may be: it is missing.
            return
        self._put(rank, event.seq - left_out, frame)
        rank.base_seq, rank.time = event.base_seq - base_left_out, event.time
        if record.topic.name == END:
            rank.ending = Ending.from_fields(event.fields)
        elif not is_mark(record):
            self._served += 1

    def _put(self, rank: _Rank, number: int, frame: bytes) -> None:
        before, self._speaking = self._speaking, rank
        if before is not None and before is not rank:
            # The order of the ranks among each other is part of the recording.
            before.feed.ask()
            while not before.feed.is_taken:
                self._exchange(POLL_SECONDS)
        while rank.feed.is_full:
            self._exchange(POLL_SECONDS)
        rank.feed.put(number, frame)
        rank.seq = number

    def _end(self, rank: _Rank) -> None:
        is_ours = self._stopping or self._bounds != (None, None)
        rank.ending = _STOPPED if is_ours else _NO_END
        fields = rank.ending.to_fields()
        numbers = rank.seq + 1, rank.base_seq + 1, max(rank.time, self._began)
        encode = event_encoder(rank.topic, rank.feed.attempt)
        context = mark_context(self._world_size, len(self._numbers))
        self._put(rank, rank.seq + 1, encode(*numbers, Timestamp().values, None, fields, context))

    def _exchange(self, seconds: float) -> None:
        feeds = [rank.feed for rank in self._ranks.values()]
        for feed in feeds:
            feed.exchange()
        if seconds:
            wait_for_any(feeds, seconds)
            for feed in feeds:
                feed.exchange()


def _ranks_of(recording: Recording) -> tuple[int, list[int]]:
    found = ranks_in(recording.path)
    size = max(next(iter(recording)).world_size, max(found) + 1)
    is_one_of_hosts = 0 not in found or (len(found) < size and recording.has_all_ranks(found))
    numbers = sorted(found) if is_one_of_hosts else list(range(size))
    if len(numbers) > MAX_RANKS:
        raise RecordingError(f"{recording.path} is of a run with {len(numbers)} ranks, and {MAX_RANKS} can be served")
    return size, numbers
