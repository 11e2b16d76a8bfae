"""Bounds of a replay, by training time or by the clock."""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TypeAlias

from offloop.bus.errors import ConfigurationError, InvalidTimeError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time, TimeUnit
from offloop.bus.types.timestamp import COUNTED_AT

SETUP_EVENTS = frozenset({Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START})
"""Events before the first batch, from which callbacks learn about the training. Every replay begins with them."""

_HOW_TO_WRITE = (
    "write a training time (2ep, 100ba, 0.5dur, 90sec, 1h30m), '+' and the time since the recording began (+90s, "
    "+1h30m), or a date with a time (2026-11-21T10:00)"
)
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_MICROSECOND = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)  # noqa: UP017  the same as in the docs of datetime

# Counters that restart at each boundary: while they are zero, the training is at the boundary.
_SINCE_EPOCH = ("batch_in_epoch", "sample_in_epoch", "token_in_epoch")
_SINCE = {TimeUnit.ITERATION: ("epoch_in_iteration", "token_in_iteration", *_SINCE_EPOCH), TimeUnit.EPOCH: _SINCE_EPOCH}


@dataclass(frozen=True)
class _TrainingBound:
    """A training time. Events in the next batch are at the bound too: the training is past it when that batch ends."""

    time: Time

    def __str__(self) -> str:
        return str(self.time)

    def compare(self, state: Snapshot, began: int) -> int:
        """Return -1 for an event before the bound, 0 at it, 1 after it. ``began`` is the recording's start, in ns."""
        values, unit, whole = state.timestamp.values, self.time.unit, 1.0
        if unit is TimeUnit.DURATION:
            longest = state.max_duration
            if longest is None:
                if not values.batch:
                    return -1
                raise ConfigurationError(
                    f"{self} is a share of max_duration, which is not in this recording: "
                    "give a training time in ep, ba, sp, tok or sec, such as 2ep"
                )
            unit, whole = longest.unit, longest.value
        index, scale = COUNTED_AT[unit]
        reached = values[index] / scale / whole if whole else 1.0
        if reached != self.time.value:
            return -1 if reached < self.time.value else 1
        return int(any(getattr(values, name) for name in _SINCE.get(unit, ())))


@dataclass(frozen=True)
class _ClockBound:
    """A moment of the recorded clock, as written in ``text``."""

    text: str
    time_ns: int  # nanoseconds since 1970, or since the start of the recording
    is_relative: bool = False

    def __str__(self) -> str:
        return self.text

    def compare(self, state: Snapshot, began: int) -> int:
        moment = self.time_ns + began * self.is_relative
        return (state.time_ns > moment) - (state.time_ns < moment)


Bound: TypeAlias = _TrainingBound | _ClockBound  # start or end of a part of a recording


def parse_bound(text: str) -> Bound:
    """Parse a bound, or raise InvalidTimeError.

    It is a training time (``2ep``, ``100ba``, ``0.5dur``; ``90sec`` and ``1h30m`` are time spent training), ``+`` and
    the time since the recording began (``+90s``, ``+1h30m``), or an ISO 8601 date and time, by default local."""
    stripped = text.strip()
    try:
        if _DATE.match(stripped):
            since = datetime.fromisoformat(stripped).astimezone() - _EPOCH
            return _ClockBound(stripped, since // _MICROSECOND * 1000)
        is_relative = stripped.startswith("+")
        time = Time.from_timestring(stripped.removeprefix("+"))
        if not time.value >= 0:
            raise InvalidTimeError("it is before the beginning")
        if is_relative and time.unit is TimeUnit.SECOND:
            return _ClockBound(stripped, int(time) * 10**9, is_relative)
    except (ValueError, OverflowError):
        raise InvalidTimeError(f"invalid time {text[:60]!r}: {_HOW_TO_WRITE}", value=text) from None
    return _TrainingBound(time)


class Window:
    """Events to replay: from ``start`` to ``until``, both included, and the :data:`SETUP_EVENTS` before them.

    Each event is checked once, in order. ``began`` is the recording's start, in nanoseconds since 1970."""

    def __init__(self, start: Bound | None, until: Bound | None, began: int = 0) -> None:
        self._began = began
        self._start = start
        self._until = until
        self._past: set[int] = set()
        self.begun = False  # an event in the window was found
        self.over = False  # every rank is past the end

    def takes(self, state: Snapshot) -> bool:
        """Return whether to replay the event. Raise ConfigurationError if the recording lacks the necessary values."""
        if self._until is not None and self._until.compare(state, self._began) > 0:
            self._past.add(state.rank)
            world_size = state.world_size
            self.over = len(self._past) >= (world_size if isinstance(world_size, int) else 1)
            return False
        if self._start is None or self._start.compare(state, self._began) >= 0:
            self.begun = True
            return True
        return state.event in SETUP_EVENTS
