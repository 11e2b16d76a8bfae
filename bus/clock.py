"""The clock that stamps events."""

import time
from collections.abc import Callable

__all__ = ["wall_clock"]


def wall_clock() -> Callable[[], int]:
    """A new clock: a function that returns nanoseconds since 1970 (UTC) and never goes back.

    The system's time is read once, here, and from then on only what has passed since is added. Were it read each time,
    a correction of the system's time in the middle of a run (NTP, an operator, a virtual machine that wakes up) would
    put events before their predecessors and bend every throughput computed from them.
    """
    now = time.monotonic_ns
    anchor = time.time_ns() - now()
    return lambda: anchor + now()
