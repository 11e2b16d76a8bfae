"""Fields on demand."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias
from weakref import finalize, ref

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer.engine.state import State

FieldFunction: TypeAlias = Callable[[State], Any]
"""Computes a field from the state, without changing it."""

BATCH_RESULTS = frozenset({Event.AFTER_TRAIN_BATCH, Event.BATCH_END})
"""The events at which the gradients of a batch are complete."""


class FieldUnsupportedError(ConfigurationError):
    """The training does not support a field: it is not tried again."""


class FieldNotReadyError(ConfigurationError):
    """The batch began before the field was requested: it comes with the next one, and nothing is logged."""


class ProbeHook:
    """A hook on a model or an optimizer that calls a method of a probe, while the probe exists.

    Copies and pickles of it do nothing."""

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        # Not a WeakMethod, which makes a method at each call.
        self._owner: Callable[[], Any] = (lambda: None) if method is None else ref(method.__self__)  # type: ignore[attr-defined]
        self._function: Callable[..., None] | None = getattr(method, "__func__", None)

    def __call__(self, *arguments: Any) -> None:
        owner = self._owner()
        if owner is not None:
            self._function(owner, *arguments)  # type: ignore[misc]

    def __reduce__(self) -> tuple[Any, ...]:
        return ProbeHook, ()


_unused_hooks: list[Any] = []


def hook_optimizers(register: Callable[..., Any], method: Callable[..., None]) -> None:
    """Register a probe's method for all optimizers, until the probe is freed."""
    while _unused_hooks:
        _unused_hooks.pop().remove()
    # The garbage collector may run while torch iterates over the hooks, when none may be removed.
    finalize(method.__self__, _unused_hooks.append, register(ProbeHook(method)))  # type: ignore[attr-defined]


class Field(NamedTuple):
    compute: Callable[[Any], Any]
    """Computes it from the state, or from the probe if it has one."""
    events: frozenset[Event] = frozenset(Event)
    """The events at which it is available."""
    probe: Callable[[State, Callable[[], bool]], object] | None = None
    """Makes a probe that observes the training, for a field that cannot be computed from the state alone.

    Called with the state and a function that returns whether the field is due in the current batch. The probe is made
    at the first request and dropped, with its hooks, after the last one."""
    reserves: bool = False
    """Whether memory for its tensors is allocated at the first request: for large fields that must not be left out."""
