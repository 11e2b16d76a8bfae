"""Points in the training at which algorithms begin or end something."""

from bus.errors import ConfigurationError
from bus.event import Event
from bus.time import Time, TimeInput, TimeUnit
from trainer.state import State

__all__ = ["check_point", "check_update_interval", "has_reached", "share_of_way", "update_event"]

_UPDATE_EVENTS = {TimeUnit.BATCH: Event.BATCH_END, TimeUnit.EPOCH: Event.EPOCH_END}


def check_point(name: str, point: TimeInput) -> Time:
    """Reads a point in the training: a share of it such as ``0.7dur``, or a count from its start such as ``3ep``.

    Raises :class:`bus.errors.InvalidTimeError`, or :class:`bus.errors.ConfigurationError` for a point that lies outside
    of the training."""
    time = Time.from_input(point)
    if time.value >= 0 and (time.unit is not TimeUnit.DURATION or time.value <= 1):
        return time
    raise ConfigurationError(f"{name} {str(time)!r} is not allowed: use 0dur to 1dur, or a count such as 3ep or 100ba")


def check_update_interval(name: str, interval: TimeInput) -> Time:
    """Reads an interval in whole batches or epochs.

    Raises :class:`bus.errors.InvalidTimeError`, or :class:`bus.errors.ConfigurationError` for another unit and for an
    interval of no length."""
    time = Time.from_input(interval)
    if time.unit in _UPDATE_EVENTS and time.value > 0:
        return time
    raise ConfigurationError(f"{name} {str(time)!r} is not allowed: use batches or epochs, such as 10ba or 1ep")


def update_event(interval: Time) -> Event:
    """Where an interval from :func:`check_update_interval` is looked at."""
    return _UPDATE_EVENTS[interval.unit]


def has_reached(state: State, point: Time) -> bool:
    """Whether the training has come to a point from :func:`check_point`."""
    return _elapsed(state, point.unit) >= point


def share_of_way(state: State, point: Time) -> float:
    """How much of the way to a point from :func:`check_point` is behind the training, from 0 to 1."""
    return 1.0 if has_reached(state, point) else _elapsed(state, point.unit).value / point.value


def _elapsed(state: State, unit: TimeUnit) -> Time:
    if unit is TimeUnit.DURATION:
        return state.get_elapsed_duration() or Time(0, unit)
    return state.timestamp.get(unit)
