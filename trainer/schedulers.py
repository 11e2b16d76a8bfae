"""Learning-rate schedules in training time: a multiplier of the base learning rate at ``state.timestamp``.

Every time in a schedule is a :class:`offloop.bus.types.timestamp.Time`, a time string or a timedelta, in any unit, and
is counted by that unit's own counter. Two units depend on the training:

- ``dur`` is a share of ``state.max_duration``;
- ``ep`` is counted in batches when ``state.dataloader_len`` is known, so that rates change within an epoch. Otherwise
  times are cut off to whole epochs, and rates change only between epochs.

A scale schedule ratio (``ssr``) stretches the times of a schedule, except shares of ``max_duration``, which the caller
has scaled already, and the warm-up, which it stretches only with ``scale_warmup``. Times are cut off to whole units.
Reference: ``composer/optim/scheduler.py``.

Schedules raise :class:`offloop.bus.errors.ConfigurationError` or :class:`offloop.bus.errors.InvalidTimeError` when they
are made with an invalid value. If only the training's length shows that a time is invalid, they raise
:class:`offloop.bus.errors.ConfigurationError` when they are called, for the first time by :func:`compile_scheduler`."""

import inspect
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.intervals import counter_of
from offloop.bus.types.time import Time, TimeInput, TimeUnit
from offloop.trainer.arguments.checks import NUMBERS, check_number
from offloop.trainer.arguments.values import set_rate

if TYPE_CHECKING:
    from offloop.trainer.engine.state import State

__all__ = [
    "ConstantScheduler",
    "ConstantWithWarmupScheduler",
    "CosineAnnealingScheduler",
    "CosineAnnealingWarmRestartsScheduler",
    "CosineAnnealingWithWarmupScheduler",
    "ExponentialScheduler",
    "LinearScheduler",
    "LinearWithWarmupScheduler",
    "MultiStepScheduler",
    "MultiStepWithWarmupScheduler",
    "PolynomialScheduler",
    "PolynomialWithWarmupScheduler",
    "Scheduler",
    "SchedulerFunction",
    "StepScheduler",
    "TimeAwareScheduler",
    "compile_scheduler",
]


class Scheduler(ABC):
    """A schedule. It keeps no state between calls, so a run can be resumed, or its length changed, at any time."""

    @abstractmethod
    def __call__(self, state: "State", ssr: float = 1.0) -> float:
        """Return the multiplier of the base learning rate at ``state.timestamp``.

        A schedule reads only ``timestamp``, ``max_duration`` and ``dataloader_len`` of the state."""


SchedulerFunction: TypeAlias = Callable[["State", float], float]
"""A schedule: a :class:`Scheduler` or a function ``(state, ssr) -> multiplier``."""


class StepScheduler(Scheduler):
    """Multiplies by ``gamma`` once every ``step_size``, as :class:`torch.optim.lr_scheduler.StepLR` does."""

    def __init__(self, step_size: TimeInput, gamma: float = 0.1) -> None:
        self.step_size: Time = check_time("step_size", step_size)
        self.gamma: float = check_number(gamma, "gamma")

    def __call__(self, state: "State", ssr: float = 1.0) -> float:
        index, step_size = resolve_period("step_size", self.step_size, state, ssr)
        return self.gamma ** (state.timestamp.values[index] // step_size)


class MultiStepScheduler(Scheduler):
    """Multiplies by ``gamma`` at each of the ``milestones``, as :class:`torch.optim.lr_scheduler.MultiStepLR` does."""

    def __init__(self, milestones: Iterable[TimeInput], gamma: float = 0.1) -> None:
        self.milestones: list[Time] = check_milestones(milestones)
        self.gamma: float = check_number(gamma, "gamma")

    def __call__(self, state: "State", ssr: float = 1.0) -> float:
        values = state.timestamp.values
        resolved = [resolve("milestone", milestone, state, ssr) for milestone in self.milestones]
        return self.gamma ** sum(values[index] >= milestone for index, milestone in resolved)


class ConstantScheduler(Scheduler):
    """``alpha`` until ``t_max``, then 1, as :class:`torch.optim.lr_scheduler.ConstantLR` does."""

    def __init__(self, alpha: float = 1.0, t_max: TimeInput = "1dur") -> None:
        self.alpha: float = check_number(alpha, "alpha")
        self.t_max: Time = check_time("t_max", t_max)

    def __call__(self, state: "State", ssr: float = 1.0) -> float:
        index, t_max = resolve_period("t_max", self.t_max, state, ssr)
        return self.alpha if state.timestamp.values[index] < t_max else 1.0


class ExponentialScheduler(Scheduler):
    """``gamma ** (t / decay_period)``. With a period of one epoch and known batches it changes every batch."""

    def __init__(self, gamma: float, decay_period: TimeInput = "1ep") -> None:
        self.gamma: float = check_number(gamma, "gamma")
        self.decay_period: Time = check_time("decay_period", decay_period)

    def __call__(self, state: "State", ssr: float = 1.0) -> float:
        index, decay_period = resolve_period("decay_period", self.decay_period, state, ssr)
        multiplier: float = self.gamma ** (state.timestamp.values[index] / decay_period)
        return multiplier


class _Curve(Scheduler):
    """A curve over ``t_max`` that keeps its last value afterwards.

    With a warm-up, a straight line from 0 to the start of the curve comes first, and the curve takes the rest of
    ``t_max``. Both must be counted in the same unit. A warm-up as long as ``t_max`` leaves no time for the curve, which
    stays at its start. Source of the warm-up: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1
    Hour", 2017, section 2.2."""

    t_warmup: Time | None = None
    scale_warmup: bool = False

    def __init__(self, t_max: TimeInput) -> None:
        self.t_max: Time = check_time("t_max", t_max)

    def warm_up(self, t_warmup: TimeInput, scale_warmup: bool) -> None:
        self.t_warmup = time = check_time("t_warmup", t_warmup, zero_allowed=True)
        self.scale_warmup = scale_warmup
        if time.unit is self.t_max.unit and time > self.t_max:
            raise self._too_long()

    def __call__(self, state: "State", ssr: float = 1.0) -> float:
        index, t_max = resolve_period("t_max", self.t_max, state, ssr)
        now, warmup = state.timestamp.values[index], 0
        if self.t_warmup is not None:
            unit, warmup = resolve("t_warmup", self.t_warmup, state, ssr if self.scale_warmup else 1.0)
            if unit != index:
                raise ConfigurationError(
                    f"t_warmup {str(self.t_warmup)!r} and t_max {str(self.t_max)!r} (with max_duration "
                    f"{str(state.max_duration)!r}) are counted in different units: write both in the same one"
                )
            if warmup > t_max:
                raise self._too_long(
                    f" (with max_duration {str(state.max_duration)!r} and a schedule ratio of {ssr:g})"
                )
            if now < warmup:
                return now / warmup * self.at(0.0)
        rest = t_max - warmup
        return self.at(min(1.0, (now - warmup) / rest) if rest else 0.0)

    def _too_long(self, circumstances: str = "") -> ConfigurationError:
        return ConfigurationError(
            f"t_warmup {str(self.t_warmup)!r} is longer than t_max {str(self.t_max)!r}{circumstances}: "
            "shorten the warm-up or train for longer"
        )

    @abstractmethod
    def at(self, progress: float) -> float:
        """Return the multiplier after a share of the curve, from 0 to 1."""


class LinearScheduler(_Curve):
    """From ``alpha_i`` to ``alpha_f`` in a straight line over ``t_max``, then ``alpha_f``."""

    def __init__(self, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: TimeInput = "1dur") -> None:
        super().__init__(t_max)
        self.alpha_i: float = check_number(alpha_i, "alpha_i")
        self.alpha_f: float = check_number(alpha_f, "alpha_f")

    def at(self, progress: float) -> float:
        return self.alpha_i + progress * (self.alpha_f - self.alpha_i)


class CosineAnnealingScheduler(_Curve):
    """From 1 to ``alpha_f`` along half a cosine over ``t_max``, then ``alpha_f``.

    Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", ICLR 2017, equation 5."""

    def __init__(self, t_max: TimeInput = "1dur", alpha_f: float = 0.0) -> None:
        super().__init__(t_max)
        self.alpha_f: float = check_number(alpha_f, "alpha_f")

    def at(self, progress: float) -> float:
        return _cosine(progress, self.alpha_f)


class PolynomialScheduler(_Curve):
    """From 1 to ``alpha_f`` as ``(1 - t / t_max) ** power``, then ``alpha_f``."""

    def __init__(self, power: float, t_max: TimeInput = "1dur", alpha_f: float = 0.0) -> None:
        super().__init__(t_max)
        self.power: float = check_number(power, "power", above=0.0)
        self.alpha_f: float = check_number(alpha_f, "alpha_f")

    def at(self, progress: float) -> float:
        remaining: float = (1.0 - progress) ** self.power
        return self.alpha_f + remaining * (1.0 - self.alpha_f)


class CosineAnnealingWarmRestartsScheduler(Scheduler):
    """Half a cosine from 1 to ``alpha_f``, repeatedly.

    The first cycle takes ``t_0``, each later one ``t_mult`` times as long as the last, cut off to whole units. Source:
    see :class:`CosineAnnealingScheduler`."""

    def __init__(self, t_0: TimeInput, t_mult: float = 1.0, alpha_f: float = 0.0) -> None:
        self.t_0: Time = check_time("t_0", t_0)
        self.t_mult: float = check_number(t_mult, "t_mult", least=1.0)
        self.alpha_f: float = check_number(alpha_f, "alpha_f")

    def __call__(self, state: "State", ssr: float = 1.0) -> float:
        index, cycle = resolve_period("t_0", self.t_0, state, ssr)
        into = state.timestamp.values[index]
        while into >= cycle:
            longer = whole(cycle * self.t_mult)
            if longer == cycle:
                # Cycles no longer grow: the remainder saves a loop over very many of them.
                into %= cycle
                break
            into, cycle = into - cycle, longer
        return _cosine(into / cycle, self.alpha_f)


class MultiStepWithWarmupScheduler(MultiStepScheduler):
    """From 0 to 1 in a straight line over ``t_warmup``, then as :class:`MultiStepScheduler`.

    Milestones count from the start of the training. One within the warm-up takes effect at its end."""

    def __init__(
        self, t_warmup: TimeInput, milestones: Iterable[TimeInput], gamma: float = 0.1, scale_warmup: bool = False
    ) -> None:
        super().__init__(milestones, gamma)
        self.t_warmup: Time = check_time("t_warmup", t_warmup, zero_allowed=True)
        self.scale_warmup = scale_warmup

    def __call__(self, state: "State", ssr: float = 1.0) -> float:
        # Computed during the warm-up too, so that invalid milestones are found before it ends.
        multiplier = super().__call__(state, ssr)
        index, warmup = resolve("t_warmup", self.t_warmup, state, ssr if self.scale_warmup else 1.0)
        now = state.timestamp.values[index]
        return now / warmup if now < warmup else multiplier


class ConstantWithWarmupScheduler(LinearScheduler):
    """From 0 to ``alpha`` in a straight line over ``t_warmup``, then ``alpha``, after ``t_max`` as well."""

    def __init__(
        self, t_warmup: TimeInput, alpha: float = 1.0, t_max: TimeInput = "1dur", scale_warmup: bool = False
    ) -> None:
        alpha = check_number(alpha, "alpha")
        super().__init__(alpha, alpha, t_max)
        self.warm_up(t_warmup, scale_warmup)


class LinearWithWarmupScheduler(LinearScheduler):
    """From 0 to ``alpha_i`` in a straight line over ``t_warmup``, then to ``alpha_f`` at ``t_max``."""

    def __init__(
        self,
        t_warmup: TimeInput,
        alpha_i: float = 1.0,
        alpha_f: float = 0.0,
        t_max: TimeInput = "1dur",
        scale_warmup: bool = False,
    ) -> None:
        super().__init__(alpha_i, alpha_f, t_max)
        self.warm_up(t_warmup, scale_warmup)


class CosineAnnealingWithWarmupScheduler(CosineAnnealingScheduler):
    """From 0 to 1 in a straight line over ``t_warmup``, then along half a cosine to ``alpha_f`` at ``t_max``."""

    def __init__(
        self, t_warmup: TimeInput, t_max: TimeInput = "1dur", alpha_f: float = 0.0, scale_warmup: bool = False
    ) -> None:
        super().__init__(t_max, alpha_f)
        self.warm_up(t_warmup, scale_warmup)


class PolynomialWithWarmupScheduler(PolynomialScheduler):
    """From 0 to 1 in a straight line over ``t_warmup``, then as :class:`PolynomialScheduler` to ``alpha_f``."""

    def __init__(
        self,
        t_warmup: TimeInput,
        power: float = 2.0,
        t_max: TimeInput = "1dur",
        alpha_f: float = 0.0,
        scale_warmup: bool = False,
    ) -> None:
        super().__init__(power, t_max, alpha_f)
        self.warm_up(t_warmup, scale_warmup)


def _cosine(progress: float, alpha_f: float) -> float:
    return alpha_f + (1.0 - alpha_f) * (1.0 + math.cos(math.pi * progress)) / 2.0


def whole(value: float) -> int:
    """Cut a count off to whole units."""
    # 0.29 * 100 is a little less than 29, and would be cut off to 28.
    return int(round(value, 6))


def resolve(name: str, time: Time, state: "State", ssr: float) -> tuple[int, int]:
    """Return the index of a time's counter in ``Timestamp.values``, and the scaled count.

    Refuses a share of an unknown ``max_duration``, and a part of an epoch of unknown length. ``name`` is the
    argument's."""
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
    index, period = resolve(name, time, state, ssr)
    if not period:
        raise ConfigurationError(
            f"{name} {str(time)!r} (with max_duration {str(state.max_duration)!r} and a schedule ratio of {ssr:g}) "
            "comes to less than one whole unit: use a longer one"
        )
    return index, period


def check_time(name: str, value: TimeInput, zero_allowed: bool = False) -> Time:
    time = Time.from_input(value)
    if 0 < time.value < math.inf or (zero_allowed and time.value == 0):
        return time
    allowed = "zero or more" if zero_allowed else "more than zero"
    raise ConfigurationError(f"{name} {str(time)!r} is not allowed: use {allowed}, such as '100ba', '2ep' or '0.1dur'")


def check_milestones(milestones: Iterable[TimeInput]) -> list[Time]:
    if isinstance(milestones, str | Time) or not isinstance(milestones, Iterable):
        raise ConfigurationError(
            f"milestones {milestones!r} is not allowed: use a list of times, such as ['1ep', '2ep']"
        )
    times = [check_time("milestone", milestone) for milestone in milestones]
    # The order of times in different units is known only while training.
    in_order = all(one.unit is not other.unit or one < other for one, other in pairwise(times))
    if not times or not in_order:
        raise ConfigurationError(
            f"milestones {[str(time) for time in times]} is not allowed: use one or more times, the earliest first"
        )
    return times


class TimeAwareScheduler:
    """Sets the rate of each parameter group of an optimizer to its base rate times a schedule's multiplier.

    Made by :func:`compile_scheduler`, and used like a scheduler of :mod:`torch.optim.lr_scheduler`. In contrast to
    these it may be stepped without a step of the optimizer: under gradient scaling an optimizer skips steps. A group's
    base rate is its ``initial_lr``, as in torch; for a group that is added later, its rate at that time."""

    def __init__(
        self, scheduler: SchedulerFunction, optimizer: torch.optim.Optimizer, state: "State", ssr: float
    ) -> None:
        self.optimizer = optimizer
        self.schedule = scheduler
        # Weak, because the state refers to its schedulers: a dropped trainer is freed at once.
        self._state = weakref.ref(state)
        self.scale_schedule_ratio = ssr
        self._set_rates(state)

    def step(self) -> None:
        """Set the rates for ``state.timestamp``.

        The training loop calls it at the end of each batch or epoch, just before the timestamp advances. The rates stay
        once a stop has set ``max_duration`` within the batch."""
        state = self._state()
        assert state is not None  # it outlives the training loop
        if state.max_duration is not None:
            index, limit = counter_of(state.max_duration)
            if state.timestamp.values[index] >= limit:
                return
        self._set_rates(state)

    def get_last_lr(self) -> list[float]:
        """Return the rates in use, one for each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, list[float]]:
        """Return base rates and rates in use as plain numbers, under torch's names; the schedule has no state."""
        base_rates = [float(group["initial_lr"]) for group in self.optimizer.param_groups]
        return {"base_lrs": base_rates, "_last_lr": self.get_last_lr()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, and set the optimizer's rates to it.

        Raises :class:`offloop.bus.errors.ConfigurationError` for an optimizer with other parameter groups."""
        groups = self.optimizer.param_groups
        base_rates, rates = state_dict.get("base_lrs", ()), state_dict.get("_last_lr", ())
        if not len(base_rates) == len(rates) == len(groups):
            raise ConfigurationError(
                f"the scheduler's state has {len(base_rates)} base_lrs and {len(rates)} _last_lr for {len(groups)} "
                "parameter groups: load it with the optimizer and the scheduler that it was saved with"
            )
        for group, base_rate, rate in zip(groups, base_rates, rates, strict=True):
            group["initial_lr"] = float(base_rate)
            set_rate(group, float(rate))

    def _set_rates(self, state: "State") -> None:
        multiplier = self.schedule(state, self.scale_schedule_ratio)
        if not isinstance(multiplier, NUMBERS) or not math.isfinite(multiplier):
            raise ConfigurationError(
                f"scheduler {_name(self.schedule)} returned {multiplier!r}: "
                "return a finite number, which the base learning rate is multiplied by"
            )
        multiplier = float(multiplier)
        for group in self.optimizer.param_groups:
            if "initial_lr" not in group:
                group["initial_lr"] = float(group["lr"])
            set_rate(group, group["initial_lr"] * multiplier)


def compile_scheduler(
    scheduler: SchedulerFunction, optimizer: torch.optim.Optimizer, state: "State", ssr: float = 1.0
) -> TimeAwareScheduler:
    """Apply a schedule to an optimizer, and set the rates for ``state.timestamp`` at once.

    Rates are multiples of the optimizer's original ones, whatever its earlier schedules.

    Args:
        scheduler: the schedule.
        optimizer: the optimizer.
        state: must know ``max_duration`` and, for rates that change within an epoch, ``dataloader_len``.
        ssr: the scale schedule ratio, by which ``state.max_duration`` is scaled already.

    Raises:
        ConfigurationError: the scheduler is not a schedule, or its times do not fit the training."""
    check_number(ssr, "ssr", above=0.0)
    try:
        if isinstance(scheduler, type):
            raise TypeError
        inspect.signature(scheduler).bind(state, ssr)
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"scheduler {_name(scheduler)} cannot be called with (state, ssr): "
            "use one of offloop.trainer.schedulers, such as LinearScheduler(), or a function of these two"
        ) from None
    return TimeAwareScheduler(scheduler, optimizer, state, ssr)


def _name(scheduler: Any) -> str:
    return getattr(scheduler, "__qualname__", None) or repr(scheduler)
