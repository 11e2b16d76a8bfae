"""A first picture of a long run, from the summary beside its recording."""

import contextlib
import threading
from itertools import pairwise

from offloop.bus.errors import ProtocolError
from offloop.bus.protocol.frames import decode_whole_event
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.summary import Summary
from offloop.bus.types.event import Event
from offloop.bus.types.metrics import shown_step
from offloop.consumers.dashboard.view.metrics import SPEED_WINDOW
from offloop.consumers.dashboard.view.progress import RunProgress
from offloop.consumers.dashboard.view.series import Clock, Series


class Preview:
    """What is drawn of a run until its events have been read: of each metric the least, greatest and last value of some
    hundred parts of the run, of throughput the mean."""

    def __init__(self, summary: Summary, lock: "threading.RLock") -> None:
        import numpy as np

        self.batch = 0
        """The batch at which it ends."""
        self.series: dict[str, Series] = {}
        self.progress = RunProgress()
        self.progress.first_ns = summary.began
        self.clock = clock = Clock()
        ticks = [summary.clock[place] for place in sorted(summary.clock)]
        if ticks:
            rows = np.array(
                [[one.batch, one.sample, one.epoch, (one.time - summary.began) / 1e9] for one in ticks], float
            )
            clock.extend(rows)
            self.batch = ticks[-1].batch

        def extend(name: str, points: list[tuple[float, float]]) -> None:
            if points:
                series = self.series.setdefault(name, Series(name, clock, lock))
                series.extend(np.array(points, float))

        for name, metric in summary.metrics.items():
            extend(name, [(shown_step(name, step), value) for step, value in metric.points()])
        speeds: dict[str, list[tuple[float, float]]] = {"batches": [], "samples": [], "tokens": []}
        for before, now in pairwise(ticks):
            elapsed = (now.total_wct - before.total_wct) / 1e6
            if elapsed > 0 and before.batch >= SPEED_WINDOW:
                for what, amount in (
                    ("batches", now.batch - before.batch),
                    ("samples", now.sample - before.sample),
                    ("tokens", now.token - before.token),
                ):
                    if amount > 0:
                        speeds[what].append((now.batch, amount / elapsed))
        for what, points in speeds.items():
            extend(f"throughput/{what}_per_sec", points)
        with contextlib.suppress(ProtocolError):
            last = Snapshot(Event.BATCH_END, summary.run, 0, decode_whole_event(summary.last))
            self.progress.batch_end(last)
