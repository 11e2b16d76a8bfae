"""The phases of a batch: the events between which each lies, and the field ``phases``, read and checked."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec

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

PHASES = ("data", "forward", "loss", "backward", "optimizer", "publishing")
"""The measured phases of a batch in order: waiting for data, the passes through the model, the step of the optimizers,
and the cost of publishing to the training thread."""

PARTS = (*PHASES, "other")
"""The parts of a step; ``other`` is the time in no phase."""


_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class Span(NamedTuple):
    """One phase of a batch; the passes through the model come once for each microbatch."""

    phase: str
    start_ns: int
    """From the beginning of the batch."""
    duration_ns: _Count


class BatchPhases(NamedTuple):
    """The phases of a batch on one rank."""

    began_ns: int
    """End of the batch before, or of the evaluation between them: nanoseconds since 1970 (UTC), by the rank's clock."""
    spans: tuple[Span, ...]
    on_device: bool
    """The GPU was timed, and not the host, which runs ahead of it."""
    publishing_ns: int | None = None
    """Cost of publishing to the training thread, the mean of the batches since the last report; ``None`` without one. A
    batch with a report is not typical: other fields are computed in it too."""

    def starts(self, phase: str) -> list[int]:
        """Start of each span of a phase, in nanoseconds since 1970 (UTC)."""
        return [self.began_ns + span.start_ns for span in self.spans if span.phase == phase]

    def totals(self) -> dict[str, int]:
        """Phase to the nanoseconds that it took, all microbatches together; of publishing, those of a typical batch."""
        totals: dict[str, int] = {}
        for span in self.spans:
            totals[span.phase] = totals.get(span.phase, 0) + span.duration_ns
        if self.publishing_ns is not None:
            totals["publishing"] = self.publishing_ns
        return totals

    def split(self, step_ns: int) -> dict[str, float]:
        """The seconds of each of :data:`PARTS` in a batch that took ``step_ns``; of publishing, those of a typical
        batch."""
        found = dict.fromkeys(PARTS, 0)
        for span in self.spans:
            if span.phase in found:
                found[span.phase] += span.duration_ns
        found["other"] = max(step_ns - sum(found.values()), 0)
        if self.publishing_ns is not None:
            found["publishing"] = self.publishing_ns
        return {part: nanoseconds / 1e9 for part, nanoseconds in found.items()}


class _OnWire(msgspec.Struct):
    began: int
    spans: tuple[Span, ...]
    device: Any = False
    publishing: tuple[_Count, Annotated[int, msgspec.Meta(ge=1)]] | None = None


def read_phases(value: Any) -> BatchPhases | None:
    """Reads the field as it travels, ``{"began": ..., "spans": [[phase, start, duration], ...], "device": ...,
    "publishing": [nanoseconds, batches]}``.

    ``None`` for a batch without it, and for a value of another form: a loop of your own may send anything under
    that name."""
    try:
        read = msgspec.convert(value, _OnWire)
    except (msgspec.ValidationError, RecursionError):
        return None
    nanoseconds, batches = read.publishing or (None, 1)
    return BatchPhases(
        read.began, read.spans, bool(read.device), None if nanoseconds is None else nanoseconds // batches
    )
