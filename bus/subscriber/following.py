"""Following a run, decided without sockets and clocks: which of its two sources to read, and when it has ended.

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

LOOK_SECONDS = 0.5
"""Seconds between two looks whether the run is live."""
FETCH_POLL_SECONDS = 0.05
_ON_DISK_SECONDS = 0.02
_AWAY_SECONDS = 0.1  # seconds between two looks for a broker, where there is none


class RunStatus(enum.Enum):
    """Status of an attempt."""

    LIVE = "live"
    AWAY = "away"
    """No broker serves it now, but another one may."""
    FINISHED = "finished"


class Phase(enum.Enum):
    """The source that is read."""

    HISTORY = "history"
    """The recording: from its beginning, or from where the event feed was lost."""
    GAP = "gap"
    """The recording, up to events that the event feed has skipped."""
    LIVE = "live"
    """The event feed."""
    REST = "rest"
    """The recording, once more to its end: no broker writes to it any more."""


class Action(enum.Enum):
    """An action of the caller."""

    NONE = "none"
    READ_ON = "read on"
    """The recording may have grown behind :attr:`Following.offset`."""
    CONNECT = "connect"
    """Connect to the broker, call :meth:`Following.connected`, then as for ``READ_ON``."""
    DISCONNECT = "disconnect"
    """Close the connection, then as for ``READ_ON``."""


class Step(NamedTuple):
    """The caller's next action, then a pause in seconds unless something comes before."""

    action: Action = Action.NONE
    pause: float = 0.0


class Following:
    """The state of a subscriber that follows one attempt of a run.

    The caller reads what :attr:`phase` says, passes it in, and does what each :class:`Step` says; ``now`` is a time in
    seconds that never goes back. Snapshots to hand on are in :attr:`ready`, in order."""

    def __init__(self, order: StreamOrder, timeouts: Timeouts) -> None:
        self.order = order
        self._timeouts = timeouts
        self.ready: deque[Snapshot | CheckpointMark] = deque()
        self.phase = Phase.HISTORY
        self.ending: Ending | None = None
        """The run's end; ``None`` until all of it was passed in."""
        self.offset = 0
        """Offset in the recording behind which events may not have been passed in, as last reported by the broker."""
        self.is_connected = False
        self._has_feed = True
        self.fallbacks = 0
        """Number of times that the event feed skipped events."""
        self.reconnects = 0
        self.lag = 0
        """Events that the broker had at its last heartbeat and that had not been passed in."""
        self.lag_high = 0
        self.refusal = ""
        """Why the broker gives nothing more, as far as it has said so."""
        self._missing: Missing | None = None
        self._give_up_at: float | None = None
        self._heard = 0.0

    # -- the recording ------------------------------------------------------------------------------------------------

    def take_records(self, records: Iterable[Record]) -> None:
        """Handles records of the recording."""
        self._take(self.order.from_records(records))

    def note_newest(self, positions: dict[int, tuple[int, int]]) -> None:
        """Records the newest recorded event of each rank."""
        self.lag = self.order.lag(positions)
        self.lag_high = max(self.lag_high, self.lag)

    def at_end_of_recording(self, is_pending: bool, status: RunStatus, now: float) -> Step:
        """Takes note that the recording was read to its end, then that the run has ``status``; with ``is_pending``,
        a part that was requested is still on its way."""
        if self.ending is not None:
            return Step()
        if is_pending:
            return Step(pause=FETCH_POLL_SECONDS)
        if self.phase is Phase.REST:
            self.ending = Ending("lost", self.refusal or "the broker ended before the run did")
            return Step()
        if not self.is_connected:
            return self._find_broker(status)
        if not self._has_feed:
            return Step(pause=LOOK_SECONDS) if status is RunStatus.LIVE else self._disconnect()
        if self._missing is not None and not self.order.is_filled(self._missing):
            return self._await_missing(self._missing, status, now)
        self._missing = self._give_up_at = None
        self.phase = Phase.LIVE
        return Step()

    def connected(self, now: float, *, has_feed: bool = True) -> None:
        """Records a new connection to the broker; without an event feed the recording is read on."""
        self.is_connected, self._has_feed = True, has_feed
        self._heard = now

    def _find_broker(self, status: RunStatus) -> Step:
        if status is RunStatus.AWAY:
            return Step(pause=_AWAY_SECONDS)
        if status is RunStatus.LIVE:
            self.reconnects += 1
            return Step(Action.CONNECT)
        # Between the end of the recording and this look the broker may have written more.
        self.phase = Phase.REST
        return Step(Action.READ_ON)

    def _await_missing(self, missing: Missing, status: RunStatus, now: float) -> Step:
        """The broker writes what it has several times a second."""
        if status is not RunStatus.LIVE:
            return self._disconnect()
        if self._give_up_at is None:
            self._give_up_at = now + self._timeouts.gap
        if now < self._give_up_at:
            return Step(Action.READ_ON, _ON_DISK_SECONDS)
        # The broker lives, but its disk takes no recording: a named gap is better than standing still.
        self.order.accept_gap(missing)
        return Step()

    # -- the event feed ----------------------------------------------------------------------------------------------

    def take_frame(self, frame: bytes) -> None:
        """Handles a frame of the event feed. Where events before it are missing, the phase becomes ``GAP``."""
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
        """Records that the event feed has brought something."""
        self._heard = now

    def when_quiet(self, status: RunStatus, now: float) -> Step:
        """Decides what to do while the event feed has nothing and the run has ``status``."""
        if status is not RunStatus.LIVE or now - self._heard >= self._timeouts.silence:
            # Of a broker that is there at least heartbeats come; a connection without them may be dead.
            return self._disconnect()
        return Step(pause=LOOK_SECONDS)

    def _disconnect(self) -> Step:
        self.is_connected = False
        self.phase = Phase.HISTORY
        # The next broker has as long for what is missing as this one had.
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
