"""Training time: counters of iterations, epochs, batches, samples, tokens and seconds."""

import datetime
import operator
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from offloop.bus.errors import InvalidTimeError, TimeUnitError
from offloop.bus.types.time import Time, TimeInput, TimeUnit

_NO_TIME = datetime.timedelta(0)
_MICROSECOND = datetime.timedelta(microseconds=1)
_COUNTERS = {
    "iteration": TimeUnit.ITERATION,
    "epoch": TimeUnit.EPOCH,
    "batch": TimeUnit.BATCH,
    "sample": TimeUnit.SAMPLE,
    "token": TimeUnit.TOKEN,
    "epoch_in_iteration": TimeUnit.EPOCH,
    "token_in_iteration": TimeUnit.TOKEN,
    "batch_in_epoch": TimeUnit.BATCH,
    "sample_in_epoch": TimeUnit.SAMPLE,
    "token_in_epoch": TimeUnit.TOKEN,
}
_new_tuple = tuple.__new__


class TrainingTime(NamedTuple):
    """The numbers of a :class:`Timestamp` in the order on the wire: ten counts, and four durations in microseconds."""

    iteration: int = 0
    epoch: int = 0
    batch: int = 0
    sample: int = 0
    token: int = 0
    epoch_in_iteration: int = 0
    token_in_iteration: int = 0
    batch_in_epoch: int = 0
    sample_in_epoch: int = 0
    token_in_epoch: int = 0
    total_wct: int = 0
    iteration_wct: int = 0
    epoch_wct: int = 0
    batch_wct: int = 0


TrainingTime._field_defaults = {}  # for msgspec: on the wire every number has to come

COUNTED_AT = {
    **{unit: (index, 1) for index, unit in enumerate(list(_COUNTERS.values())[:5])},
    TimeUnit.SECOND: (TrainingTime._fields.index("total_wct"), 1_000_000),
}  # unit to the index of its total in a TrainingTime, and the size of the unit there


class _Counter:
    def __init__(self, description: str) -> None:
        self.__doc__ = description

    def __set_name__(self, owner: type, name: str) -> None:
        self._index, self._unit = TrainingTime._fields.index(name), _COUNTERS[name]

    def __get__(self, timestamp: "Timestamp", owner: type) -> Time:
        return Time(timestamp.values[self._index], self._unit)


class _Duration:
    def __init__(self, description: str) -> None:
        self.__doc__ = description

    def __set_name__(self, owner: type, name: str) -> None:
        self._index = TrainingTime._fields.index(name)

    def __get__(self, timestamp: "Timestamp", owner: type) -> datetime.timedelta:
        return datetime.timedelta(microseconds=timestamp.values[self._index])


class Timestamp:
    """The training time of a run at one moment. Immutable.

    ``epoch``, ``batch``, ``sample``, ``token`` and ``iteration`` count from the start of the run; ``batch_in_epoch``
    and the like from the start of the epoch or iteration. The ``*_wct`` durations are wall clock time spent training.

    A time or time string is compared with the counter of its unit (``timestamp >= "100ba"``), another timestamp with
    all values, which orders the moments of a run. Counters take ints, times and time strings.

    Raises InvalidTimeError for a value that is not a count and TimeUnitError for a count in another unit. Reference:
    ``composer/core/time.py``."""

    __slots__ = ("values",)
    values: TrainingTime
    """The 14 numbers; durations in microseconds."""

    iteration: _Counter = _Counter("Complete iterations.")
    epoch: _Counter = _Counter("Complete epochs.")
    batch: _Counter = _Counter("Batches trained on.")
    sample: _Counter = _Counter("Samples trained on.")
    token: _Counter = _Counter("Tokens trained on.")
    epoch_in_iteration: _Counter = _Counter("Complete epochs of this iteration.")
    token_in_iteration: _Counter = _Counter("Tokens of this iteration.")
    batch_in_epoch: _Counter = _Counter("Batches of this epoch.")
    sample_in_epoch: _Counter = _Counter("Samples of this epoch.")
    token_in_epoch: _Counter = _Counter("Tokens of this epoch.")
    total_wct: _Duration = _Duration("Time spent training since the start of the run.")
    iteration_wct: _Duration = _Duration("Time spent training in this iteration.")
    epoch_wct: _Duration = _Duration("Time spent training in this epoch.")
    batch_wct: _Duration = _Duration("Time that the last batch took.")

    def __init__(
        self,
        iteration: TimeInput = 0,
        epoch: TimeInput = 0,
        batch: TimeInput = 0,
        sample: TimeInput = 0,
        token: TimeInput = 0,
        epoch_in_iteration: TimeInput = 0,
        token_in_iteration: TimeInput = 0,
        batch_in_epoch: TimeInput = 0,
        sample_in_epoch: TimeInput = 0,
        token_in_epoch: TimeInput = 0,
        total_wct: datetime.timedelta | None = None,
        iteration_wct: datetime.timedelta | None = None,
        epoch_wct: datetime.timedelta | None = None,
        batch_wct: datetime.timedelta | None = None,
    ) -> None:
        totals = (iteration, epoch, batch, sample, token)
        parts = (epoch_in_iteration, token_in_iteration, batch_in_epoch, sample_in_epoch, token_in_epoch)
        durations = (total_wct, iteration_wct, epoch_wct, batch_wct)
        self.values = TrainingTime(*map(_count, (*totals, *parts), _COUNTERS), *map(_microseconds, durations))

    @classmethod
    def from_values(cls, values: Iterable[int]) -> "Timestamp":
        """Return a timestamp of :attr:`values`, which are not checked."""
        self = cls.__new__(cls)
        self.values = values if type(values) is TrainingTime else TrainingTime._make(values)
        return self

    def get(self, unit: TimeUnit | str) -> Time:
        """Return the counter of a unit since the start of the run; ``sec`` is in whole seconds of training.

        Raises TimeUnitError for ``dur``: a timestamp does not contain the length of the run."""
        unit = TimeUnit(unit)
        if unit is TimeUnit.DURATION:
            raise TimeUnitError(
                "a timestamp does not know its share of the training ('dur'): "
                "use iter, ep, ba, sp, tok or sec, such as '10ep'"
            )
        index, scale = COUNTED_AT[unit]
        return Time(self.values[index] // scale, unit)

    def copy(self, **changes: Any) -> "Timestamp":
        """Return a copy with some counters or durations changed: ``timestamp.copy(epoch=3)``."""
        return Timestamp(**{name: getattr(self, name) for name in TrainingTime._fields} | changes)

    def advance_batch(self, samples: int, tokens: int, microseconds: int) -> "Timestamp":
        """As :meth:`to_next_batch`, for the training loop: plain numbers, nothing is checked."""
        (iteration, epoch, batch, sample, token, epoch_i, token_i, batch_e, sample_e, token_e, total, in_i, in_e, _) = (
            self.values
        )
        following = Timestamp.__new__(Timestamp)
        following.values = _new_tuple(
            TrainingTime,
            (
                iteration,
                epoch,
                batch + 1,
                sample + samples,
                token + tokens,
                epoch_i,
                token_i + tokens,
                batch_e + 1,
                sample_e + samples,
                token_e + tokens,
                total + microseconds,
                in_i + microseconds,
                in_e + microseconds,
                microseconds,
            ),
        )
        return following

    def to_next_batch(
        self, samples: TimeInput = 0, tokens: TimeInput = 0, duration: datetime.timedelta | None = None
    ) -> "Timestamp":
        """Return the timestamp after a batch with these samples, tokens and duration."""
        return self.advance_batch(_count(samples, "sample"), _count(tokens, "token"), _microseconds(duration))

    def to_next_epoch(self, tokens: TimeInput = 0, duration: datetime.timedelta | None = None) -> "Timestamp":
        """Return the timestamp at the start of the next epoch, with tokens and time since the last batch."""
        more_tokens, more_time = _count(tokens, "token"), _microseconds(duration)
        now = self.values
        return Timestamp.from_values(
            TrainingTime(
                iteration=now.iteration,
                epoch=now.epoch + 1,
                batch=now.batch,
                sample=now.sample,
                token=now.token + more_tokens,
                epoch_in_iteration=now.epoch_in_iteration + 1,
                token_in_iteration=now.token_in_iteration + more_tokens,
                total_wct=now.total_wct + more_time,
                iteration_wct=now.iteration_wct + more_time,
            )
        )

    def to_next_iteration(self, duration: datetime.timedelta | None = None) -> "Timestamp":
        """Return the timestamp at the start of the next iteration, with the time since the last batch."""
        now = self.values
        return Timestamp.from_values(
            TrainingTime(
                iteration=now.iteration + 1,
                epoch=now.epoch,
                batch=now.batch,
                sample=now.sample,
                token=now.token,
                total_wct=now.total_wct + _microseconds(duration),
            )
        )

    def __repr__(self) -> str:
        parts = [
            f"{name}={value if name in _COUNTERS else getattr(self, name)!r}"
            for name, value in zip(TrainingTime._fields, self.values, strict=True)
        ]
        return f"Timestamp({', '.join(parts)})"

    def __hash__(self) -> int:
        return hash(self.values)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Timestamp):
            return self.values == other.values
        if isinstance(other, str):
            other = Time.from_timestring(other)
        if isinstance(other, Time):
            return other.unit is not TimeUnit.DURATION and self.get(other.unit) == other
        return NotImplemented

    def __lt__(self, other: "Timestamp | Time | str") -> bool:
        return self._compare(other, operator.lt)

    def __le__(self, other: "Timestamp | Time | str") -> bool:
        return self._compare(other, operator.le)

    def __gt__(self, other: "Timestamp | Time | str") -> bool:
        return self._compare(other, operator.gt)

    def __ge__(self, other: "Timestamp | Time | str") -> bool:
        return self._compare(other, operator.ge)

    def _compare(self, other: "Timestamp | Time | str", compare: Callable[[Any, Any], bool]) -> bool:
        if isinstance(other, Timestamp):
            return compare(self.values, other.values)
        if not isinstance(other, Time | str):
            return NotImplemented
        time = Time.from_input(other)
        return compare(self.get(time.unit), time)


def _count(value: TimeInput, name: str) -> int:
    if type(value) is int:
        return value
    unit = _COUNTERS[name]
    try:
        time = Time.from_input(value, unit)
    except InvalidTimeError as error:
        raise InvalidTimeError(f"{name}: {error}", value=error.value) from None
    if time.unit is not unit:
        raise TimeUnitError(
            f"{name} is counted in {unit.value}, not in {time.unit.value}: write {name}='10{unit.value}' (got {time})",
            value=time,
        )
    return int(time)


def _microseconds(duration: datetime.timedelta | None) -> int:
    return (duration or _NO_TIME) // _MICROSECOND


def wall_clock() -> Callable[[], int]:
    """Return a clock: a function that returns nanoseconds since 1970 (UTC) and never goes back.

    It reads the system's time once and then adds elapsed time, so that a correction of the system's time (NTP, an
    operator, a virtual machine that wakes up) cannot reorder events or distort throughput."""
    now = time.monotonic_ns
    anchor = time.time_ns() - now()
    return lambda: anchor + now()
