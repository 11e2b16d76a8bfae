"""Remaining time of a run."""

from dataclasses import dataclass
from typing import Any

from offloop.bus.errors import check_at_least, check_choice
from offloop.bus.printing import say
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.time import Time, TimeUnit
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger
from offloop.consumers.callbacks.speed_monitor import SECONDS_IN, TimeUnitName


class RuntimeEstimator(Callback):
    """Remaining time of the run, from its speed so far.

    Logs ``time/remaining_estimate`` at ``BATCH_END``, in ``time_unit``, and that unit once, as the hyperparameter
    ``time/remaining_estimate_unit``. The first ``skip_batches`` batches are left out, because they are often slower.
    Evaluations count separately: each evaluator is expected to run as often as it has so far, and to take its mean
    duration, without its first run as soon as it has another.

    The clock starts with the first counted batch, at ``BATCH_START``. In a recording without that event it starts at
    the end of the batch before, so the wait for the data counts once. In a loop that publishes no durations of batches
    it starts at the end of the first counted one.

    Without a ``max_duration`` it estimates nothing, with one line on standard error. Reference:
    ``composer/callbacks/runtime_estimator.py``."""

    resumes = False
    keeps: tuple[str, ...] = (
        "_left_to_skip",
        "_disabled",
        "_start_ns",
        "_start_part",
        "_epoch_batches",
        "_evaluations",
    )

    def __init__(self, skip_batches: int = 1, time_unit: TimeUnitName = "hours") -> None:
        check_at_least("skip_batches", skip_batches, 0)
        check_choice("time_unit", time_unit, SECONDS_IN)
        self._time_unit = time_unit
        self._left_to_skip = skip_batches
        self._disabled = False
        self._start_ns: int | None = None
        self._start_part = 0.0
        self._epoch_batches: int | None = None
        self._evaluations: dict[str, _Evaluations] = {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._evaluations = {label: _Evaluations(**one) for label, one in state["evaluations"].items()}

    def init(self, state: Snapshot, logger: Logger) -> None:
        logger.log_hyperparameters({"time/remaining_estimate_unit": self._time_unit})

    def batch_start(self, state: Snapshot, logger: Logger) -> None:
        if self._start_ns is None and self._left_to_skip == 0:
            self._start(state.time_ns, state.timestamp, state)

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        remaining = self.seconds_left(state)
        if remaining is not None:
            logger.log_metrics({"time/remaining_estimate": remaining / SECONDS_IN[self._time_unit]})

    def seconds_left(self, state: Snapshot) -> float | None:
        """Count the end of a batch, and estimate the remaining seconds; ``None`` while unknown."""
        if self._left_to_skip > 0:
            self._left_to_skip -= 1
            return None
        timestamp = state.timestamp
        if self._start_ns is None:
            batch_ns = round(timestamp.batch_wct.total_seconds() * 1e6) * 1000
            # A loop of one's own may publish no duration of a batch: then the clock starts here.
            began = state.previous_timestamp if batch_ns else None
            self._start(state.time_ns - batch_ns, began or timestamp, state)
        part = self._elapsed_part(timestamp, state.max_duration)
        if self._start_ns is None or part is None or part <= self._start_part:
            return None
        training = (state.time_ns - self._start_ns) / 1e9 - self._eval_seconds
        remaining = training / (part - self._start_part) * (1 - part)
        for evaluations in self._evaluations.values():
            remaining += evaluations.remaining_seconds(self._start_part)
        return remaining

    def eval_end(self, state: Snapshot, logger: Logger) -> None:
        if self._start_ns is None:
            return
        part = self._elapsed_part(state.timestamp, state.max_duration)
        if part is not None:
            evaluations = self._evaluations.setdefault(state.dataloader_label or "", _Evaluations())
            evaluations.add(state.eval_timestamp.values.total_wct, part - self._start_part)

    @property
    def _eval_seconds(self) -> float:
        return sum(one.microseconds for one in self._evaluations.values()) / 1e6

    def _start(self, time_ns: int, timestamp: Timestamp, state: Snapshot) -> None:
        if self._disabled:
            return
        part = self._elapsed_part(timestamp, state.max_duration)
        if part is None:
            self._disabled = True
            say(
                "the remaining time cannot be estimated: the run has no max_duration",
                err=True,
            )
            return
        self._start_ns, self._start_part = time_ns, part
        # Not before: the first estimates of the reference rest on an epoch without a length.
        self._epoch_batches = state.dataloader_len

    def _elapsed_part(self, timestamp: Timestamp, max_duration: Time | None) -> float | None:
        """Return the finished part of the training, by batches in a training in epochs of known length."""
        if max_duration is None:
            return None
        if not max_duration.value:
            return 1.0
        if max_duration.unit is TimeUnit.EPOCH:
            epoch, batch, in_epoch = (int(timestamp.values[place]) for place in (1, 2, 7))
            batches = (batch - in_epoch) / epoch if epoch else self._epoch_batches
            if batches:
                return batch / (max_duration.value * batches)
        part: float = (timestamp.get(max_duration.unit) / max_duration).value
        return part


@dataclass
class _Evaluations:
    """Runs of one evaluator; ``part`` is the finished part of the training at the last run."""

    count: int = 0
    first: int = 0
    microseconds: int = 0
    part: float = 0.0

    def add(self, microseconds: int, part: float) -> None:
        self.first = self.first if self.count else microseconds
        self.count += 1
        self.microseconds += microseconds
        self.part = part

    def remaining_seconds(self, start_part: float) -> float:
        frequency = self.part / self.count
        if frequency <= 0:
            # It has run before the training made any progress: its frequency is unknown.
            return 0.0
        if self.count > 1:
            average = (self.microseconds - self.first) / 1e6 / (self.count - 1)
        else:
            average = self.microseconds / 1e6
        return average * (1 / frequency * (1 - start_part) - self.count)
