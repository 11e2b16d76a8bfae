"""The pace of a replay: when each recorded time is due."""

import asyncio
import math
import threading
import time
from collections.abc import Callable

from offloop.bus.errors import ConfigurationError

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
