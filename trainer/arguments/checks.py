"""Checks what was passed to a trainer, before anything is started."""

import inspect
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from bus.errors import ConfigurationError
from bus.types.event import Event

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
OptimizerFactory = Callable[[Any], Optimizers]
"""Makes optimizers from a model."""


def as_list(given: Any, kind: type[Any], argument: str) -> list[Any]:
    """Converts an argument that is one object, several, or none, to a list.

    Raises :class:`bus.errors.ConfigurationError` for an object of another kind."""
    if given is None:
        return []
    items: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    for item in items:
        if not isinstance(item, kind):
            raise ConfigurationError(f"{argument} has {_what(item)}: give one {kind.__name__} or a list of them")
    return items


def given_optimizers(optimizers: Any) -> list[torch.optim.Optimizer] | None:
    """The optimizers in what was given; ``None`` for a function, which makes them later.

    Raises :class:`bus.errors.ConfigurationError` as :func:`make_optimizers` does."""
    return None if callable(optimizers) and not isinstance(optimizers, type) else make_optimizers(optimizers)


def make_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    """The optimizers in what was given, or made by what was given.

    Raises :class:`bus.errors.ConfigurationError` for anything else, for one optimizer twice, and for one whose step
    computes the loss itself."""
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
    """Raises :class:`bus.errors.ConfigurationError` for an optimizer with parameters that are not the model's."""
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
    """The schedulers in what was given, which go with the optimizers where these are known.

    Raises :class:`bus.errors.ConfigurationError` for what is none, for one that cannot be stepped without a metric, for
    one of another optimizer, and for several of which one follows the training time."""
    items = as_list(schedulers, object, "schedulers")
    for scheduler in items:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigurationError(
                "schedulers has a ReduceLROnPlateau, which needs a metric: step it in an Algorithm at EVAL_END"
            )
        if isinstance(scheduler, type) or not (isinstance(scheduler, LRScheduler) or callable(scheduler)):
            raise ConfigurationError(
                f"schedulers has {_what(scheduler)}: give a torch LRScheduler, an object of trainer.schedulers, "
                "or a function (state, ssr)"
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


def check_record(record: str | Iterable[Event | str] | None) -> set[Event]:
    """The events to record beside the base set."""
    if record is None:
        return set()
    if isinstance(record, str):
        return set(Event) if record.lower() == "all" else {Event(name.strip()) for name in record.split(",")}
    if isinstance(record, Mapping) or not isinstance(record, Iterable):
        raise ConfigurationError(f"record {record!r} is not allowed: use 'all' or a list of events")
    return {Event(event) for event in record}


def check_compile_config(config: Any) -> dict[str, Any] | None:
    """The keyword arguments of ``torch.compile`` in ``compile_config``; ``None`` for none.

    Raises :class:`bus.errors.ConfigurationError` for names and values that it does not take."""
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise ConfigurationError(
            f"compile_config is {config!r}: give a dict of arguments of torch.compile, {{}} for its defaults"
        )
    allowed = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    for name in config:
        if name not in allowed:
            raise ConfigurationError(f"compile_config has an unknown {name!r}: use {', '.join(allowed)}")
    try:
        # Looks at the arguments; compiles only what is called.
        if config:
            torch.compile(torch.nn.Identity(), **config)
    # Errors of every kind, depending on the argument.
    except Exception as error:  # noqa: BLE001
        raise ConfigurationError(
            f"compile_config {dict(config)!r} is not allowed: {textwrap.shorten(str(error), 200)}"
        ) from None
    return dict(config)


def check_config(config: Any) -> dict[str, Any]:
    """What else to write down about a run, by name.

    Raises :class:`bus.errors.ConfigurationError` for what has no names."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise ConfigurationError(f"config is {config!r}: give a dict of names and values")
    return dict(config)


def check_path(path: Any, argument: str) -> Path:
    """The path of a file or folder.

    Raises :class:`bus.errors.ConfigurationError` for what is none."""
    if not isinstance(path, str | os.PathLike) or not isinstance(text := os.fspath(path), str) or not text:
        raise ConfigurationError(f"{argument} is {path!r}: give a path, as a text or a pathlib.Path")
    return Path(text)


def check_text(text: Any, argument: str) -> None:
    """Raises :class:`bus.errors.ConfigurationError` for an argument that is no text."""
    if not isinstance(text, str):
        raise ConfigurationError(f"{argument} is {text!r}: give a text, such as the default")


def check_flags(**arguments: Any) -> None:
    """Raises :class:`bus.errors.ConfigurationError` for an argument that is neither ``True`` nor ``False``."""
    for argument, flag in arguments.items():
        if not isinstance(flag, bool):
            raise ConfigurationError(f"{argument} is {flag!r}: use True or False")


def check_function(function: Any, argument: str, call: str) -> None:
    """Raises :class:`bus.errors.ConfigurationError` for what cannot be called; ``call`` says with what it is."""
    if not callable(function):
        raise ConfigurationError(f"{argument} is {function!r}: give a function that is called with {call}")


def check_max_delay(seconds: Any) -> float:
    """The seconds by which events may be late.

    Raises :class:`bus.errors.ConfigurationError` for what is not allowed."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= 1:
        raise ConfigurationError(f"max_delay is {seconds!r}; it is in seconds: use 0 to 1, 0 sends every event at once")
    return seconds


def _what(item: Any) -> str:
    return f"the class {item.__name__}" if isinstance(item, type) else f"a {type(item).__name__}"
