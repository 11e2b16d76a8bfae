"""Checks what was passed to a trainer, before anything is started."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from bus.errors import ConfigurationError
from bus.event import Event

__all__ = ["OptimizerFactory", "Optimizers", "check_record", "check_schedulers", "make_optimizers", "several"]

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
OptimizerFactory = Callable[[Any], Optimizers]
"""Makes optimizers from a model."""


def several(given: Any, kind: type[Any], argument: str) -> list[Any]:
    """What was given as one object, as several, or not at all, as a list.

    Raises :class:`bus.errors.ConfigurationError` for an object of another kind."""
    if given is None:
        return []
    items: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    for item in items:
        if not isinstance(item, kind):
            raise ConfigurationError(
                f"{argument} has a {type(item).__name__}: give one {kind.__name__} or a list of them"
            )
    return items


def make_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    """The optimizers in what was given, or made by what was given.

    Raises :class:`bus.errors.ConfigurationError` for anything else."""
    return several(optimizers, torch.optim.Optimizer, "optimizers")


def check_schedulers(schedulers: Any) -> list[Any]:
    """The schedulers in what was given.

    Raises :class:`bus.errors.ConfigurationError` for what is none, and for one that cannot be stepped without a
    metric."""
    items = several(schedulers, object, "schedulers")
    for scheduler in items:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigurationError(
                "schedulers has a ReduceLROnPlateau, which needs a metric: step it in an Algorithm at EVAL_END"
            )
        if isinstance(scheduler, type) or not (isinstance(scheduler, LRScheduler) or callable(scheduler)):
            what = f"the class {scheduler.__name__}" if isinstance(scheduler, type) else f"a {type(scheduler).__name__}"
            raise ConfigurationError(
                f"schedulers has {what}: give a torch LRScheduler, an object of trainer.schedulers, "
                "or a function (state, ssr)"
            )
    return items


def check_record(record: str | Iterable[Event | str] | None) -> set[Event]:
    """The events to record beside the base set."""
    if record is None:
        return set()
    if isinstance(record, str):
        return set(Event) if record.lower() == "all" else {Event(name.strip()) for name in record.split(",")}
    if isinstance(record, Mapping) or not isinstance(record, Iterable):
        raise ConfigurationError(f"record {record!r} is not allowed: use 'all' or a list of events")
    return {Event(event) for event in record}
