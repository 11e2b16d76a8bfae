"""State machine of following a run, without sockets and clocks: the source to read, and the end of the run.

history -> live -> gap -> live -> ... -> finished"""

import enum
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from offloop.bus.errors import ProtocolError
from offloop.bus.protocol import frames
from offloop.bus.protocol.order import CheckpointMark, Ending, Missing, StreamOrder
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.reader import Record
from offloop.bus.types.timeouts import Timeouts

LOOK_SECONDS = 0.5  # seconds between two checks whether the run is live
_FETCH_SECONDS = 0.05  # between two checks for a part of the recording that is on its way
_ON_DISK_SECONDS = 0.02
_AWAY_SECONDS = 0.1  # between two checks for a missing broker


class RunStatus(enum.Enum):
    LIVE = "live"
    AWAY = "away"  # no broker serves it now, but another one may
    FINISHED = "finished"


class Phase(enum.Enum):
    """The source to read."""

    HISTORY = "history"  # the recording, from its start, or after the event feed was lost
    GAP = "gap"  # the recording, up to events that the event feed has skipped
    LIVE = "live"  # the event feed
    REST = "rest"  # the recording, once more to its end: no broker writes to it any more


class Action(enum.Enum):
    """What the caller must do."""

    NONE = "none"
    READ_ON = "read on"  # the recording may have grown after ``Following.offset``
    CONNECT = "connect"  # connect to the broker, call ``Following.connected``, then as for ``READ_ON``
    DISCONNECT = "disconnect"  # close the connection, then as for ``READ_ON``


class Step(NamedTuple):
    """The caller's next action, then a pause in seconds, shorter if something arrives."""

    action: Action = Action.NONE
    pause: float = 0.0


class Following:
    """State of a subscriber that follows one attempt of a run.

    The caller reads the source named by :attr:`phase`, passes its contents in, and carries out each :class:`Step`.
    :attr:`ready` has the snapshots to return, in order. ``now`` is monotonic, in seconds."""

    def __init__(self, order: StreamOrder, timeouts: Timeouts) -> None:
        self.order = order
        self._timeouts = timeouts
        self.ready: deque[Snapshot | CheckpointMark] = deque()
        self.phase: Phase = Phase.HISTORY
        self.ending: Ending | None = None  # the run's end, once all of it was passed in
        self.offset: int = 0  # everything before it in the recording was passed in, by the broker's last report
        self.is_connected: bool = False
        self._has_feed = True
        self.fallbacks: int = 0  # number of times that the event feed skipped events
        self.reconnects: int = 0
        self.lag: int = 0  # number of the broker's events, by its last heartbeat, that were not passed in
        self.lag_high: int = 0
        self.refusal = ""  # why the broker refuses further events, if it does
        self._missing: Missing | None = None
        self._give_up_at: float | None = None
        self._heard = 0.0

    def take_records(self, records: Iterable[Record]) -> None:
        self._take(self.order.from_records(records))

    def note_newest(self, positions: dict[int, tuple[int, int]]) -> None:
        self.lag = self.order.lag(positions)
        self.lag_high = max(self.lag_high, self.lag)

    def at_end_of_recording(self, is_pending: bool, status: RunStatus, now: float) -> Step:
        """Handle the end of the recording, with the status checked after it and possibly a ``is_pending`` part."""
        if self.ending is not None:
            return Step()
        if is_pending:
            return Step(pause=_FETCH_SECONDS)
        if self.phase is Phase.REST:
            self.ending = Ending("lost", self.refusal or "the broker ended before the run did")
            return Step()
        if not self.is_connected:
            return self._find_broker(status)
        if not self._has_feed:
            return Step(pause=_FETCH_SECONDS) if status is RunStatus.LIVE else self._disconnect()
        if self._missing is not None and not self.order.is_filled(self._missing):
            return self._await_missing(self._missing, status, now)
        self._missing = self._give_up_at = None
        self.phase = Phase.LIVE
        return Step()

    def connected(self, now: float, *, has_feed: bool = True) -> None:
        """Record a new connection to the broker; without an event feed reading of the recording continues."""
        self.is_connected, self._has_feed = True, has_feed
        self._heard = now

    def _find_broker(self, status: RunStatus) -> Step:
        if status is RunStatus.AWAY:
            return Step(pause=_AWAY_SECONDS)
        if status is RunStatus.LIVE:
            self.reconnects += 1
            return Step(Action.CONNECT)
        # The broker may have written more between the end of the read and the check of the status.
        self.phase = Phase.REST
        return Step(Action.READ_ON)

    def _await_missing(self, missing: Missing, status: RunStatus, now: float) -> Step:
        """Wait for the broker, which writes several times a second."""
        if status is not RunStatus.LIVE:
            return self._disconnect()
        if self._give_up_at is None:
            self._give_up_at = now + self._timeouts.gap
        if now < self._give_up_at:
            return Step(Action.READ_ON, _ON_DISK_SECONDS)
        # The broker lives, but its disk fails: a reported gap is better than an endless wait.
        self.order.accept_gap(missing)
        return Step()

    def take_frame(self, frame: bytes) -> None:
        """Handle a frame of the event feed. If earlier events are missing, the phase becomes ``GAP``."""
        try:
            topic, body = frames.split_frame(frame)
            if topic is not None and topic.name == frames.HEARTBEAT:
                self._compare(body)
            elif topic is not None:
                self._take(self.order.from_feed(frames.decode_frame_batch(body)))
        except ProtocolError:
            self.order.skipped += 1

    def _take(self, read: Iterable[list[Snapshot] | CheckpointMark | Missing]) -> None:
        for found in read:
            if isinstance(found, list):
                self.ready.extend(found)
            elif isinstance(found, Missing):
                self._fall_back(found)
            else:
                self.ready.append(found)
        self.ending = self.order.ending

    def heard(self, now: float) -> None:
        self._heard = now

    def when_quiet(self, status: RunStatus, now: float) -> Step:
        if status is not RunStatus.LIVE or now - self._heard >= self._timeouts.silence:
            # A broker sends at least heartbeats; without them the connection may be dead.
            return self._disconnect()
        return Step(pause=LOOK_SECONDS)

    def _disconnect(self) -> Step:
        self.is_connected = False
        self.phase = Phase.HISTORY
        # The next broker gets the full time to deliver missing events.
        self._give_up_at = None
        return Step(Action.DISCONNECT)

    def _fall_back(self, missing: Missing) -> None:
        self._missing = missing
        self.fallbacks += 1
        self.phase = Phase.GAP

    def _compare(self, body: bytes) -> None:
        order = self.order
        try:
            _, attempt, _, positions, *more = frames.decode_body(body)
            if attempt != order.attempt:
                return
            positions = frames.decode_positions(positions)
            missing = order.missing_at(positions)
            self.note_newest(positions)
            if missing is None and len(more) >= 2 and order.missing_at(frames.decode_positions(more[1])) is None:
                self.offset = int(more[0])
        except (ProtocolError, ValueError, TypeError, AttributeError, LookupError):
            order.skipped += 1
            return
        if missing is not None:
            self._fall_back(missing)
