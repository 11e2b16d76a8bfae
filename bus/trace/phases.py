"""The field ``phases`` of a batch, read and checked."""

from typing import Any, NamedTuple

PHASES = ("data", "forward", "loss", "backward", "optimizer", "publishing")
"""The phases of a batch that are measured, in the order in which they come: waiting for data, the passes through the
model, the step of the optimizers, and what publishing costs the training thread."""

PARTS = (*PHASES, "other")
"""The parts of a step; ``other`` is the time in no phase."""


class Span(NamedTuple):
    """One phase of a batch; the passes through the model come once for each microbatch."""

    phase: str
    start_ns: int
    """From the beginning of the batch."""
    duration_ns: int


class BatchPhases(NamedTuple):
    """The phases of a batch on one rank."""

    began_ns: int
    """When the batch began, which is when the one before it, or the evaluation between them, had ended: nanoseconds
    since 1970 (UTC), by the rank's own clock."""
    spans: tuple[Span, ...]
    on_device: bool
    """The GPU was timed, and not the host, which runs ahead of it."""
    publishing_ns: int | None = None
    """What publishing costs the training thread for each batch, as the mean of all since the last report;
    ``None`` without a report. A batch with one is not a typical one: other fields are computed in it too."""

    def starts(self, phase: str) -> list[int]:
        """When each span of a phase began, in nanoseconds since 1970 (UTC)."""
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


def read_phases(value: Any) -> BatchPhases | None:
    """Reads the field as it travels, ``{"began": ..., "spans": [[phase, start, duration], ...], "device": ...,
    "publishing": [nanoseconds, batches]}``.

    ``None`` for a batch without it, and for a value of another form: a loop of your own may send anything under
    that name."""
    if not isinstance(value, dict):
        return None
    began, spans = value.get("began"), value.get("spans")
    if type(began) is not int or not isinstance(spans, list | tuple):
        return None
    read = tuple(filter(None, map(_read_span, spans)))
    if len(read) < len(spans):
        return None
    return BatchPhases(began, read, bool(value.get("device")), _read_publishing(value.get("publishing")))


def _read_publishing(value: Any) -> int | None:
    if not isinstance(value, list | tuple) or len(value) < 2:
        return None
    nanoseconds, batches = value[:2]
    is_good = type(nanoseconds) is int and type(batches) is int and nanoseconds >= 0 and batches > 0
    return nanoseconds // batches if is_good else None


def _read_span(value: Any) -> Span | None:
    if not isinstance(value, list | tuple) or len(value) < 3:
        return None
    phase, start, duration = value[:3]
    if not isinstance(phase, str) or type(start) is not int or type(duration) is not int or duration < 0:
        return None
    return Span(phase, start, duration)
