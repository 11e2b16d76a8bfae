"""Learning-rate schedules in training time: a multiplier of the base learning rate at ``state.timestamp``.

Begin with ``schedules``; ``compiled`` attaches one to an optimizer.

Every time in a schedule is a :class:`offloop.bus.types.timestamp.Time`, a time string or a timedelta, in any unit, and
is counted by that unit's own counter. Two units depend on the training:

- ``dur`` is a share of ``state.max_duration``;
- ``ep`` is counted in batches when ``state.dataloader_len`` is known, so that rates move within an epoch; otherwise
  times are cut off to whole epochs, and rates move between epochs only.

A scale schedule ratio (``ssr``) stretches a schedule: all of its times but the warm-up, which it stretches only with
``scale_warmup``, and shares of ``max_duration``, which the caller has scaled already. Times that do not
come to whole units are cut off. Reference: ``composer/optim/scheduler.py``.

Schedules raise :class:`offloop.bus.errors.ConfigurationError` or :class:`offloop.bus.errors.InvalidTimeError` when they
are made with a value that is not allowed. Where it takes the training's length to see that a time cannot be used, they
raise
:class:`offloop.bus.errors.ConfigurationError` when they are called, first of all by :func:`compile_scheduler`.
"""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports

if TYPE_CHECKING:
    from offloop.trainer.schedulers.compiled import TimeAwareScheduler as TimeAwareScheduler
    from offloop.trainer.schedulers.compiled import compile_scheduler as compile_scheduler
    from offloop.trainer.schedulers.schedules import ConstantScheduler as ConstantScheduler
    from offloop.trainer.schedulers.schedules import ConstantWithWarmupScheduler as ConstantWithWarmupScheduler
    from offloop.trainer.schedulers.schedules import CosineAnnealingScheduler as CosineAnnealingScheduler
    from offloop.trainer.schedulers.schedules import (
        CosineAnnealingWarmRestartsScheduler as CosineAnnealingWarmRestartsScheduler,
    )
    from offloop.trainer.schedulers.schedules import (
        CosineAnnealingWithWarmupScheduler as CosineAnnealingWithWarmupScheduler,
    )
    from offloop.trainer.schedulers.schedules import ExponentialScheduler as ExponentialScheduler
    from offloop.trainer.schedulers.schedules import LinearScheduler as LinearScheduler
    from offloop.trainer.schedulers.schedules import LinearWithWarmupScheduler as LinearWithWarmupScheduler
    from offloop.trainer.schedulers.schedules import MultiStepScheduler as MultiStepScheduler
    from offloop.trainer.schedulers.schedules import MultiStepWithWarmupScheduler as MultiStepWithWarmupScheduler
    from offloop.trainer.schedulers.schedules import PolynomialScheduler as PolynomialScheduler
    from offloop.trainer.schedulers.schedules import PolynomialWithWarmupScheduler as PolynomialWithWarmupScheduler
    from offloop.trainer.schedulers.schedules import Scheduler as Scheduler
    from offloop.trainer.schedulers.schedules import SchedulerFunction as SchedulerFunction
    from offloop.trainer.schedulers.schedules import StepScheduler as StepScheduler

__getattr__, __dir__, __all__ = lazy_exports(__name__)
