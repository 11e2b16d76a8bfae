"""Durations, and intervals at which something is due. Does not import torch."""

import datetime

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.bus.types.intervals import part_of, passes
from offloop.bus.types.time import Time, TimeInput, TimeUnit
from offloop.bus.types.timestamp import Timestamp
from offloop.trainer.arguments.checks import check_number


def check_max_duration(duration: TimeInput, argument: str = "max_duration") -> Time:
    """Read a duration of training; a plain number counts epochs."""
    time = _read(duration, argument, "2ep")
    if time.unit is TimeUnit.DURATION or time.value < 0:
        raise ConfigurationError(
            f"{argument} {str(time)!r} is not allowed: "
            "use epochs, batches, samples, tokens, iterations or a clock time, such as 2ep, 500ba, 10000sp, 1h30m"
        )
    return time


def scaled_max_duration(duration: TimeInput | None, ratio: float) -> Time | None:
    check_number(ratio, "scale_schedule_ratio", above=0)
    if duration is None:
        return None
    time = check_max_duration(duration)
    return time if ratio == 1 else check_max_duration(time * ratio)


def end_of_fit(
    timestamp: Timestamp,
    duration: TimeInput | None,
    max_duration: Time | None,
    iteration_length: Time | None,
    resumed: bool,
) -> Time:
    """Return the end of ``fit(duration)``. The training's ``max_duration`` may have passed if it is ``resumed``."""
    if duration is not None:
        length = check_max_duration(duration)
        begin = timestamp.get(length.unit)
        # In seconds from the next whole one.
        if length.unit is TimeUnit.SECOND and timestamp.total_wct > datetime.timedelta(seconds=begin.value):
            begin += 1
        max_duration = begin + length
    if max_duration is None:
        raise ConfigurationError("fit() needs to know how long to train: pass max_duration='5ep' or the like")
    if timestamp >= max_duration and not resumed:
        raise ConfigurationError(
            f"max_duration {str(max_duration)!r} has passed already: "
            "pass a longer one, or fit(duration=...), or fit(reset_time=True)"
        )
    check_countable(max_duration, iteration_length)
    return max_duration


def check_countable(max_duration: Time | None, iteration_length: Time | None) -> None:
    """Refuse a duration in iterations without an iteration length."""
    if max_duration is not None and max_duration.unit is TimeUnit.ITERATION and iteration_length is None:
        raise ConfigurationError(
            f"max_duration {str(max_duration)!r} is not allowed where iterations have no length: "
            "pass iteration_length='1ep' or the like, or use another unit"
        )


def check_iteration_length(length: TimeInput | None, argument: str = "iteration_length") -> Time | None:
    """Read the length of an iteration, in epochs or tokens."""
    if length is None:
        return None
    time = _read(length, argument, "1ep")
    if time.unit not in (TimeUnit.EPOCH, TimeUnit.TOKEN) or time.value <= 0:
        raise ConfigurationError(
            f"{argument} {str(time)!r} is not allowed: use epochs or tokens, such as 1ep or 1000000tok"
        )
    return time


def check_interval(interval: TimeInput, argument: str = "interval") -> Time:
    """Read an interval. A plain number counts epochs, and the number zero means never."""
    time = _read(interval, argument, "100ba, or 0 for never")
    is_never = isinstance(interval, int) and interval == 0
    if not (time.value > 0 or is_never) or (time.unit is TimeUnit.DURATION and time.value > 1):
        raise ConfigurationError(
            f"{argument} {str(time)!r} is not allowed: use 0 for never, or 1ep, 100ba, 0.25dur and the like"
        )
    return time


class Interval:
    """An interval of training time, due at the event at which the count passes the next multiple.

    Epochs and iterations are counted at their end, everything else after each batch; ``events`` are these three. A
    share of the training (``0.25dur``) is rounded up to whole units of ``max_duration``; a share of one epoch to whole
    batches, when their number is known. Reference: ``composer/utils/misc.py``, ``create_interval_scheduler``."""

    def __init__(
        self,
        interval: Time,
        max_duration: Time,
        batches_per_epoch: int | None,
        events: tuple[Event, Event, Event] = (Event.EPOCH_END, Event.ITERATION_END, Event.BATCH_END),
    ) -> None:
        if interval.unit is TimeUnit.DURATION:
            interval = part_of(max_duration, interval.value, batches_per_epoch)
        at_epoch, at_iteration, at_batch = events
        self.event: Event = {TimeUnit.EPOCH: at_epoch, TimeUnit.ITERATION: at_iteration}.get(interval.unit, at_batch)
        self._interval = interval

    def is_due(self, event: Event, timestamp: Timestamp, previous: Timestamp | None) -> bool:
        if event is not self.event or self.is_never:
            return False
        return passes(self._interval, timestamp.values, None if previous is None else previous.values)

    @property
    def is_never(self) -> bool:
        return not self._interval.value


def _read(given: TimeInput, argument: str, example: str) -> Time:
    # True is a number for Python, and would be one epoch.
    if isinstance(given, bool):
        raise ConfigurationError(f"{argument} {given!r} is not allowed: use a time such as {example}")
    return Time.from_input(given, TimeUnit.EPOCH)
