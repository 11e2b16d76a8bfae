"""Bounds of a replay, by training time."""

from offloop.bus.errors import ConfigurationError, InvalidTimeError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time, TimeUnit
from offloop.bus.types.timestamp import COUNTED_AT

SETUP_EVENTS = frozenset({Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START})
"""Events before the first batch, from which callbacks learn about the training. Every replay begins with them."""

# Counters that restart at each boundary: while they are zero, the training is at the boundary.
_SINCE_EPOCH = ("batch_in_epoch", "sample_in_epoch", "token_in_epoch")
_SINCE = {TimeUnit.ITERATION: ("epoch_in_iteration", "token_in_iteration", *_SINCE_EPOCH), TimeUnit.EPOCH: _SINCE_EPOCH}


def parse_bound(text: str) -> Time:
    """Parse a bound, such as ``2ep``, ``100ba``, ``0.5dur`` or ``90sec``. Raises InvalidTimeError."""
    time = Time.from_timestring(text)
    if not time.value >= 0:
        raise InvalidTimeError(f"invalid time {text!r}: it is before the beginning", value=text)
    return time


def compare(state: Snapshot, bound: Time) -> int:
    """Return -1 for an event before the bound, 0 at it, 1 after it.

    Events in the next batch are at the bound too: the training is past it when that batch ends."""
    values, unit, whole = state.timestamp.values, bound.unit, 1.0
    if unit is TimeUnit.DURATION:
        longest = state.max_duration
        if longest is None:
            if not values.batch:
                return -1
            raise ConfigurationError(
                f"{bound} is a share of max_duration, which is not in this recording: "
                "give a training time in ep, ba, sp, tok or sec, such as 2ep"
            )
        unit, whole = longest.unit, longest.value
    index, scale = COUNTED_AT[unit]
    reached = values[index] / scale / whole if whole else 1.0
    if reached != bound.value:
        return -1 if reached < bound.value else 1
    return int(any(getattr(values, name) for name in _SINCE.get(unit, ())))


class Window:
    """Events to replay: from ``start`` to ``until``, both included, and the :data:`SETUP_EVENTS` before them.

    Each event is checked once, in order."""

    def __init__(self, start: Time | None, until: Time | None) -> None:
        self._start = start
        self._until = until
        self._past: set[int] = set()
        self.begun: bool = False  # an event in the window was found
        self.over: bool = False  # every rank is past the end

    def takes(self, state: Snapshot) -> bool:
        """Return whether to replay the event. Raise ConfigurationError if the recording lacks the necessary values."""
        if self._until is not None and compare(state, self._until) > 0:
            self._past.add(state.rank)
            world_size = state.world_size
            self.over = len(self._past) >= (world_size if isinstance(world_size, int) else 1)
            return False
        if self._start is None or compare(state, self._start) >= 0:
            self.begun = True
            return True
        return state.event in SETUP_EVENTS
