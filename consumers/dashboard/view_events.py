"""Events in the words of the log."""

from collections.abc import Mapping
from typing import Any

from bus.event import Event
from bus.snapshot import Snapshot
from consumers.loggers.console import format_value

__all__ = ["event_text"]


def event_text(state: Snapshot) -> str | None:
    """A line about an event; ``None`` for those that come too often, or say nothing to people."""
    event = state.event
    _, epoch, batch, *_ = state.timestamp.values
    if event is Event.FIT_START:
        longest = state.fields.get("max_duration")
        return (
            f"training begins{f', to go on for {longest}' if longest else ''}{f', at batch {batch}' if batch else ''}"
        )
    if event is Event.EPOCH_START:
        return f"epoch {epoch} begins"
    if event is Event.EVAL_START:
        return f"evaluation '{state.dataloader_label}' begins"
    if event is Event.EVAL_END:
        label = state.dataloader_label
        return f"evaluation '{label}': {_in_words(state.fields.get('eval_metrics'), label) or 'no metrics'}"
    if event is Event.FIT_END:
        return f"training is through at batch {batch}"
    return _OTHERS.get(event)


_OTHERS = {
    Event.INIT: "the trainer is set up",
    Event.PREDICT_START: "prediction begins",
    Event.PREDICT_END: "prediction is through",
    Event.EVAL_STANDALONE_START: "evaluation alone begins",
    Event.EVAL_STANDALONE_END: "evaluation alone is through",
}


def _in_words(metrics: Any, label: str | None) -> str:
    values = metrics.get(label) if isinstance(metrics, Mapping) else None
    plain = values.items() if isinstance(values, Mapping) else ()
    return ", ".join(f"{name} {format_value(value)}" for name, value in plain if isinstance(value, float | int | str))
