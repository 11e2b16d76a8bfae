"""A recording, or a part of it, replayed at a chosen speed."""

import asyncio
import itertools
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from pathlib import Path

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.order import CheckpointMark, Ending, Gap
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import SNAPSHOTS_PER_TURN, RunStream
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.window import Window, parse_bound
from offloop.bus.types.commands import Outcome
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time

RATES = "1 replays as fast as it was, 10 ten times as fast, 'max' at once"


class Pace:
    """A clock of recorded time, ``rate`` times as fast as it was. Replays in several threads may share it.

    The first requested event is due at once, the others after their recorded distance divided by the rate. ``clock``
    gives seconds and never goes back. Raises ConfigurationError unless the rate is above 0."""

    def __init__(self, rate: float = math.inf, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not rate > 0:
            raise ConfigurationError(f"{rate:g} is not a rate: {RATES}")
        self.rate = rate
        self._clock = clock
        self._lock = threading.Lock()
        # The recorded time reached at `_since`; None before the first event.
        self._head: int | None = None
        self._since = 0.0

    def due_in(self, at: int) -> float:
        """Return the seconds until an event recorded at ``at`` nanoseconds is due, 0 if it is."""
        with self._lock:
            if self._head is None or (math.isinf(self.rate) and at > self._head):
                self._head, self._since = at, self._clock()
            return self._left(at)

    def is_past(self, at: int) -> bool:
        """Return whether a recorded time in nanoseconds has passed; does not request an event."""
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
        """Wait until an event recorded at ``at`` nanoseconds is due."""
        while left := self.due_in(at):
            await asyncio.sleep(left)


class Replay(RunStream):
    """Snapshots of a recording at a chosen speed; iterate with ``async for``.

    Time is that of the recording, so a callback that takes time from snapshots computes the same at any speed. Events
    before the training (``init``, ``fit_start``) always come first, because callbacks need them; others before
    ``start`` are left out, so that averages begin there.

    Args:
        recording: The recording.
        rate: Speed relative to the original; by default without waiting. Replays that share a
            :class:`~offloop.bus.recording.replay.Pace` run in step.
        start, until: First and last moment, inclusive, see :func:`~offloop.bus.recording.window.parse_bound`.
        events: Requested events; all by default.
        after: Position to continue from: rank to ``(seq, base_seq)`` of the last handled snapshot.

    Raises InvalidTimeError for ``start`` or ``until``; ConfigurationError unless the rate is above 0."""

    ending: Ending | None = None
    """The run's ending, after a complete iteration; ``None`` if ``until`` came first."""
    damage: str | None = None
    """Unreadable places with their offsets, after a complete iteration."""

    def __init__(
        self,
        recording: Recording,
        rate: float | Pace | None = None,
        start: str | Time | None = None,
        until: str | Time | None = None,
        *,
        events: Iterable[Event] | None = None,
        after: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        self._recording = recording
        self._pace = rate if isinstance(rate, Pace) else Pace(math.inf if rate is None else rate)
        self._start = parse_bound(start) if isinstance(start, str) else start
        self.until: Time | None = parse_bound(until) if isinstance(until, str) else until
        """Last moment; ``None`` for the end."""
        self._events = None if events is None else frozenset(events)
        self._after = after
        self.run_name: str = recording.run_name
        self.run_id: str | None = recording.run_id
        self.attempt: int = recording.attempt
        self.path: Path = recording.path
        self.run_dir: Path | None = recording.run_dir
        self.given: int = 0
        """Number of yielded snapshots."""
        # Commands of the part so far, and the number of all that were checked.
        self._commands: list[Outcome] = []
        self._judged = 0
        self._is_over = False

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """Events missing in the recording so far."""
        return self._recording.gaps

    def answered(self) -> tuple[Outcome, ...]:
        """Return commands that the training answered within the part so far, in order. Thread-safe."""
        commands = tuple(self._commands)
        if self._is_over:
            return commands
        return tuple(itertools.takewhile(lambda one: one.time_ns is None or self._pace.is_past(one.time_ns), commands))

    def checkpoints(self) -> tuple[CheckpointMark, ...]:
        """Return the checkpoints saved and loaded so far."""
        found = self._recording.checkpoints()
        return tuple(one for one in found if self._is_over or self._pace.is_past(one.time_ns))

    async def __aiter__(self) -> AsyncGenerator[Snapshot, None]:
        recording, self.ending = self._recording, None
        self._commands, self._judged, self._is_over = [], 0, False
        if self._start is None and self.until is None:
            # In a part, callbacks have another state at a checkpoint than in the training.
            recording.on_checkpoint = self.on_checkpoint
        window = Window(self._start, self.until)
        before: list[Snapshot] = []
        last: Snapshot | None = None
        for count, snapshot in enumerate(recording.snapshots(self._events, after=self._after), 1):
            if count % SNAPSHOTS_PER_TURN == 0:
                # Without waits, other tasks would never run.
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
        """Keep new commands that belong to the part; ``last`` is the preceding event of the first rank."""
        for outcome in self._recording.answered()[self._judged :]:
            self._judged += 1
            if last is not None and not window.takes(Snapshot(Event.BATCH_END, self.run_name, 0, last._body)):
                continue
            self._commands.append(outcome)

    def __repr__(self) -> str:
        return f"<Replay of {self._recording!r} at rate {self._pace.rate:g}>"
