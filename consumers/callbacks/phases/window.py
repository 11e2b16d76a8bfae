"""Where the time of the last batches went, and what that says."""

from collections import Counter, deque
from collections.abc import Collection, Mapping
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from offloop.bus.printing import one_line
from offloop.bus.types.phases import PARTS
from offloop.consumers.callbacks.phases.arrivals import Arrival, LastArrival, find_straggler, last_to_arrive

_COMPUTE = ("forward", "loss", "backward", "optimizer")
_BEFORE_MEETING = ("data", "forward", "loss")
_KEEPS = 1.25
_STRAGGLES = 0.8


class Report(NamedTuple):
    """The measurement of a batch on one rank."""

    step: float
    """Seconds from the end of the batch before to the end of this one."""
    seconds: Mapping[str, float]
    """By part of the batch."""
    arrival: Arrival


class Sample(NamedTuple):
    """One batch, over all ranks that reported it."""

    step: float
    """Seconds from the end of the batch before to the end of this one."""
    seconds: list[float]
    """Of each of :data:`~offloop.bus.types.phases.PARTS`."""
    last: LastArrival | None
    longer_in: str | None = None
    """The phase that the last rank spent longer on than the others, before they met."""
    longer: float = 0.0
    """Seconds that it spent longer on it."""


class Verdict(NamedTuple):
    """The part that dominates."""

    kind: str
    """Stays the same while only the numbers change."""
    text: str


class _Candidate(NamedTuple):
    share: float
    needed: float
    verdict: Verdict

    def weight(self, known: str | None) -> float:
        """Its share, more of the verdict so far, so that a verdict does not come and go with every batch."""
        return self.share * (_KEEPS if self.verdict.kind == known else 1.0)


_NOTHING = _Candidate(0.0, 1.0, Verdict("", ""))


def sample_of(reports: Mapping[Any, Report]) -> Sample:
    """A batch from the reports of its ranks."""
    # In the order of the ranks: sums of floats depend on it.
    means = [fmean(report.seconds[part] for _, report in sorted(reports.items())) for part in PARTS]
    step = fmean(report.step for report in reports.values())
    last = last_to_arrive({rank: report.arrival for rank, report in reports.items()})
    if last is None:
        return Sample(step, means, None)
    rank, waited_ns = last
    longer = {
        phase: reports[rank].seconds[phase]
        - fmean(report.seconds[phase] for other, report in sorted(reports.items()) if other != rank)
        for phase in _BEFORE_MEETING
    }
    phase = max(longer, key=longer.__getitem__)
    return Sample(step, means, LastArrival("", rank, waited_ns / 1e9, step), phase, max(longer[phase], 0.0))


class PhaseWindow:
    """The last ``size`` batches that were measured. What takes ``threshold`` of the time, from 0 to 1, dominates."""

    def __init__(self, size: int, threshold: float) -> None:
        self._samples: deque[Sample] = deque(maxlen=size)
        self._size = size
        self._threshold = threshold

    def add(self, sample: Sample) -> None:
        """Add a batch."""
        self._samples.append(sample)

    def means(self) -> dict[str, float]:
        """Seconds of each part of a batch."""
        return {part: fmean(sample.seconds[place] for sample in self._samples) for place, part in enumerate(PARTS)}

    def verdict(self, evaluation: float, known: str | None, arrivals: Collection[LastArrival] = ()) -> Verdict | None:
        """The part that dominates, once the window is half full; ``None`` when none does.

        Args:
            evaluation: seconds of evaluating for each batch.
            known: the kind of the verdict so far, which stands until another one is clearly right.
            arrivals: who came last in windows of batches over all hosts: with some, a straggler is sought there.
        """
        step = fmean(sample.step for sample in self._samples) if self._samples else 0.0
        if 2 * len(self._samples) < self._size or step <= 0:
            return None
        means = self.means()
        evaluating = evaluation / (step + evaluation)
        candidates = [
            self._straggler(arrivals),
            self._part("input", means["data"] / step, "input-bound: {} of the step waits for data"),
            self._part("evaluation", evaluating, "evaluation-bound: {} of the time goes into evaluations"),
            self._part("publishing", means["publishing"] / step, "publishing-bound: {} of the step is publishing"),
            self._part("other", means["other"] / step, "bound by other work: {} of the step is in none of its phases"),
        ]
        dominating = [one for one in candidates if one.weight(known) >= one.needed]
        if dominating:
            return max(dominating, key=lambda one: one.weight(known)).verdict
        compute = sum(means[phase] for phase in _COMPUTE) / step
        healthy = self._part("compute", compute, "compute-bound: {} of the step computes")
        return healthy.verdict if healthy.weight(known) >= max(0.5, self._threshold) else None

    def _part(self, kind: str, share: float, text: str) -> _Candidate:
        return _Candidate(share, self._threshold, Verdict(kind, text.format(f"{100 * share:.0f} %")))

    def _straggler(self, arrivals: Collection[LastArrival]) -> _Candidate:
        compared: list[LastArrival | None] = [*arrivals] or [sample.last for sample in self._samples]
        found = find_straggler(compared, _STRAGGLES * len(compared))
        if found is None or 2 * len(compared) < self._size:
            return _NOTHING
        waits = f"the others wait {_milliseconds(found.waited)}"
        if found.host:
            who = f"host {one_line(found.host)}" + ("" if found.rank is None else f", rank {found.rank}")
            text = f"straggling {who}: arrives last, {waits}"
        else:
            who = str(found.rank)
            text = f"straggling rank {who}: arrived last in {found.times} of {len(compared)} batches, {waits}"
            late = [sample for sample in self._samples if sample.last and sample.last.rank == found.rank]
            phases = Counter(str(sample.longer_in) for sample in late)
            phase = max(phases, key=lambda one: (phases[one], one))
            longer = fmean(sample.longer if sample.longer_in == phase else 0.0 for sample in late)
            if longer >= found.waited / 2:
                text += f"; it takes {_milliseconds(longer)} longer for {phase}"
        # All ranks lose what one costs them, so that is worth a word sooner.
        return _Candidate(found.costs(len(compared)), self._threshold / 3, Verdict(f"straggler {who}", text))

    def state_dict(self) -> list[list[Any]]:
        """The batches, as plain values."""
        return [list(sample) for sample in self._samples]

    def load_state_dict(self, state: list[list[Any]]) -> None:
        """Resume from a state."""
        self._samples.extend(msgspec.convert(state, list[Sample]))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
