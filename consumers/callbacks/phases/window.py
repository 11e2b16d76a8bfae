"""Where the time of the last batches went, and what that says."""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import reduce
from operator import add
from statistics import fmean
from typing import Any, NamedTuple

from offloop.bus.printing import one_line
from offloop.bus.trace.phases import PHASES
from offloop.consumers.callbacks.phases.hosts import LastArrival

_MEET_IN_FORWARD = 4

MEASURED = (*PHASES, "other")
"""What the time of a batch is divided into; ``other`` is what is in no phase."""

_COMPUTE = ("forward", "loss", "backward", "optimizer")
_BEFORE_MEETING = ("data", "forward", "loss")
_KEEPS = 1.25
_STRAGGLES = 0.8


class Arrival(NamedTuple):
    """When a rank came to what the ranks of a training do together in one batch; times of its own clock, in
    nanoseconds."""

    forward: int | None
    """When its first forward pass began."""
    backward: tuple[int, ...]
    """When each of its backward passes began: one for each microbatch."""
    ended: int
    """When the batch had ended, which all ranks do together."""


class Straggler(NamedTuple):
    """The rank that came last in a batch."""

    rank: int
    waited_ns: int
    """How long the others waited for it, on average."""


def last_to_arrive(arrivals: Mapping[int, Arrival]) -> Straggler | None:
    """The rank that arrived last where the ranks meet, of those that are known; ``None`` when there is nothing to
    compare.

    Durations do not tell: whoever arrives early waits within its own backward pass, so that all take equally long. The
    ranks meet in the backward pass, where gradients are exchanged: at the first one, and, with microbatches, at the
    last one, whichever the others waited at for longer. Ranks that share the weights out meet in the forward pass
    already; they are known by starting the backward pass together although they came to the forward pass one after
    the other.

    Each time is taken relative to the end of the batch on the same rank, so the ranks' clocks need not agree.
    """
    computing = {rank: arrival for rank, arrival in arrivals.items() if arrival.backward}
    found = max(
        _last(computing, lambda arrival: arrival.backward[0]),
        _last(computing, lambda arrival: arrival.backward[-1]),
        key=lambda straggler: straggler.waited_ns,
    )
    at_forward = _last(computing, lambda arrival: arrival.forward)
    if at_forward.waited_ns > _MEET_IN_FORWARD * found.waited_ns:
        found = at_forward
    return found if found.waited_ns > 0 else None


def _last(arrivals: Mapping[int, Arrival], point: Callable[[Arrival], int | None]) -> Straggler:
    lateness = {
        rank: at - arrival.ended for rank, arrival in sorted(arrivals.items()) if (at := point(arrival)) is not None
    }
    if len(lateness) < 2:
        return Straggler(-1, 0)
    rank = max(lateness, key=lateness.__getitem__)
    latest = lateness.pop(rank)
    return Straggler(rank, round(fmean(latest - one for one in lateness.values())))


class Report(NamedTuple):
    """What one rank says of a batch; nanoseconds."""

    step: int
    """From the end of the batch before to the end of this one."""
    totals: Mapping[str, int]
    arrival: Arrival


class Sample(NamedTuple):
    """One batch, over all ranks that reported it."""

    step: float
    """Seconds from the end of the batch before to the end of this one."""
    seconds: list[float]
    """Of each part that is :data:`MEASURED`."""
    straggler: int | None
    """The rank that came last, and for how many seconds the others waited for it."""
    waited: float
    longer_in: str | None
    """The phase that it spent longer on than the others, before they met, and how many seconds longer."""
    longer: float


class Verdict(NamedTuple):
    """What dominates."""

    kind: str
    """What stays the same while only the numbers change."""
    text: str


class _Candidate(NamedTuple):
    share: float
    needed: float
    verdict: Verdict

    def stays(self, known: str | None) -> float:
        """What its share is multiplied by, so that a verdict does not come and go with every batch."""
        return _KEEPS if self.verdict.kind == known else 1.0


_NOTHING = _Candidate(0.0, 1.0, Verdict("", ""))


def sample_of(reports: Mapping[int, Report]) -> Sample:
    """A batch from what its ranks said of it."""
    divided = [_divide(report) for _, report in sorted(reports.items())]
    means = [fmean(parts) for parts in zip(*divided, strict=True)]
    step = fmean(report.step for report in reports.values()) / 1e9
    last = last_to_arrive({rank: report.arrival for rank, report in reports.items()})
    if last is None:
        return Sample(step, means, None, 0.0, None, 0.0)
    longer = {
        phase: reports[last.rank].totals.get(phase, 0)
        - fmean(report.totals.get(phase, 0) for rank, report in sorted(reports.items()) if rank != last.rank)
        for phase in _BEFORE_MEETING
    }
    phase = max(longer, key=longer.__getitem__)
    return Sample(step, means, last.rank, last.waited_ns / 1e9, phase, max(longer[phase], 0.0) / 1e9)


def _divide(report: Report) -> list[float]:
    known = [report.totals.get(phase, 0) / 1e9 for phase in PHASES]
    # Added one after the other: from Python 3.12 on, sum() rounds floats otherwise.
    return [*known, max(report.step / 1e9 - reduce(add, known), 0.0)]


class PhaseWindow:
    """The last ``size`` batches that were measured. What takes ``threshold`` of the time, from 0 to 1, dominates."""

    def __init__(self, size: int, threshold: float) -> None:
        self._samples: deque[Sample] = deque(maxlen=size)
        self._size = size
        self._threshold = threshold

    def add(self, sample: Sample) -> None:
        """Takes in a batch."""
        self._samples.append(sample)

    def means(self) -> dict[str, float]:
        """Seconds of each part of a batch."""
        return {part: fmean(sample.seconds[place] for sample in self._samples) for place, part in enumerate(MEASURED)}

    def verdict(self, evaluation: float, known: str | None, arrivals: Collection[LastArrival] = ()) -> Verdict | None:
        """What dominates, once the window is half full; ``None`` when nothing does. ``evaluation`` is how many seconds
        of evaluating there are for each batch; ``known`` the kind of the verdict so far, which stands until another one
        is clearly right; ``arrivals`` who came last in windows of batches over all hosts: with some a straggler is
        sought there."""
        step = fmean(sample.step for sample in self._samples) if self._samples else 0.0
        if 2 * len(self._samples) < self._size or step <= 0:
            return None
        means = self.means()
        candidates = [
            self._straggling_host(arrivals) if arrivals else self._straggler(step),
            self._part("input", means["data"] / step, "input-bound: {} of the step waits for data"),
            self._part(
                "evaluation",
                evaluation / (step + evaluation),
                "evaluation-bound: {} of the time goes into evaluations",
            ),
            self._part("publishing", means["publishing"] / step, "publishing-bound: {} of the step is publishing"),
            self._part("other", means["other"] / step, "bound by other work: {} of the step is in none of its phases"),
        ]
        dominating = [one for one in candidates if one.share * one.stays(known) >= one.needed]
        if dominating:
            return max(dominating, key=lambda one: one.share * one.stays(known)).verdict
        compute = sum(means[phase] for phase in _COMPUTE) / step
        healthy = self._part("compute", compute, "compute-bound: {} of the step computes")
        return healthy.verdict if compute * healthy.stays(known) >= max(0.5, self._threshold) else None

    def _part(self, kind: str, share: float, text: str) -> "_Candidate":
        return _Candidate(share, self._threshold, Verdict(kind, text.format(_percent(share))))

    def _straggler(self, step: float) -> "_Candidate":
        last = Counter(sample.straggler for sample in self._samples if sample.straggler is not None)
        rank, times = min(last.items(), key=lambda one: (-one[1], one[0]), default=(0, 0))
        if times < _STRAGGLES * len(self._samples):
            return _NOTHING
        late = [sample for sample in self._samples if sample.straggler == rank]
        waited = fmean(sample.waited for sample in late)
        text = (
            f"straggling rank {rank}: arrived last in {times} of {len(self._samples)} batches, "
            f"the others wait {_milliseconds(waited)}"
        )
        phases = Counter(sample.longer_in for sample in late)
        phase = max(phases, key=lambda one: (phases[one], str(one)))
        longer = fmean(sample.longer if sample.longer_in == phase else 0.0 for sample in late)
        if longer >= waited / 2:
            text += f"; it takes {_milliseconds(longer)} longer for {phase}"
        # All ranks lose what one costs them, so that is worth a word sooner.
        share = waited * times / len(self._samples) / step
        return _Candidate(share, self._threshold / 3, Verdict(f"straggler {rank}", text))

    def _straggling_host(self, arrivals: Collection[LastArrival]) -> "_Candidate":
        """Over all hosts: one rank, or the ranks of one host in turns."""
        found = [one for one in arrivals if one.waited > 0 and one.step > 0]
        (host, rank), times = _most_often((one.host, one.rank) for one in found)
        late = [one for one in found if (one.host, one.rank) == (host, rank)]
        if times < _STRAGGLES * len(arrivals):
            host, times = _most_often(one.host for one in found)
            late, rank = [one for one in found if one.host == host], None
        if 2 * len(arrivals) < self._size or times < _STRAGGLES * len(arrivals):
            return _NOTHING
        waited, step = fmean(one.waited for one in late), fmean(one.step for one in late)
        who = f"host {one_line(host)}" + ("" if rank is None else f", rank {rank}")
        text = f"straggling {who}: arrives last, the others wait {_milliseconds(waited)}"
        share = waited * times / len(arrivals) / step
        return _Candidate(share, self._threshold / 3, Verdict(f"straggler {who}", text))

    def state_dict(self) -> list[list[Any]]:
        """The batches, as plain values."""
        return [list(sample) for sample in self._samples]

    def load_state_dict(self, state: list[list[Any]]) -> None:
        """Takes up what :meth:`state_dict` gave."""
        self._samples.extend(Sample(*values) for values in state)


def _most_often(names: Iterable[Any]) -> tuple[Any, int]:
    counted = Counter(names)
    return min(counted.items(), key=lambda one: (-one[1], one[0]), default=((None, None), 0))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
