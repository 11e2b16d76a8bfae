"""Schedules without a warm-up."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

from offloop.bus.types.time import TimeInput
from offloop.trainer.arguments.checks import check_number
from offloop.trainer.schedulers.times import check_milestones, check_time, resolve, resolve_period, whole

if TYPE_CHECKING:
    from offloop.trainer.engine.state import State


class Scheduler(ABC):
    """A schedule. It keeps nothing between calls, so that a run can be resumed, or its length changed, at any time."""

    @abstractmethod
    def __call__(self, state: "State", ssr: float = 1.0) -> float:
        """The multiplier of the base learning rate at ``state.timestamp``. A schedule reads ``timestamp``,
        ``max_duration`` and ``dataloader_len`` of the state, and nothing else."""


SchedulerFunction: TypeAlias = Callable[["State", float], float]
"""A schedule: a :class:`Scheduler` or a function ``(state, ssr) -> multiplier``."""


class StepScheduler(Scheduler):
    """Multiplies by ``gamma`` once every ``step_size``, as :class:`torch.optim.lr_scheduler.StepLR` does."""

    def __init__(self, step_size: TimeInput, gamma: float = 0.1) -> None:
        self.step_size = check_time("step_size", step_size)
        self.gamma = check_number(gamma, "gamma")

    def __call__(self, state: "State", ssr: float = 1.0) -> float:
        index, step_size = resolve_period("step_size", self.step_size, state, ssr)
        return self.gamma ** (state.timestamp.values[index] // step_size)


class MultiStepScheduler(Scheduler):
    """Multiplies by ``gamma`` at each of the ``milestones``, as :class:`torch.optim.lr_scheduler.MultiStepLR` does."""

    def __init__(self, milestones: Iterable[TimeInput], gamma: float = 0.1) -> None:
        self.milestones = check_milestones(milestones)
        self.gamma = check_number(gamma, "gamma")

    def __call__(self, state: "State", ssr: float = 1.0) -> float:
        values = state.timestamp.values
        resolved = [resolve("milestone", milestone, state, ssr) for milestone in self.milestones]
        return self.gamma ** sum(values[index] >= milestone for index, milestone in resolved)


class ConstantScheduler(Scheduler):
    """``alpha`` until ``t_max``, then 1, as :class:`torch.optim.lr_scheduler.ConstantLR` does."""

    def __init__(self, alpha: float = 1.0, t_max: TimeInput = "1dur") -> None:
        self.alpha = check_number(alpha, "alpha")
        self.t_max = check_time("t_max", t_max)

    def __call__(self, state: "State", ssr: float = 1.0) -> float:
        index, t_max = resolve_period("t_max", self.t_max, state, ssr)
        return self.alpha if state.timestamp.values[index] < t_max else 1.0


class ExponentialScheduler(Scheduler):
    """``gamma ** (t / decay_period)``; with a period of one epoch and batches known, this moves every batch."""

    def __init__(self, gamma: float, decay_period: TimeInput = "1ep") -> None:
        self.gamma = check_number(gamma, "gamma")
        self.decay_period = check_time("decay_period", decay_period)

    def __call__(self, state: "State", ssr: float = 1.0) -> float:
        index, decay_period = resolve_period("decay_period", self.decay_period, state, ssr)
        multiplier: float = self.gamma ** (state.timestamp.values[index] / decay_period)
        return multiplier


class Curve(Scheduler):
    """A curve over ``t_max`` that keeps its last value afterwards."""

    def __init__(self, t_max: TimeInput) -> None:
        self.t_max = check_time("t_max", t_max)

    def __call__(self, state: "State", ssr: float = 1.0) -> float:
        index, t_max = resolve_period("t_max", self.t_max, state, ssr)
        return self.at(min(1.0, state.timestamp.values[index] / t_max))

    @abstractmethod
    def at(self, progress: float) -> float:
        """The multiplier after a share of ``t_max``, from 0 to 1."""


class LinearScheduler(Curve):
    """From ``alpha_i`` to ``alpha_f`` in a straight line over ``t_max``, then ``alpha_f``."""

    def __init__(self, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: TimeInput = "1dur") -> None:
        super().__init__(t_max)
        self.alpha_i = check_number(alpha_i, "alpha_i")
        self.alpha_f = check_number(alpha_f, "alpha_f")

    def at(self, progress: float) -> float:
        return self.alpha_i + progress * (self.alpha_f - self.alpha_i)


class CosineAnnealingScheduler(Curve):
    """From 1 to ``alpha_f`` along half a cosine over ``t_max``, then ``alpha_f``. Source: Loshchilov and Hutter, "SGDR:
    Stochastic Gradient Descent with Warm Restarts", ICLR 2017, equation 5."""

    def __init__(self, t_max: TimeInput = "1dur", alpha_f: float = 0.0) -> None:
        super().__init__(t_max)
        self.alpha_f = check_number(alpha_f, "alpha_f")

    def at(self, progress: float) -> float:
        return _cosine(progress, self.alpha_f)


class PolynomialScheduler(Curve):
    """From 1 to ``alpha_f`` as ``(1 - t / t_max) ** power``, then ``alpha_f``."""

    def __init__(self, power: float, t_max: TimeInput = "1dur", alpha_f: float = 0.0) -> None:
        super().__init__(t_max)
        self.power = check_number(power, "power", above=0.0)
        self.alpha_f = check_number(alpha_f, "alpha_f")

    def at(self, progress: float) -> float:
        remaining: float = (1.0 - progress) ** self.power
        return self.alpha_f + remaining * (1.0 - self.alpha_f)


class CosineAnnealingWarmRestartsScheduler(Scheduler):
    """Half a cosine from 1 to ``alpha_f``, again and again: the first cycle takes ``t_0``, each later one ``t_mult``
    times as long as the one before it, cut off to whole units. Source: see :class:`CosineAnnealingScheduler`."""

    def __init__(self, t_0: TimeInput, t_mult: float = 1.0, alpha_f: float = 0.0) -> None:
        self.t_0 = check_time("t_0", t_0)
        self.t_mult = check_number(t_mult, "t_mult", least=1.0)
        self.alpha_f = check_number(alpha_f, "alpha_f")

    def __call__(self, state: "State", ssr: float = 1.0) -> float:
        index, cycle = resolve_period("t_0", self.t_0, state, ssr)
        into = state.timestamp.values[index]
        while into >= cycle:
            longer = whole(cycle * self.t_mult)
            if longer == cycle:
                # No cycle grows any more: a long run would have very many of them to go through.
                into %= cycle
                break
            into, cycle = into - cycle, longer
        return _cosine(into / cycle, self.alpha_f)


def _cosine(progress: float, alpha_f: float) -> float:
    return alpha_f + (1.0 - alpha_f) * (1.0 + math.cos(math.pi * progress)) / 2.0
