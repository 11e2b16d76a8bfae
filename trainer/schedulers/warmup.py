"""Schedules with a linear warm-up."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.time import TimeInput
from offloop.trainer.arguments.checks import check_number
from offloop.trainer.schedulers.schedules import (
    CosineAnnealingScheduler,
    Curve,
    LinearScheduler,
    MultiStepScheduler,
    PolynomialScheduler,
    Scheduler,
)
from offloop.trainer.schedulers.times import check_time, resolve, resolve_period

if TYPE_CHECKING:
    from offloop.trainer.engine.state import State


class _Warmup(Scheduler):
    """Base of the schedules with a warm-up; zero is none."""

    def __init__(self, t_warmup: TimeInput, scale_warmup: bool) -> None:
        self.t_warmup = check_time("t_warmup", t_warmup, zero_allowed=True)
        self.scale_warmup = scale_warmup

    def _resolve_warmup(self, state: "State", ssr: float) -> tuple[int, int]:
        return resolve("t_warmup", self.t_warmup, state, ssr if self.scale_warmup else 1.0)


class MultiStepWithWarmupScheduler(_Warmup):
    """From 0 to 1 in a straight line over ``t_warmup``, then as :class:`MultiStepScheduler`. Milestones count from the
    start of the training; one within the warm-up shows at its end."""

    def __init__(
        self, t_warmup: TimeInput, milestones: Iterable[TimeInput], gamma: float = 0.1, scale_warmup: bool = False
    ) -> None:
        super().__init__(t_warmup, scale_warmup)
        self._steps = MultiStepScheduler(milestones, gamma)

    def __call__(self, state: "State", ssr: float = 1.0) -> float:
        # Asked for during the warm-up too, so that milestones that cannot be used are found before it ends.
        multiplier = self._steps(state, ssr)
        index, warmup = self._resolve_warmup(state, ssr)
        now = state.timestamp.values[index]
        return now / warmup if now < warmup else multiplier


class _CurveWithWarmup(_Warmup):
    """From 0 to the start of a curve in a straight line over ``t_warmup``, then the curve over the rest of ``t_max``.

    ``t_warmup`` and ``t_max`` have to be counted in the same unit. A warm-up as long as ``t_max`` leaves no time for
    the curve, which stays at its start. Source of the warm-up: Goyal et al., "Accurate, Large Minibatch SGD: Training
    ImageNet in 1 Hour", 2017, section 2.2.
    """

    def __init__(self, t_warmup: TimeInput, curve: Curve, scale_warmup: bool) -> None:
        super().__init__(t_warmup, scale_warmup)
        self._curve = curve
        if self.t_warmup.unit is curve.t_max.unit and self.t_warmup > curve.t_max:
            raise self._too_long()

    def __call__(self, state: "State", ssr: float = 1.0) -> float:
        index, warmup = self._resolve_warmup(state, ssr)
        unit_of_max, t_max = resolve_period("t_max", self._curve.t_max, state, ssr)
        if index != unit_of_max:
            raise ConfigurationError(
                f"t_warmup {str(self.t_warmup)!r} and t_max {str(self._curve.t_max)!r} (with max_duration "
                f"{str(state.max_duration)!r}) are counted in different units: write both in the same one"
            )
        if warmup > t_max:
            raise self._too_long(f" (with max_duration {str(state.max_duration)!r} and a schedule ratio of {ssr:g})")
        now = state.timestamp.values[index]
        if now < warmup:
            return now / warmup * self._curve.at(0.0)
        rest = t_max - warmup
        return self._curve.at(min(1.0, (now - warmup) / rest) if rest else 0.0)

    def _too_long(self, circumstances: str = "") -> ConfigurationError:
        return ConfigurationError(
            f"t_warmup {str(self.t_warmup)!r} is longer than t_max {str(self._curve.t_max)!r}{circumstances}: "
            "shorten the warm-up or train for longer"
        )


class ConstantWithWarmupScheduler(_CurveWithWarmup):
    """From 0 to ``alpha`` in a straight line over ``t_warmup``, then ``alpha``, after ``t_max`` as well."""

    def __init__(
        self, t_warmup: TimeInput, alpha: float = 1.0, t_max: TimeInput = "1dur", scale_warmup: bool = False
    ) -> None:
        alpha = check_number(alpha, "alpha")
        super().__init__(t_warmup, LinearScheduler(alpha, alpha, t_max), scale_warmup)


class LinearWithWarmupScheduler(_CurveWithWarmup):
    """From 0 to ``alpha_i`` in a straight line over ``t_warmup``, then to ``alpha_f`` at ``t_max``."""

    def __init__(
        self,
        t_warmup: TimeInput,
        alpha_i: float = 1.0,
        alpha_f: float = 0.0,
        t_max: TimeInput = "1dur",
        scale_warmup: bool = False,
    ) -> None:
        super().__init__(t_warmup, LinearScheduler(alpha_i, alpha_f, t_max), scale_warmup)


class CosineAnnealingWithWarmupScheduler(_CurveWithWarmup):
    """From 0 to 1 in a straight line over ``t_warmup``, then along half a cosine to ``alpha_f`` at ``t_max``."""

    def __init__(
        self, t_warmup: TimeInput, t_max: TimeInput = "1dur", alpha_f: float = 0.0, scale_warmup: bool = False
    ) -> None:
        super().__init__(t_warmup, CosineAnnealingScheduler(t_max, alpha_f), scale_warmup)


class PolynomialWithWarmupScheduler(_CurveWithWarmup):
    """From 0 to 1 in a straight line over ``t_warmup``, then as :class:`PolynomialScheduler` to ``alpha_f`` at
    ``t_max``."""

    def __init__(
        self,
        t_warmup: TimeInput,
        power: float = 2.0,
        t_max: TimeInput = "1dur",
        alpha_f: float = 0.0,
        scale_warmup: bool = False,
    ) -> None:
        super().__init__(t_warmup, PolynomialScheduler(power, t_max, alpha_f), scale_warmup)
