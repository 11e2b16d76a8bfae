"""How fast a recording is replayed: which of its moments is due at which moment of ours."""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable

from bus.errors import ConfigurationError

__all__ = ["RATES", "Pace"]

RATES = "1 replays as fast as it was, 10 ten times as fast, 'max' at once"
"""Which rates there are, in words."""


class Pace:
    """Lets the recorded time pass, ``rate`` times as fast as it did; at once by default. Several replays of one
    recording may share it, each in a thread of its own, and then go together.

    The first event that anybody asks for is due at once, and the others so much later as they were recorded later. With
    ``paused`` nothing is due until :meth:`toggle` or :meth:`step`. ``clock`` gives seconds, never going back.

    Raises:
        ConfigurationError: the rate is not over 0.
    """

    def __init__(
        self, rate: float = math.inf, *, paused: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not rate > 0:
            raise ConfigurationError(f"{rate:g} is no rate: {RATES}")
        self.rate = rate
        self._clock = clock
        self._lock = threading.Lock()
        self._paused = paused
        self._steps = 0
        # The recorded time that was reached at `_since`; None until an event is given.
        self._head: int | None = None
        self._since = 0.0
        self._waiting: dict[_Waiter, int] = {}

    @property
    def paused(self) -> bool:
        """Whether it stands still."""
        return self._paused

    def due_in(self, at: int) -> float | None:
        """In how many seconds an event recorded at ``at``, in nanoseconds, is due; 0 when it is now, ``None`` while
        everything stands still."""
        with self._lock:
            return self._due_in(at)

    def _due_in(self, at: int) -> float | None:
        if self._head is not None and at <= self._head:
            return 0.0
        if self._paused:
            if not self._steps or at > min(self._waiting.values(), default=at):
                return None
            self._steps -= 1
            self._head = at
            return 0.0
        if self._head is None or math.isinf(self.rate):
            self._head, self._since = at, self._clock()
            return 0.0
        return self._left(at)

    def is_past(self, at: int) -> bool:
        """Whether a recorded time, in nanoseconds, has come, without asking for an event of that time."""
        with self._lock:
            if self._head is None:
                return False
            if self._paused or math.isinf(self.rate):
                return at <= self._head
            return self._left(at) == 0

    def _left(self, at: int) -> float:
        assert self._head is not None  # only what has begun passes
        return max(0.0, (at - self._head) / 1e9 / self.rate - (self._clock() - self._since))

    async def until(self, at: int) -> None:
        """Waits until an event recorded at ``at``, in nanoseconds, is due."""
        if self.due_in(at) == 0:
            return
        waiter = _Waiter()
        with self._lock:
            self._waiting[waiter] = at
        try:
            # Cleared before it is asked, so that what changes in between is not missed.
            while (left := waiter.cleared(self.due_in, at)) != 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(waiter.changed.wait(), left)
        finally:
            with self._lock:
                del self._waiting[waiter]
                self._wake()

    def toggle(self) -> None:
        """Stands still, or goes on from where it stood still; from any thread."""
        with self._lock:
            now = self._clock()
            if not self._paused and self._head is not None and not math.isinf(self.rate):
                self._head += round((now - self._since) * self.rate * 1e9)
            self._since = now
            self._paused = not self._paused
            self._steps = 0
            self._wake()

    def step(self) -> None:
        """While it stands still: lets one event pass, and those that were recorded in the same nanosecond; from any
        thread."""
        with self._lock:
            if self._paused:
                self._steps += 1
                self._wake()

    def rewind(self) -> None:
        """Begins anew with the next event, wherever in the recording it is."""
        with self._lock:
            self._head = None

    def _wake(self) -> None:
        for waiter in self._waiting:
            waiter.wake()


class _Waiter:
    """One who waits, in an event loop that may be another thread's."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def cleared(self, ask: Callable[[int], float | None], at: int) -> float | None:
        self.changed.clear()
        return ask(at)

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self.changed.set)
