"""What a field on demand is."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

from bus.event import Event
from trainer.state import State

__all__ = ["BATCH_RESULTS", "Field", "FieldFunction", "Watch"]

FieldFunction: TypeAlias = Callable[[State], Any]
"""What computes a field: from the state, which it must leave as it is."""

BATCH_RESULTS = frozenset({Event.AFTER_TRAIN_BATCH, Event.BATCH_END})
"""The events at which the gradients of a batch are complete."""


class Watch(Protocol):
    """What looks at the training while a field is asked for that cannot be told from the state at the event alone."""

    def stop(self) -> None:
        """Nobody asks any more: takes away whatever was put in place."""


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
    watch: Callable[[State, Callable[[], bool]], Watch] | None = None
    """For a field that has to be watched for: called when somebody begins to ask, with the state and with what says
    whether the field is due at the batch at hand."""
