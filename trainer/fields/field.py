"""What a field on demand is."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakMethod

from bus.errors import ConfigurationError
from bus.types.event import Event
from trainer.engine.state import State

__all__ = ["BATCH_RESULTS", "Field", "FieldFunction", "NeverThereError", "NotYetError", "WatchHook"]

FieldFunction: TypeAlias = Callable[[State], Any]
"""What computes a field: from the state, which it must leave as it is."""

BATCH_RESULTS = frozenset({Event.AFTER_TRAIN_BATCH, Event.BATCH_END})
"""The events at which the gradients of a batch are complete."""


class NeverThereError(ConfigurationError):
    """A training cannot have a field, now or later: it need not be tried again."""


class NotYetError(ConfigurationError):
    """A field is not there in a batch that began before somebody asked for it, and will be in the next: the event says
    so, and the log has nothing to tell."""


class WatchHook:
    """A hook that calls a method of a watch, for as long as there is one. A copy or a pickle of a model that it hangs
    on calls nobody."""

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self._method = None if method is None else WeakMethod(method)

    def __call__(self, *arguments: Any) -> None:
        method = None if self._method is None else self._method()
        if method is not None:
            method(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return WatchHook, ()


class Field(NamedTuple):
    """A field that can be asked for."""

    compute: Callable[[Any], Any]
    """What computes it. For a field with :attr:`watch` it is called with the watch instead of the state."""
    events: frozenset[Event] = frozenset(Event)
    """The events that it exists at; at others it is never there, whoever asks for it."""
    unit: str | None = None
    """What its numbers count, such as ``bytes`` or ``percent``."""
    shape: str | None = None
    """What it looks like, in words such as ``number`` or ``map of parameter to number``."""
    on_device: bool = False
    """Whether it is computed on the device that trains, and read without waiting."""
    description: str = ""
    """What it is, in one line."""
    watch: Callable[[State, Callable[[], bool]], object] | None = None
    """For a field that cannot be told from the state at the event alone: makes what watches the training, from the
    state and from what says whether the field is due at the batch at hand. It is made when somebody begins to ask, and
    dropped when nobody does any more: what it has put in place has to go with it."""
    reserves: bool = False
    """Whether memory for its tensors is got as soon as somebody asks: for what is large and is not to be left out."""
