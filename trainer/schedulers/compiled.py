"""Schedules at work on an optimizer."""

import inspect
import math
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.intervals import counter_of
from offloop.trainer.arguments.checks import NUMBERS, check_number
from offloop.trainer.schedulers.schedules import SchedulerFunction

if TYPE_CHECKING:
    from offloop.trainer.engine.state import State


class TimeAwareScheduler:
    """Sets the rate of each parameter group of an optimizer to its base rate times a schedule's multiplier.

    Made by :func:`compile_scheduler`, and used like a scheduler of :mod:`torch.optim.lr_scheduler`, except that it may
    be stepped whether or not the optimizer was: under gradient scaling an optimizer skips steps. A group's base rate is
    its ``initial_lr``, as in torch; for a group that joins later the rate that it comes with."""

    def __init__(
        self, scheduler: SchedulerFunction, optimizer: torch.optim.Optimizer, state: "State", ssr: float
    ) -> None:
        self.optimizer = optimizer
        self.schedule = scheduler
        """Returns the multiplier."""
        # The state holds its schedulers: a trainer that is dropped is to be gone at once.
        self._state = weakref.ref(state)
        self.scale_schedule_ratio = ssr
        """By how much the schedule is stretched."""
        self._set_rates(state)

    def step(self) -> None:
        """Sets the rates for ``state.timestamp``; the training loop calls it at the end of each batch, or of each
        epoch, just before that advances. The rates stay where a stop has set ``max_duration`` within the batch."""
        state = self._state()
        assert state is not None  # it outlives what steps its schedulers
        if state.max_duration is not None:
            index, limit = counter_of(state.max_duration)
            if state.timestamp.values[index] >= limit:
                return
        self._set_rates(state)

    def get_last_lr(self) -> list[float]:
        """The rates in use, one for each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, list[float]]:
        """Base rates and rates in use as plain numbers, under torch's names; the schedule itself keeps nothing."""
        base_rates = [float(group["initial_lr"]) for group in self.optimizer.param_groups]
        return {"base_lrs": base_rates, "_last_lr": self.get_last_lr()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`, and sets the optimizer's rates to it.

        Raises :class:`offloop.bus.errors.ConfigurationError` when it is of an optimizer with other parameter groups."""
        groups = self.optimizer.param_groups
        base_rates, rates = state_dict.get("base_lrs", ()), state_dict.get("_last_lr", ())
        if not len(base_rates) == len(rates) == len(groups):
            raise ConfigurationError(
                f"the scheduler's state has {len(base_rates)} base_lrs and {len(rates)} _last_lr for {len(groups)} "
                "parameter groups: load it with the optimizer and the scheduler that it was saved with"
            )
        for group, base_rate, rate in zip(groups, base_rates, rates, strict=True):
            group["initial_lr"] = float(base_rate)
            _set_rate(group, float(rate))

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
            _set_rate(group, group["initial_lr"] * multiplier)


def compile_scheduler(
    scheduler: SchedulerFunction, optimizer: torch.optim.Optimizer, state: "State", ssr: float = 1.0
) -> TimeAwareScheduler:
    """Puts a schedule to work on an optimizer, and sets the rates for ``state.timestamp`` at once.

    ``state`` has to know ``max_duration`` and, for rates that move within an epoch, ``dataloader_len``. Rates are
    multiples of the optimizer's original ones, whatever schedule worked on it before. ``ssr`` is the scale schedule
    ratio, by which ``state.max_duration`` is scaled already.

    Raises :class:`offloop.bus.errors.ConfigurationError` for what is not a schedule, and times that do not fit the
    training."""
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


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        # Captured and compiled optimizer steps read the rate from this very tensor.
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
