"""The events between which each phase of a batch lies."""

from collections.abc import Mapping

from offloop.bus.types.event import Event

BEGINS: Mapping[Event, str] = {
    Event.EPOCH_START: "data",
    Event.BEFORE_DATALOADER: "data",
    Event.BEFORE_FORWARD: "forward",
    Event.BEFORE_LOSS: "loss",
    Event.BEFORE_BACKWARD: "backward",
    Event.AFTER_TRAIN_BATCH: "optimizer",
}
"""The phase that begins with an event."""
ENDS: Mapping[Event, tuple[str, ...]] = {
    Event.AFTER_DATALOADER: ("data",),
    Event.AFTER_FORWARD: ("forward",),
    # In loops that do not tell where the forward pass ends and the loss begins, both are one phase.
    Event.AFTER_LOSS: ("loss", "forward"),
    Event.AFTER_BACKWARD: ("backward",),
    Event.BATCH_END: ("optimizer",),
}
"""The phases that end with an event."""
BETWEEN = frozenset({Event.FIT_START, Event.BATCH_END, Event.EVAL_AFTER_ALL, Event.EVAL_STANDALONE_END})
"""After these a batch begins: what an evaluation takes belongs to none."""
MAX_SPANS = 512
"""The most spans of one batch; those of further microbatches are left out."""
