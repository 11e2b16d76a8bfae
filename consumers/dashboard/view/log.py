"""The events of a run as lines for people."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.consumers.loggers.console import format_value

_OTHERS = {
    Event.INIT: "the trainer is set up",
    Event.PREDICT_START: "prediction begins",
    Event.PREDICT_END: "prediction ends",
    Event.EVAL_STANDALONE_START: "evaluation alone begins",
    Event.EVAL_STANDALONE_END: "evaluation alone ends",
}


class LogEntry(NamedTuple):
    number: int  # counts the lines of a run from 1
    time: float  # seconds since 1970, UTC
    rank: int
    kind: str  # event, begin (of an evaluation), command, text, alert, end, note or output
    text: str


class RunLog:
    MAX_LINES = 2000

    def __init__(self) -> None:
        self._entries: deque[LogEntry] = deque(maxlen=self.MAX_LINES)
        self._count = 0

    def add(self, time: float, rank: int, kind: str, text: str) -> None:
        self._count += 1
        self._entries.append(LogEntry(self._count, time, rank, kind, " ".join(text.split())))

    def after(self, number: int) -> list[LogEntry]:
        new = min(self._count - number, len(self._entries))
        return [self._entries[place] for place in range(-new, 0)] if new > 0 else []


def folded(entries: Sequence[LogEntry]) -> list[LogEntry]:
    """Remove the start of each finished evaluation, whose end is an event."""
    last = max((place for place, entry in enumerate(entries) if entry.kind in ("event", "end")), default=-1)
    return [entry for place, entry in enumerate(entries) if entry.kind != "begin" or place > last]


def event_text(state: Snapshot) -> str | None:
    event = state.event
    _, epoch, batch, *_ = state.timestamp.values
    if event is Event.FIT_START:
        longest = state.fields.get("max_duration")
        return f"training begins{f', for {longest}' if longest else ''}{f', at batch {batch}' if batch else ''}"
    if event is Event.EPOCH_START:
        return f"epoch {epoch} begins"
    if event is Event.EVAL_START:
        return f"evaluation '{state.dataloader_label}' begins"
    if event is Event.EVAL_END:
        label, metrics = state.dataloader_label, state.fields.get("eval_metrics")
        values = metrics.get(label) if isinstance(metrics, Mapping) else None
        return f"evaluation '{label}': {in_words(values) or 'no metrics'}"
    if event is Event.FIT_END:
        return f"training ends at batch {batch}"
    return _OTHERS.get(event)


def in_words(values: Any) -> str:
    plain = values.items() if isinstance(values, Mapping) else ()
    return ", ".join(f"{name} {format_value(value)}" for name, value in plain if isinstance(value, float | int | str))
