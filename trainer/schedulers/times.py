"""Times and numbers of schedules: checked when these are made, and counted when they are called."""

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.intervals import counter_of
from offloop.bus.types.time import Time, TimeInput, TimeUnit

if TYPE_CHECKING:
    from offloop.trainer.engine.state import State


def whole(value: float) -> int:
    """Cuts a count off to whole units."""
    # 0.29 * 100 is a little less than 29, and would be cut off to 28.
    return int(round(value, 6))


def resolve(name: str, time: Time, state: "State", ssr: float) -> tuple[int, int]:
    """The index of a time's counter in ``Timestamp.values``, and the scaled count. Refuses a share of an unknown
    ``max_duration``, and a part of an epoch of unknown length; ``name`` is the argument's."""
    value, unit = time.value, time.unit
    if unit is TimeUnit.DURATION:
        max_duration = state.max_duration
        if max_duration is None:
            raise ConfigurationError(
                f"{name} {str(time)!r} is a share of max_duration, which is not set: pass max_duration='5ep' or the "
                "like to the trainer, or write the time in ep, ba, sp, tok or sec"
            )
        value, unit, ssr = value * max_duration.value, max_duration.unit, 1.0
    if unit is TimeUnit.EPOCH and state.dataloader_len:
        value, unit = value * state.dataloader_len, TimeUnit.BATCH
    count = whole(value * ssr)
    if unit is TimeUnit.EPOCH and value and not count:
        raise ConfigurationError(
            f"{name} {str(time)!r} comes to less than an epoch, and the dataloader has no length to count its batches "
            "by: write the time in batches, such as '100ba'"
        )
    return counter_of(Time(count, unit))


def resolve_period(name: str, time: Time, state: "State", ssr: float) -> tuple[int, int]:
    """:func:`resolve` for a time that is not zero."""
    index, period = resolve(name, time, state, ssr)
    if not period:
        raise ConfigurationError(
            f"{name} {str(time)!r} (with max_duration {str(state.max_duration)!r} and a schedule ratio of {ssr:g}) "
            "comes to less than one whole unit: use a longer one"
        )
    return index, period


def check_time(name: str, value: TimeInput, zero_allowed: bool = False) -> Time:
    """A time of more than zero, or of zero where that is allowed."""
    time = Time.from_input(value)
    if 0 < time.value < math.inf or (zero_allowed and time.value == 0):
        return time
    allowed = "zero or more" if zero_allowed else "more than zero"
    raise ConfigurationError(f"{name} {str(time)!r} is not allowed: use {allowed}, such as '100ba', '2ep' or '0.1dur'")


def check_milestones(milestones: Iterable[TimeInput]) -> list[Time]:
    """One or more times, the earliest first."""
    if isinstance(milestones, str | Time) or not isinstance(milestones, Iterable):
        raise ConfigurationError(
            f"milestones {milestones!r} is not allowed: use a list of times, such as ['1ep', '2ep']"
        )
    times = [check_time("milestone", milestone) for milestone in milestones]
    # Which of two times in different units comes first is known only while training.
    in_order = all(one.unit is not other.unit or one < other for one, other in pairwise(times))
    if not times or not in_order:
        raise ConfigurationError(
            f"milestones {[str(time) for time in times]} is not allowed: use one or more times, the earliest first"
        )
    return times
