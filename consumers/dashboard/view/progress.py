"""The progress of a run and its remaining time."""

from typing import NamedTuple

from offloop.bus.errors import OffloopError
from offloop.bus.protocol.run_state import Reached
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time, TimeUnit
from offloop.consumers.api.logger import Logger
from offloop.consumers.callbacks.runtime_estimator import RuntimeEstimator


class ProgressView(NamedTuple):
    epoch: int
    batch: int
    sample: int
    token: int
    elapsed: float  # seconds from the first event to the last one
    fraction: float | None  # the finished part of the training, from 0 to 1; None without a planned duration
    seconds_left: float | None  # estimated from the last event on; None while unknown
    max_duration: str | None  # the planned duration, such as 90ep; a stopped training has reached less


def progress_of(reached: Reached, seconds: float) -> ProgressView | None:
    try:
        planned = None if reached.planned is None else Time.from_timestring(reached.planned)
    except OffloopError:
        planned = None
    counts = {TimeUnit.EPOCH: reached.epoch, TimeUnit.BATCH: reached.batch, TimeUnit.SAMPLE: reached.sample}
    if planned is None or planned.unit not in counts or not planned.value:
        return None
    fraction = min(counts[planned.unit] / planned.value, 1.0)
    return ProgressView(reached.epoch, reached.batch, reached.sample, 0, seconds, fraction, None, reached.planned)


class RunProgress:
    _WARM_UP_BATCHES = 1

    def __init__(self) -> None:
        self.first_ns: int | None = None
        self.last: Snapshot | None = None
        self._batch: Snapshot | None = None
        self._estimator = RuntimeEstimator(self._WARM_UP_BATCHES, "seconds")
        self._batches = 0
        self._is_through = False

    def batch_end(self, state: Snapshot) -> None:
        if self.first_ns is None:
            self.first_ns = state.time_ns
        self.last = self._batch = state
        self._batches += 1
        if self._batches <= self._WARM_UP_BATCHES + 1:
            self._estimate()

    def event(self, state: Snapshot) -> None:
        if self.first_ns is None:
            self.first_ns = state.time_ns
        self.last = state
        if state.event in (Event.FIT_START, Event.FIT_END):
            self._is_through = state.event is Event.FIT_END
        elif state.event is Event.EVAL_END:
            self._estimator.eval_end(state, Logger())

    def view(self) -> ProgressView:
        last = self.last
        if last is None or self.first_ns is None:
            return ProgressView(0, 0, 0, 0, 0.0, None, None, None)
        _, epoch, batch, sample, token, *_ = last.timestamp.values
        fraction = _fraction(last)
        left = 0.0 if self._is_through else None
        if left is None and fraction is not None and self._batches > self._WARM_UP_BATCHES + 1:
            left = self._estimate()
        elapsed = (last.time_ns - self.first_ns) / 1e9
        longest = last.planned_duration
        return ProgressView(
            epoch, batch, sample, token, elapsed, fraction, left, None if longest is None else str(longest)
        )

    def _estimate(self) -> float | None:
        # The first batches make the estimator set its clock.
        if self._batch is None or self._batch.max_duration is None:
            return None
        left = self._estimator.seconds_left(self._batch)
        return None if left is None else max(left, 0.0)


def _fraction(state: Snapshot) -> float | None:
    try:
        longest = state.planned_duration
    except OffloopError:
        return None
    if longest is None:
        return None
    done = float(state.timestamp.get(longest.unit).value)
    length = state.dataloader_len
    if longest.unit is TimeUnit.EPOCH and length and not state.event.is_eval:
        done += min(state.timestamp.values[7] / length, 1.0)
    return min(done / longest.value, 1.0) if longest.value else 1.0
