"""The phases of a batch, their events, and the field ``phases``."""

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
}  # event to the phase that begins with it
ENDS: Mapping[Event, tuple[str, ...]] = {
    Event.AFTER_DATALOADER: ("data",),
    Event.AFTER_FORWARD: ("forward",),
    # A loop may not report where the forward pass ends and the loss begins: both are one phase then.
    Event.AFTER_LOSS: ("loss", "forward"),
    Event.AFTER_BACKWARD: ("backward",),
    Event.BATCH_END: ("optimizer",),
}  # event to the phases that end with it
BETWEEN = frozenset({Event.FIT_START, Event.BATCH_END, Event.EVAL_AFTER_ALL, Event.EVAL_STANDALONE_END})
"""Events after which a batch begins. The time of an evaluation belongs to no batch."""
MAX_SPANS = 512  # maximum number of spans of a batch; spans of further microbatches are left out

PHASES = ("data", "forward", "loss", "backward", "optimizer", "publishing")
"""The measured phases of a batch in order: waiting for data, the passes through the model, the optimizer steps, and the
time that publishing takes in the training thread."""

PARTS = (*PHASES, "other")  # the parts of a step; other is the time in no phase


_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class Span(NamedTuple):
    """One phase of a batch. The passes through the model occur once for each microbatch."""

    phase: str
    start_ns: int  # nanoseconds from the beginning of the batch
    duration_ns: _Count


class BatchPhases(NamedTuple):
    began_ns: int  # end of the preceding batch or evaluation: nanoseconds since 1970 (UTC), by the rank's clock
    spans: tuple[Span, ...]
    on_device: bool  # true if the GPU was timed, and not the host, which runs ahead of it
    publishing_ns: int | None = None
    """Time that publishing took in the training thread, the mean of the batches since the last report; ``None`` without
    a report. A batch with a report is not typical: it computes further fields."""

    def starts(self, phase: str) -> list[int]:
        return [self.began_ns + span.start_ns for span in self.spans if span.phase == phase]

    def totals(self) -> dict[str, int]:
        """Return the nanoseconds of each phase, all microbatches together; publishing as in a typical batch."""
        totals: dict[str, int] = {}
        for span in self.spans:
            totals[span.phase] = totals.get(span.phase, 0) + span.duration_ns
        if self.publishing_ns is not None:
            totals["publishing"] = self.publishing_ns
        return totals

    def split(self, step_ns: int) -> dict[str, float]:
        """Return the seconds of each of :data:`PARTS` in a batch of ``step_ns``; publishing as in a typical batch."""
        totals = self.totals()
        found = {phase: totals.get(phase, 0) for phase in PHASES}
        # Without the typical time of publishing: the batch's own is one of its spans.
        found["other"] = max(step_ns - sum(span.duration_ns for span in self.spans if span.phase in PARTS), 0)
        return {part: nanoseconds / 1e9 for part, nanoseconds in found.items()}


class _OnWire(msgspec.Struct):
    began: int
    spans: tuple[Span, ...]
    device: Any = False
    publishing: tuple[_Count, Annotated[int, msgspec.Meta(ge=1)]] | None = None


def read_phases(value: Any) -> BatchPhases | None:
    """Read ``{"began": ..., "spans": [[phase, start, duration], ...], "device": ..., "publishing": [ns, batches]}``.

    ``None`` for a batch without it and for any other form: a user's loop may send any value under that name."""
    try:
        read = msgspec.convert(value, _OnWire)
    except (msgspec.ValidationError, RecursionError):
        return None
    nanoseconds, batches = read.publishing or (None, 1)
    return BatchPhases(
        read.began, read.spans, bool(read.device), None if nanoseconds is None else nanoseconds // batches
    )
