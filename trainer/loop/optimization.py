"""Optimizers and schedulers of a training, made as soon as their dependencies are known."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from offloop.bus.errors import ConfigurationError
from offloop.trainer.arguments.checks import as_list, kind_of
from offloop.trainer.engine.state import State
from offloop.trainer.schedulers import compile_scheduler

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
OptimizerFactory = Callable[[Any], Optimizers]


class Optimization:
    def __init__(self, optimizers: Any, schedulers: Any, scale_schedule_ratio: float) -> None:
        self._factory = optimizers if callable(optimizers) and not isinstance(optimizers, type) else None
        self.optimizers: list[torch.optim.Optimizer] = [] if self._factory is not None else check_optimizers(optimizers)
        """The given ones; empty while they have yet to be made."""
        self._waiting = check_schedulers(schedulers, self.optimizers if self._factory is None else None)
        self._scale_schedule_ratio = scale_schedule_ratio

    def make_optimizers(self, state: State) -> None:
        if self._factory is not None:
            state.optimizers[:] = check_optimizers(self._factory(state.model))
        check_optimized(state.optimizers, state.model)
        check_schedulers(self._waiting, state.optimizers)

    def compile_schedulers(self, state: State) -> bool:
        """Put the schedulers into the state, if the length of the training is known or not needed; returns whether."""
        if state.max_duration is None and any(not isinstance(one, LRScheduler) for one in self._waiting):
            return False
        for given in self._waiting:
            if isinstance(given, LRScheduler):
                state.schedulers.append(given)
            else:
                state.schedulers += [
                    compile_scheduler(given, optimizer, state, self._scale_schedule_ratio)
                    for optimizer in state.optimizers
                ]
        self._waiting = []
        return True


def check_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    items = as_list(optimizers, torch.optim.Optimizer, "optimizers")
    for item in items:
        name = type(item).__name__
        closure = inspect.signature(type(item).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigurationError(
                f"optimizers has a {name}, whose step needs a closure that computes the loss: the trainer computes it "
                "once for each batch; use one whose step needs none, such as SGD or AdamW"
            )
        if sum(item is other for other in items) > 1:
            raise ConfigurationError(f"optimizers has the same {name} twice, which would step twice: give it once")
    return items


def check_optimized(optimizers: Iterable[torch.optim.Optimizer], model: torch.nn.Module) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        foreign = sum(id(parameter) not in own for parameter in parameters)
        if foreign:
            raise ConfigurationError(
                f"optimizers has a {type(optimizer).__name__} of {len(parameters)} parameters, of which {foreign} are "
                f"not those of model {type(model).__name__}: make it from model.parameters(), or pass a function that "
                "makes it from the model, which is called after algorithms have changed that"
            )


def check_schedulers(schedulers: Any, optimizers: Sequence[torch.optim.Optimizer] | None = None) -> list[Any]:
    items = as_list(schedulers, object, "schedulers")
    for scheduler in items:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigurationError(
                "schedulers has a ReduceLROnPlateau, which needs a metric: step it in an Algorithm at EVAL_END"
            )
        if isinstance(scheduler, type) or not (isinstance(scheduler, LRScheduler) or callable(scheduler)):
            raise ConfigurationError(
                f"schedulers has {kind_of(scheduler)}: give a torch LRScheduler, an object of "
                "offloop.trainer.schedulers, or a function (state, ssr)"
            )
        own = getattr(scheduler, "optimizer", None) if isinstance(scheduler, LRScheduler) else None
        if optimizers is not None and own is not None and all(own is not one for one in optimizers):
            raise ConfigurationError(
                f"schedulers has a {type(scheduler).__name__} of a {type(own).__name__} that is not in optimizers: "
                "make it with the optimizer that the trainer is given"
            )
    if len(items) > 1 and any(not isinstance(one, LRScheduler) for one in items):
        raise ConfigurationError(
            f"{len(items)} schedulers, of which one follows the training time, would set the same rates: give one, "
            "which may be a function (state, ssr) that combines others"
        )
    return items
