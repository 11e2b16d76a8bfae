"""A recording replayed at a pace: as fast as it was, faster, or a part of it."""

import asyncio
import itertools
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping

import msgspec

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.order import CheckpointMark, Ending, Gap
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import SNAPSHOTS_PER_TURN, RunStream
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.window import Bound, Window, parse_bound
from offloop.bus.types.commands import Outcome
from offloop.bus.types.event import Event

RATES = "1 replays as fast as it was, 10 ten times as fast, 'max' at once"
"""The rates in words."""


class Pace:
    """Lets the recorded time pass, ``rate`` times as fast as it did; at once by default. Several replays of one
    recording may share it, each in a thread of its own, and then go together.

    The first requested event is due at once, and the others as much later as they were recorded later, divided by the
    rate. ``clock`` gives seconds, never going back.

    Raises ConfigurationError: the rate is not over 0."""

    def __init__(self, rate: float = math.inf, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not rate > 0:
            raise ConfigurationError(f"{rate:g} is not a rate: {RATES}")
        self.rate = rate
        self._clock = clock
        self._lock = threading.Lock()
        # The recorded time that was reached at `_since`; None until an event is given.
        self._head: int | None = None
        self._since = 0.0

    def due_in(self, at: int) -> float:
        """In how many seconds an event recorded at ``at``, in nanoseconds, is due; 0 when it is now."""
        with self._lock:
            if self._head is None or (math.isinf(self.rate) and at > self._head):
                self._head, self._since = at, self._clock()
            return self._left(at)

    def is_past(self, at: int) -> bool:
        """A recorded time, in nanoseconds, has come; asks for no event of that time."""
        with self._lock:
            return self._head is not None and self._left(at) == 0

    def _left(self, at: int) -> float:
        assert self._head is not None  # only what has begun passes
        if at <= self._head:
            return 0.0
        if math.isinf(self.rate):
            return math.inf
        return max(0.0, (at - self._head) / 1e9 / self.rate - (self._clock() - self._since))

    async def until(self, at: int) -> None:
        """Waits until an event recorded at ``at``, in nanoseconds, is due."""
        while left := self.due_in(at):
            await asyncio.sleep(left)

    def rewind(self) -> None:
        """Begins anew with the next event, wherever in the recording it is."""
        with self._lock:
            self._head = None


class Replay(RunStream):
    """The snapshots of a recording at the pace at which they came; iterate with ``async for``. Replayed time is the
    recording's: the snapshots are those of :class:`~offloop.bus.Recording`, and a callback that takes time
    from them computes the same numbers at any pace.

    ``rate`` is how many times as fast it goes as it was, at once by default; replays that are to go together share a
    :class:`~offloop.bus.replay.replay.Pace`. ``start`` and ``until`` are moments in the words of
    :func:`~offloop.bus.recording.window.parse_bound`; events at either moment belong to the replay. Wherever it begins,
    the events before the training itself (``init``, ``fit_start``) come first, by which callbacks know what is trained;
    the others before ``start`` are left out, so that averages and the like begin there. ``events`` are those that are
    wanted, all by default, ``after`` is the position to continue from: of each rank ``(seq, base_seq)`` of the last
    snapshot that need not come again.

    Raises InvalidTimeError: ``start`` or ``until`` is not such a time; ConfigurationError: the rate is not over 0."""

    ending: Ending | None = None
    """The run's ending, after an iteration to its end; ``None`` when ``until`` came before that."""
    damage: str | None = None
    """The unreadable places with their offsets, after an iteration to the end."""

    def __init__(
        self,
        recording: Recording,
        rate: float | Pace | None = None,
        start: str | Bound | None = None,
        until: str | Bound | None = None,
        *,
        events: Iterable[Event] | None = None,
        after: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        self._recording = recording
        self._pace = rate if isinstance(rate, Pace) else Pace(math.inf if rate is None else rate)
        self._start = parse_bound(start) if isinstance(start, str) else start
        self.until = parse_bound(until) if isinstance(until, str) else until
        """Up to which moment it goes; ``None`` for the end."""
        self._events = None if events is None else frozenset(events)
        self._after = after
        self.run_name = recording.run_name
        self.run_id = recording.run_id
        self.attempt = recording.attempt
        self.path = recording.path
        self.run_dir = recording.run_dir
        self.given = 0
        """Number of snapshots that were given."""
        # The commands of the part that the iteration has come to, and how many of all those were judged.
        self._commands: list[Outcome] = []
        self._judged = 0
        self._is_over = False

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """Events that are missing in the recording, as far as the iteration has come."""
        return self._recording.gaps

    def answered(self) -> tuple[Outcome, ...]:
        """The commands that the training answered within the part, in order, up to the recorded time that the replay
        has come to; may be called from another thread."""
        commands = tuple(self._commands)
        if self._is_over:
            return commands
        return tuple(itertools.takewhile(lambda one: one.time_ns is None or self._pace.is_past(one.time_ns), commands))

    def checkpoints(self) -> tuple[CheckpointMark, ...]:
        """The checkpoints that were saved and loaded, up to the recorded time that the replay has come to."""
        found = self._recording.checkpoints()
        return tuple(one for one in found if self._is_over or self._pace.is_past(one.time_ns))

    async def __aiter__(self) -> AsyncGenerator[Snapshot, None]:
        recording, self.ending = self._recording, None
        self._commands, self._judged, self._is_over = [], 0, False
        began = 0
        if self._start or self.until:
            began = next((one.time_ns for one in recording.snapshots()), 0)
        else:
            # Callbacks that see a part of it have another state at a checkpoint than they had there.
            recording.on_checkpoint = self.on_checkpoint
        window = Window(self._start, self.until, began)
        before: list[Snapshot] = []
        last: Snapshot | None = None
        for count, snapshot in enumerate(recording.snapshots(self._events, after=self._after), 1):
            if count % SNAPSHOTS_PER_TURN == 0:
                # What never has to wait would otherwise keep other tasks from running.
                await asyncio.sleep(0)
            self._judge_commands(window, last)
            if snapshot.rank == 0:
                last = snapshot
            if not window.takes(snapshot):
                if window.over:
                    self._is_over = True
                    return
            elif not window.begun:
                before.append(snapshot)
            else:
                await self._pace.until(snapshot.time_ns)
                before.append(snapshot)
                while before:
                    self.given += 1
                    yield before.pop(0)
        self._judge_commands(window, last)
        self._is_over = True
        self.ending, self.damage = recording.ending, recording.damage

    def _judge_commands(self, window: Window, last: Snapshot | None) -> None:
        """Keeps of the commands that were read since those that belong to the part. ``last`` is the event of the first
        rank before them: the training is where it was then."""
        for outcome in self._recording.answered()[self._judged :]:
            self._judged += 1
            if last is not None and outcome.time_ns is not None:
                at = msgspec.structs.replace(last._body, time=outcome.time_ns)
                if not window.takes(Snapshot(Event.BATCH_END, self.run_name, 0, at)):
                    continue
            self._commands.append(outcome)

    def __repr__(self) -> str:
        return f"<Replay of {self._recording!r} at rate {self._pace.rate:g}>"
