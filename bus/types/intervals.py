"""Intervals: every so many batches, or after so much of the training. The trainer and the consumers both decide by
:func:`is_due`, from the fields of every snapshot."""

import math
from functools import lru_cache
from typing import NamedTuple

from offloop.bus.errors import ConfigurationError, InvalidTimeError, TimeUnitError
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time, TimeUnit
from offloop.bus.types.timestamp import COUNTED_AT, TrainingTime

MAX_INTERVAL = 2**31
AT_END = "end"
"""The interval that stands for the end of the training alone; ``1ep+end`` is both."""

_LONGEST_TEXT = 40

MICROBATCH_EVENTS = frozenset(
    {
        Event.BEFORE_FORWARD,
        Event.AFTER_FORWARD,
        Event.BEFORE_LOSS,
        Event.AFTER_LOSS,
        Event.BEFORE_BACKWARD,
        Event.AFTER_BACKWARD,
    }
)
"""The events that come once for each microbatch."""

_IN_STEP = MICROBATCH_EVENTS | {
    Event.BEFORE_DATALOADER,
    Event.AFTER_DATALOADER,
    Event.BATCH_START,
    Event.BEFORE_TRAIN_BATCH,
    Event.AFTER_TRAIN_BATCH,
}
_BEFORE_EVAL_BATCH_END = {Event.EVAL_BATCH_START, Event.EVAL_BEFORE_FORWARD, Event.EVAL_AFTER_FORWARD}
_BEFORE_PREDICT_BATCH_END = {Event.PREDICT_BATCH_START, Event.PREDICT_BEFORE_FORWARD, Event.PREDICT_AFTER_FORWARD}
_AFTER_BATCH = frozenset({Event.BATCH_END, Event.BATCH_CHECKPOINT})
_AFTER_EPOCH = frozenset({Event.EPOCH_END, Event.EPOCH_CHECKPOINT})
_AFTER_ITERATION = frozenset({Event.ITERATION_END, Event.ITERATION_CHECKPOINT})
_AFTER = _AFTER_BATCH | _AFTER_EPOCH | _AFTER_ITERATION

# For each event of a batch: by which of the three timestamps its batch is counted (training, evaluation, prediction),
# and what is to be added because that timestamp does not count it yet.
_COUNTED_BY: dict[Event, tuple[int, int]] = {
    **dict.fromkeys(_IN_STEP, (0, 1)),
    **dict.fromkeys(_AFTER_BATCH, (0, 0)),
    **dict.fromkeys(_BEFORE_EVAL_BATCH_END, (1, 1)),
    Event.EVAL_BATCH_END: (1, 0),
    **dict.fromkeys(_BEFORE_PREDICT_BATCH_END, (2, 1)),
    Event.PREDICT_BATCH_END: (2, 0),
}
BATCH_EVENTS = frozenset(_COUNTED_BY)
"""The events that belong to a batch, of the training, an evaluation or a prediction."""

_WITHIN_BATCH = BATCH_EVENTS - _AFTER

_EVENTS_OF = {TimeUnit.EPOCH: _AFTER_EPOCH, TimeUnit.ITERATION: _AFTER_ITERATION}


class EventPosition(NamedTuple):
    """An event, and how far the training, the evaluation and the prediction were then; ``None`` for all zero."""

    event: Event
    timestamp: TrainingTime
    previous: TrainingTime | None = None
    """The training time before the last batch, epoch or iteration ended."""
    eval_timestamp: TrainingTime | None = None
    predict_timestamp: TrainingTime | None = None
    max_duration: Time | None = None
    dataloader_len: int | None = None
    """Batches in an epoch."""
    microbatch: int = 0
    """Index of the microbatch at an event that comes once for each."""


def batch_number(
    event: Event,
    timestamp: TrainingTime,
    eval_timestamp: TrainingTime | None = None,
    predict_timestamp: TrainingTime | None = None,
) -> int:
    """Number of the batch that an event belongs to, from 1; 0 for one that belongs to none, such as EPOCH_END.

    ``None`` is a training time of nothing but zeros. Batches of an evaluation or a prediction are counted by its
    own."""
    counted_by = _COUNTED_BY.get(event)
    if counted_by is None:
        return 0
    which, ahead = counted_by
    values = (timestamp, eval_timestamp, predict_timestamp)[which]
    return (values.batch if values is not None else 0) + ahead


def is_due(interval: int | str, position: EventPosition) -> bool:
    """An interval is due at a position.

    A number stands for batches, counted from 1, those of an evaluation or a prediction by themselves: 10 for the 10th,
    20th, .... Events that belong to no batch come every time.

    A text is a time such as ``2ep``, ``10ba``, ``30sp``, ``1000tok``, ``90sec``, ``1iter`` or ``0.25dur``, a share of
    the whole training. It is due

    - after a batch, an epoch or an iteration (at its END and CHECKPOINT events), where the count passes the next
      multiple: epochs when one ends, iterations when one ends, everything else after a batch;
    - within a batch of the training, at the first batch of the interval, in its first microbatch: ``10ba`` at the
      batches that begin when 0, 10, 20, ... are done, ``2ep`` at the first one of every second epoch;
    - within a batch of an evaluation or a prediction, at every so many of its own from the first one on, and at the
      first one alone for a time that is not in batches;
    - at other events, every time.

    With ``+end`` it is due as well where ``max_duration`` is reached, after the batch, epoch or iteration with which it
    is; a training that is stopped has reached it. ``end`` stands for that alone, and at other events for their coming
    then. Reference: ``composer/utils/misc.py``, ``create_interval_scheduler``, with ``include_end_of_training``."""
    event = position.event
    if not isinstance(interval, str):
        return (
            batch_number(event, position.timestamp, position.eval_timestamp, position.predict_timestamp) % interval == 0
        )
    time, at_end = _read(interval)
    if event in _AFTER:
        return (time is not None and _is_passed(time, position)) or (at_end and _is_end(position))
    if event in _WITHIN_BATCH:
        return time is not None and _is_first(time, position)
    return time is not None or _is_reached(position.timestamp, position.max_duration)


def _is_passed(time: Time, position: EventPosition) -> bool:
    time = _in_units(time, position.max_duration, position.dataloader_len)
    if time.unit is TimeUnit.DURATION or position.event not in _EVENTS_OF.get(time.unit, _AFTER_BATCH):
        return False
    return passes(time, position.timestamp, position.previous)


def _is_end(position: EventPosition) -> bool:
    if not _is_reached(position.timestamp, position.max_duration):
        return False
    # A batch is the last one when the end is reached with it; an epoch or iteration may only follow the last batch.
    return position.event in _AFTER_BATCH or not (
        position.previous and _is_reached(position.previous, position.max_duration)
    )


def _is_reached(timestamp: TrainingTime, max_duration: Time | None) -> bool:
    if max_duration is None:
        return False
    index, limit = counter_of(max_duration)
    return timestamp[index] >= limit


def _is_first(time: Time, position: EventPosition) -> bool:
    which, _ = _COUNTED_BY[position.event]
    if which:
        batch = (
            batch_number(position.event, position.timestamp, position.eval_timestamp, position.predict_timestamp) - 1
        )
        return batch % int(time.value) == 0 if time.unit is TimeUnit.BATCH else batch == 0
    if position.microbatch:
        return False
    time = _in_units(time, position.max_duration, position.dataloader_len)
    timestamp = position.timestamp
    if time.unit is TimeUnit.EPOCH:
        return timestamp.batch_in_epoch == 0 and timestamp.epoch % int(time.value) == 0
    if time.unit is TimeUnit.BATCH:
        return timestamp.batch % int(time.value) == 0
    # Samples and the like of the batches to come are not known.
    return timestamp.batch == 0


def passes(step: Time, timestamp: TrainingTime, previous: TrainingTime | None) -> bool:
    """The count of a time's unit has passed a multiple of it since ``previous``, ``None`` for the start."""
    index, size = counter_of(step)
    before = 0 if previous is None else previous[index]
    return timestamp[index] // size > before // size


def counter_of(time: Time) -> tuple[int, int]:
    """Index of a time's unit in a :class:`TrainingTime`, and the time in what is counted there."""
    index, scale = COUNTED_AT[time.unit]
    return index, int(time.value) * scale


@lru_cache(256)
def _in_units(time: Time, max_duration: Time | None, dataloader_len: int | None) -> Time:
    if time.unit is not TimeUnit.DURATION or max_duration is None or not max_duration.value:
        return time
    return part_of(max_duration, time.value, dataloader_len)


def part_of(whole: Time, share: float, batches_per_epoch: int | None) -> Time:
    """A share of a training, rounded up to whole units of its length; for one in epochs to whole batches, when their
    number is known."""
    value, unit = whole.value, whole.unit
    if unit is TimeUnit.EPOCH and batches_per_epoch:
        value, unit = value * batches_per_epoch, TimeUnit.BATCH
    # 0.1 * 30 is a little more than 3, and would round up to 4.
    return Time(max(1, math.ceil(round(value * share, 6))), unit)


def check_interval(interval: object, event: Event | None = None) -> int | str:
    """An interval as it travels: a number of batches, or a time in its one spelling.

    Raises :class:`offloop.bus.errors.ConfigurationError` for anything else, and for what cannot be due at ``event``."""
    if type(interval) is int and 1 <= interval <= MAX_INTERVAL:
        return interval
    if not isinstance(interval, str):
        raise ConfigurationError(
            f"{interval!r}, which is not an interval: use a whole number of batches from 1 to {MAX_INTERVAL}, or a "
            "time such as '1ep', '10ba', '0.25dur' or '1ep+end'"
        )
    try:
        time, at_end = _read(interval)
    except (InvalidTimeError, TimeUnitError) as error:
        raise ConfigurationError(f"{interval[:_LONGEST_TEXT]!r}, which is not an interval: {error}") from None
    if event in _WITHIN_BATCH and (at_end or (time and time.unit not in _KNOWN_WITHIN_BATCH)):
        raise ConfigurationError(
            f"{interval!r}, which does not divide a batch, at {event.value}: use batches, epochs or a share of "
            "the training, such as '10ba', '1ep' or '0.25dur'"
        )
    return "+".join([*([str(time)] if time else []), *([AT_END] if at_end else [])])


_KNOWN_WITHIN_BATCH = {TimeUnit.BATCH, TimeUnit.EPOCH, TimeUnit.DURATION}


@lru_cache(1024)
def _read(interval: str) -> tuple[Time | None, bool]:
    if len(interval) > _LONGEST_TEXT:
        raise InvalidTimeError(
            f"it has {len(interval)} characters, at most {_LONGEST_TEXT} are allowed", value=interval
        )
    text, plus, end = interval.partition("+")
    if text.strip() == AT_END and not plus:
        return None, True
    if plus and end.strip() != AT_END:
        raise InvalidTimeError(f"after + comes {AT_END}, as in '1ep+{AT_END}'", value=interval)
    time = Time.from_timestring(text)
    limit = 1 if time.unit is TimeUnit.DURATION else MAX_INTERVAL
    if not 0 < time.value <= limit:
        raise InvalidTimeError(f"{str(time)!r} is not above 0 and at most {limit}", value=interval)
    return time, bool(plus)
