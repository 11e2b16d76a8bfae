"""Intervals in batches or training time. Trainer and consumers both decide with :func:`is_due`."""

import math
from functools import lru_cache
from typing import NamedTuple

from offloop.bus.errors import ConfigurationError, InvalidTimeError, TimeUnitError
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time, TimeUnit
from offloop.bus.types.timestamp import COUNTED_AT, TrainingTime

MAX_INTERVAL = 2**31
AT_END = "end"  # the interval for the end of the training alone; 1ep+end combines both

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
)  # events that occur once for each microbatch

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

# Event of a batch to the index of the timestamp that counts its batch (training, evaluation, prediction), and 1 where
# that timestamp does not count the batch yet.
_COUNTED_BY: dict[Event, tuple[int, int]] = {
    **dict.fromkeys(_IN_STEP, (0, 1)),
    **dict.fromkeys(_AFTER_BATCH, (0, 0)),
    **dict.fromkeys(_BEFORE_EVAL_BATCH_END, (1, 1)),
    Event.EVAL_BATCH_END: (1, 0),
    **dict.fromkeys(_BEFORE_PREDICT_BATCH_END, (2, 1)),
    Event.PREDICT_BATCH_END: (2, 0),
}
BATCH_EVENTS = frozenset(_COUNTED_BY)  # events that belong to a batch, of the training, an evaluation or a prediction

_WITHIN_BATCH = BATCH_EVENTS - _AFTER

_EVENTS_OF = {TimeUnit.EPOCH: _AFTER_EPOCH, TimeUnit.ITERATION: _AFTER_ITERATION}


class EventPosition(NamedTuple):
    """An event, and the timestamps of training, evaluation and prediction at it; ``None`` means all zero."""

    event: Event
    timestamp: TrainingTime
    previous: TrainingTime | None = None  # training time before the last batch, epoch or iteration ended
    eval_timestamp: TrainingTime | None = None
    predict_timestamp: TrainingTime | None = None
    max_duration: Time | None = None
    dataloader_len: int | None = None  # batches in an epoch
    microbatch: int = 0  # index of the microbatch, at events that occur once for each


def batch_number(
    event: Event,
    timestamp: TrainingTime,
    eval_timestamp: TrainingTime | None = None,
    predict_timestamp: TrainingTime | None = None,
) -> int:
    """Return the number of an event's batch, from 1; 0 for an event of no batch, such as EPOCH_END.

    Evaluations and predictions count their own batches. ``None`` is a training time of zeros."""
    counted_by = _COUNTED_BY.get(event)
    if counted_by is None:
        return 0
    which, ahead = counted_by
    values = (timestamp, eval_timestamp, predict_timestamp)[which]
    return (values.batch if values is not None else 0) + ahead


def is_due(interval: int | str, position: EventPosition) -> bool:
    """Return whether an interval is due at a position.

    A number is in batches, counted from 1: 10 means the 10th, 20th, .... Evaluations and predictions count their own.
    Events that belong to no batch are due every time.

    A text is a time such as ``2ep``, ``10ba``, ``30sp``, ``1000tok``, ``90sec``, ``1iter`` or ``0.25dur``, a share of
    the whole training. It is due

    - after a batch, an epoch or an iteration (at its END and CHECKPOINT events), where the count passes the next
      multiple: epochs at the end of an epoch, iterations at the end of an iteration, all else after a batch;
    - within a batch of the training, at the first batch of the interval, in its first microbatch: ``10ba`` at the
      batches that begin when 0, 10, 20, ... are done, ``2ep`` at the first batch of every second epoch;
    - within a batch of an evaluation or a prediction: a time in batches counts its own batches, from the first one on;
      any other time is due at the first batch alone;
    - at other events, every time.

    With ``+end`` it is also due when ``max_duration`` is reached, after that batch, epoch or iteration. A stopped
    training has reached it. ``end`` is due only then, also at all other events. Reference: ``composer/utils/misc.py``,
    ``create_interval_scheduler``, with ``include_end_of_training``."""
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
    # Samples and tokens of the batches to come are not known.
    return timestamp.batch == 0


def passes(step: Time, timestamp: TrainingTime, previous: TrainingTime | None) -> bool:
    """Return whether the count of a time's unit has passed a multiple of it since ``previous`` or the start."""
    index, size = counter_of(step)
    before = 0 if previous is None else previous[index]
    return timestamp[index] // size > before // size


def counter_of(time: Time) -> tuple[int, int]:
    """Return the index of a time's unit in a :class:`TrainingTime`, and the time in the unit of that counter."""
    index, scale = COUNTED_AT[time.unit]
    return index, int(time.value) * scale


@lru_cache(256)
def _in_units(time: Time, max_duration: Time | None, dataloader_len: int | None) -> Time:
    if time.unit is not TimeUnit.DURATION or max_duration is None or not max_duration.value:
        return time
    return part_of(max_duration, time.value, dataloader_len)


def part_of(whole: Time, share: float, batches_per_epoch: int | None) -> Time:
    """Return a share of a training in whole units of its length, for epochs in batches if their number is known."""
    value, unit = whole.value, whole.unit
    if unit is TimeUnit.EPOCH and batches_per_epoch:
        value, unit = value * batches_per_epoch, TimeUnit.BATCH
    # 0.1 * 30 is a little more than 3, and would round up to 4.
    return Time(max(1, math.ceil(round(value * share, 6))), unit)


def check_interval(interval: object, event: Event | None = None) -> int | str:
    """Return an interval in its one spelling. Raises ConfigurationError if invalid, or never due at ``event``."""
    if type(interval) is int and 1 <= interval <= MAX_INTERVAL:
        return interval
    if not isinstance(interval, str):
        raise ConfigurationError(
            f"invalid interval {interval!r}: use a whole number of batches from 1 to {MAX_INTERVAL}, or a time such as "
            "'1ep', '10ba', '0.25dur' or '1ep+end'"
        )
    try:
        time, at_end = _read(interval)
    except (InvalidTimeError, TimeUnitError) as error:
        raise ConfigurationError(f"invalid interval {interval[:_LONGEST_TEXT]!r}: {error}") from None
    if event in _WITHIN_BATCH and (at_end or (time and time.unit not in _KNOWN_WITHIN_BATCH)):
        raise ConfigurationError(
            f"interval {interval!r} is not allowed at {event.value}: use batches, epochs or a share of the training, "
            "such as '10ba', '1ep' or '0.25dur'"
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
