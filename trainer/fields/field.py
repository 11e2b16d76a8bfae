"""Fields on demand."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakMethod, finalize

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer.engine.state import State

FieldFunction: TypeAlias = Callable[[State], Any]
"""Computes a field from the state, which it must leave as it is."""

BATCH_RESULTS = frozenset({Event.AFTER_TRAIN_BATCH, Event.BATCH_END})
"""The events at which the gradients of a batch are complete."""


class FieldUnsupportedError(ConfigurationError):
    """The training does not support a field: it is not tried again."""


class FieldNotReadyError(ConfigurationError):
    """The batch began before the field was requested: it comes with the next one, and nothing is logged."""


class ProbeHook:
    """A hook on a model or an optimizer that calls a method of a probe, while the probe exists. Copies and pickles of
    it do nothing."""

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self._method = None if method is None else WeakMethod(method)

    def __call__(self, *arguments: Any) -> None:
        method = None if self._method is None else self._method()
        if method is not None:
            method(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return ProbeHook, ()


_unused_hooks: list[Any] = []


def hook_optimizers(register: Callable[..., Any], method: Callable[..., None]) -> None:
    """Has torch call a probe's method for all optimizers while the probe exists, by a function such as
    ``register_optimizer_step_pre_hook``."""
    while _unused_hooks:
        _unused_hooks.pop().remove()
    # The garbage collector may come while torch goes through the hooks, which none may be taken from then.
    finalize(method.__self__, _unused_hooks.append, register(ProbeHook(method)))  # type: ignore[attr-defined]


class Field(NamedTuple):
    """A field that can be requested."""

    compute: Callable[[Any], Any]
    """Computes it from the state, or from the probe where there is one."""
    events: frozenset[Event] = frozenset(Event)
    """The events that it exists at; at others it is not available."""
    unit: str | None = None
    """Unit of its numbers, such as ``bytes`` or ``percent``."""
    shape: str | None = None
    """Shape in words, such as ``number`` or ``map of parameter to number``."""
    description: str = ""
    """Description in one line."""
    probe: Callable[[State, Callable[[], bool]], object] | None = None
    """For a field that cannot be computed from the state at the event alone: makes the probe that observes the
    training, from the state and a function that says whether the field is due at the current batch. It is made at the
    first request and dropped after the last one, and takes its hooks with it."""
    reserves: bool = False
    """Whether memory for its tensors is allocated at the first request: for what is large and must not be left out."""
