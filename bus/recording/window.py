"""The bounds of a replay: by training time or by the clock."""

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
"""The events before the first batch, by which callbacks learn what is trained. They come first wherever a replay
begins."""

_HOW_TO_WRITE = (
    "write a training time (2ep, 100ba, 0.5dur, 90sec, 1h30m), '+' and the time since the recording began (+90s, "
    "+1h30m), or a date with a time (2026-11-21T10:00)"
)
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_MICROSECOND = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)  # noqa: UP017  the same as in the docs of datetime

# What is counted from the last such boundary on: as long as it is zero, the boundary is where the training stands.
_SINCE_EPOCH = ("batch_in_epoch", "sample_in_epoch", "token_in_epoch")
_SINCE = {TimeUnit.ITERATION: ("epoch_in_iteration", "token_in_iteration", *_SINCE_EPOCH), TimeUnit.EPOCH: _SINCE_EPOCH}


@dataclass(frozen=True)
class _TrainingBound:
    """So many batches, epochs, ... have ended, and none since. An event within the next batch is at the bound too:
    the training is past it only when that batch has ended."""

    time: Time

    def __str__(self) -> str:
        return str(self.time)

    def compare(self, state: Snapshot, began: int) -> int:
        """-1 when an event comes before the bound, 0 when it is at it, 1 when it comes after it; ``began`` is when the
        recording began, in nanoseconds since 1970.

        Raises ConfigurationError: the recording does not tell."""
        values, unit, whole = state.timestamp.values, self.time.unit, 1.0
        if unit is TimeUnit.DURATION:
            longest = state.max_duration
            if longest is None:
                if not values.batch:
                    return -1
                raise ConfigurationError(
                    f"{self} is a share of max_duration, which this recording does not tell: "
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
    """A moment by the recorded times, as written in ``text``."""

    text: str
    time_ns: int
    """Since 1970, or since the recording began."""
    is_relative: bool = False

    def __str__(self) -> str:
        return self.text

    def compare(self, state: Snapshot, began: int) -> int:
        moment = self.time_ns + began * self.is_relative
        return (state.time_ns > moment) - (state.time_ns < moment)


Bound: TypeAlias = _TrainingBound | _ClockBound
"""A moment at which a part of a recording begins or ends."""


def parse_bound(text: str) -> Bound:
    """Reads a bound: a training time (``2ep``, ``100ba``, ``0.5dur``; ``90sec`` and ``1h30m`` are time spent
    training), ``+`` and the time since the recording began (``+90s``, ``+1h30m``), or a date with a time as in ISO
    8601, of this machine's time zone unless it names one.

    Raises InvalidTimeError: it is none of these."""
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
    """The events of a recording that are replayed: those from ``start`` to ``until``, events at either moment included,
    and the :data:`SETUP_EVENTS` before them. It is asked about each event in order, once. ``began`` is when the
    recording began, in nanoseconds since 1970."""

    def __init__(self, start: Bound | None, until: Bound | None, began: int = 0) -> None:
        self._began = began
        self._start = start
        self._until = until
        self._past: set[int] = set()
        self.begun = False
        """An event within it has come."""
        self.over = False
        """Every rank is past its end."""

    def takes(self, state: Snapshot) -> bool:
        """The event is replayed. Raises ConfigurationError: the recording does not tell."""
        if self._until is not None and self._until.compare(state, self._began) > 0:
            self._past.add(state.rank)
            world_size = state.world_size
            self.over = len(self._past) >= (world_size if isinstance(world_size, int) else 1)
            return False
        if self._start is None or self._start.compare(state, self._began) >= 0:
            self.begun = True
            return True
        return state.event in SETUP_EVENTS
