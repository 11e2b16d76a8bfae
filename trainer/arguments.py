"""Checks what was passed to a trainer, before anything is started."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from bus.errors import ConfigurationError
from bus.event import Event

__all__ = ["check_microbatch_size", "check_record", "check_schedulers", "several"]


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


def check_schedulers(schedulers: list[LRScheduler]) -> list[LRScheduler]:
    """The schedulers, or :class:`bus.errors.ConfigurationError` for one that cannot be stepped without a metric."""
    for scheduler in schedulers:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigurationError(
                "schedulers has a ReduceLROnPlateau, which needs a metric: step it in an Algorithm at EVAL_END"
            )
    return schedulers


def check_record(record: str | Iterable[Event | str] | None) -> set[Event]:
    """The events to record beside the base set."""
    if record is None:
        return set()
    if isinstance(record, str):
        return set(Event) if record.lower() == "all" else {Event(name.strip()) for name in record.split(",")}
    if isinstance(record, Mapping) or not isinstance(record, Iterable):
        raise ConfigurationError(f"record {record!r} is not allowed: use 'all' or a list of events")
    return {Event(event) for event in record}


def check_microbatch_size(size: Any) -> int | None:
    """The number of samples in a microbatch; ``None`` leaves batches whole."""
    if size is None or (isinstance(size, int) and not isinstance(size, bool) and size >= 1):
        return size
    raise ConfigurationError(
        f"device_train_microbatch_size {size!r} is not allowed: use a number of samples, or None to leave batches whole"
    )
