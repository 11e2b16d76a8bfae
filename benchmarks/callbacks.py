"""Callbacks of the benchmarks."""

import statistics
import time
from pathlib import Path

from offloop.consumers import Callback


class Sleeper(Callback):
    """Sleeps 50 ms at the end of every batch."""

    def batch_end(self, state, logger):
        time.sleep(0.05)


class Stopwatch(Callback):
    """Writes to the file ``path`` the median of the milliseconds from the end of a batch to this callback."""

    def __init__(self, path):
        self._path = Path(path)
        self._delays = []

    def batch_end(self, state, logger):
        self._delays.append((time.time_ns() - state.time_ns) / 1e6)

    def close(self, state, logger):
        self._path.write_text(str(statistics.median(self._delays)))
