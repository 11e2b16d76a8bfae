"""The parts of a step's time, and the rank that delays the others."""

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from offloop.bus.errors import ConfigurationError, check_at_least
from offloop.bus.printing import one_line
from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.bus.types.health import HEALTH, Health, find_cause, recent_health
from offloop.bus.types.phases import PARTS, read_phases
from offloop.bus.types.units import SECONDS, number_text
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger
from offloop.consumers.callbacks.arrivals import (
    Arrival,
    HostArrivals,
    LastArrival,
    Together,
    find_straggler,
    last_to_arrive,
)

_COMPUTE = ("forward", "loss", "backward", "optimizer")
_BEFORE_MEETING = ("data", "forward", "loss")
_KEEPS = 1.25
_STRAGGLES = 0.8
_NAME = "time/phase"
_UNSETTLED = 32
_PAUSE_NS = 50_000_000  # the ranks are less than this apart; the first one reports the training time


class Report(NamedTuple):
    step: float  # seconds from the end of the batch before to the end of this one
    seconds: Mapping[str, float]  # by part of the batch
    arrival: Arrival


class Sample(NamedTuple):
    step: float  # seconds from the end of the batch before to the end of this one
    seconds: list[float]  # for each of PARTS
    last: LastArrival | None
    longer_in: str | None = None
    """The phase, before the ranks met, on which the last rank spent most more time than the others."""
    longer: float = 0.0  # seconds that it spent longer on it


class Verdict(NamedTuple):
    share: float
    needed: float
    kind: str  # stays the same while only the numbers change
    text: str

    def weight(self, known: str | None) -> float:
        """Return its share, increased for the current verdict, so that verdicts do not flicker."""
        return self.share * (_KEEPS if self.kind == known else 1.0)


def sample_of(reports: Mapping[Any, Report]) -> Sample:
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


class Phases(Callback):
    """The parts of a step's time, and a verdict in words when one dominates.

    Of each measured batch it logs ``time/phase/data`` (waiting for data), ``forward``, ``loss``, ``backward``,
    ``optimizer``, ``publishing`` and ``other`` (the rest), in seconds per batch, as the mean over the last ``window``
    measured batches and all ranks; microbatches are added up. ``time/phase/evaluation`` is the time of the last
    evaluation divided by the batches since the one before. On a GPU the phases are those of the GPU.

    ``time/phase/verdict`` is logged as a metric and as a text when it changes: ``input-bound: 63 % of the step waits
    for data``, ``evaluation-bound``, ``publishing-bound``, ``bound by other work``, ``compute-bound``, or, with several
    ranks, ``straggling rank 2: arrived last in 9 of 10 batches, the others wait 12 ms``. A straggler arrives last where
    the ranks meet, whatever the ranks' clocks show.

    In a run on several hosts, read with ``--stream``, stragglers are sought over all hosts, in their last ``window``
    reports of about a second: ``straggling host node17, rank 139: arrives last, the others wait 40 ms``, or
    ``straggling host node17`` where its ranks take turns. All else, and a replay, is about the first host.

    Args:
        every: the measured batches: each 10th, or an interval such as ``1ep``.
        window: the measured batches of a mean; a verdict takes half of them.
        threshold: the share of the time that makes something dominate; for a straggler, a third of it.
    """

    all_ranks = True
    resumes = False
    keeps: tuple[str, ...] = ("_verdict", "_resumed", "_evaluation", "_reports")
    fields: tuple[str, ...] = ("phases",)

    def __init__(self, every: int | str = 10, window: int = 10, threshold: float = 0.3) -> None:
        check_at_least("window", window, 1)
        if not 0 < threshold < 1:
            raise ConfigurationError(f"threshold is {threshold}: use a share of the time between 0 and 1")
        self.every = every
        self._threshold = threshold
        self._samples: deque[Sample] = deque(maxlen=window)
        self._verdict: str | None = None
        self._reports: Together[Report] = Together(_UNSETTLED, Report)
        self._resumed: dict[int, int] = {}  # start of the current batch on each rank
        self._evaluation = _Evaluation()
        self._arrivals = HostArrivals()
        self._arrived: deque[LastArrival] = deque(maxlen=window)
        self._has_hosts = False
        # By the host of a window; the run's own events are those of one host, without a name.
        self._health = recent_health()

    def demand(self) -> Demand:
        others = (Event.FIT_START, Event.EVAL_BEFORE_ALL, Event.EVAL_AFTER_ALL, HEALTH)
        return Demand({Event.BATCH_END: EventDemand(1, {"phases": self.every}), **dict.fromkeys(others, EventDemand())})

    def state_dict(self) -> dict[str, Any]:
        samples, health = [list(sample) for sample in self._samples], msgspec.to_builtins([*self._health[""]])
        return super().state_dict() | {"samples": samples, "health": health}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._samples.clear()
        self._samples.extend(msgspec.convert(state["samples"], list[Sample]))
        self._health[""].extend(msgspec.convert(state["health"], list[Health]))

    def host_windows(self, windows: Sequence[HostWindow], logger: Logger) -> None:
        self._has_hosts = True
        for window in windows:
            if window.health is not None:
                self._health[window.host].append(window.health)
        self._arrived.extend(self._arrivals.add(one for one in windows if len(one.ranks) < one.world_size))

    @Callback.on(HEALTH.value)
    def health(self, state: Snapshot, logger: Logger) -> None:
        if (health := Health.of(state.fields)) is not None:
            self._health[""].append(health)

    def fit_start(self, state: Snapshot, logger: Logger) -> None:
        self._resumed[state.rank] = state.time_ns
        if state.rank == 0:
            self._evaluation.before = state.timestamp.values.batch

    def eval_before_all(self, state: Snapshot, logger: Logger) -> None:
        if state.rank == 0:
            self._evaluation.began = state.time_ns

    def eval_after_all(self, state: Snapshot, logger: Logger) -> None:
        self._resumed[state.rank] = state.time_ns
        if state.rank == 0:
            self._evaluation.end(state.time_ns, state.timestamp.values.batch)

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        resumed = self._resumed.get(state.rank)
        self._resumed[state.rank] = state.time_ns
        # The windows of other hosts have their ranks.
        expected = len(self._resumed) if self._has_hosts else state.world_size
        batch, report = state.timestamp.values.batch, _report(state, resumed)
        self._log(
            self._reports.add(state.rank, batch, state.time_ns, report, lambda found: len(found) == expected), logger
        )

    def close(self, state: Snapshot, logger: Logger) -> None:
        if self._reports.open:
            self._log(self._reports.settle(max(self._reports.open)), logger)

    def _log(self, batches: Sequence[tuple[int, Mapping[Hashable, Report]]], logger: Logger) -> None:
        for batch, reports in batches:
            self._samples.append(sample_of(reports))
            means = {part: fmean(one.seconds[place] for one in self._samples) for place, part in enumerate(PARTS)}
            means["evaluation"] = self._evaluation.seconds_per_batch(batch)
            logger.log_metrics({f"{_NAME}/{part}": seconds for part, seconds in means.items()}, batch)
            verdict = self._judge(means)
            kind = None if verdict is None else verdict.kind
            if kind != self._verdict:
                self._verdict = kind
                text = "balanced: nothing dominates" if verdict is None else verdict.text
                logger.log_metrics({f"{_NAME}/verdict": text}, batch)
                logger.log_text(text, f"{_NAME}/verdict", batch)

    def _judge(self, means: Mapping[str, float]) -> Verdict | None:
        step, known = fmean(sample.step for sample in self._samples), self._verdict
        if not self._is_half_full(self._samples) or step <= 0:
            return None
        evaluating = means["evaluation"] / (step + means["evaluation"])
        candidates = [
            *self._stragglers(),
            self._part("input", means["data"] / step, "input-bound: {} of the step waits for data"),
            self._part("evaluation", evaluating, "evaluation-bound: {} of the time goes into evaluations"),
            self._part("publishing", means["publishing"] / step, "publishing-bound: {} of the step is publishing"),
            self._part("other", means["other"] / step, "bound by other work: {} of the step is in none of its phases"),
        ]
        dominating = [one for one in candidates if one.weight(known) >= one.needed]
        if dominating:
            return max(dominating, key=lambda one: one.weight(known))
        compute = sum(means[phase] for phase in _COMPUTE) / step
        healthy = self._part("compute", compute, "compute-bound: {} of the step computes")
        return healthy if healthy.weight(known) >= max(0.5, self._threshold) else None

    def _part(self, kind: str, share: float, text: str) -> Verdict:
        return Verdict(share, self._threshold, kind, text.format(f"{100 * share:.0f} %"))

    def _is_half_full(self, window: Sized) -> bool:
        return 2 * len(window) >= (self._samples.maxlen or 0)

    def _stragglers(self) -> Iterator[Verdict]:
        # In the windows of all hosts, if any.
        compared: list[LastArrival | None] = [*self._arrived] or [sample.last for sample in self._samples]
        found = find_straggler(compared, _STRAGGLES * len(compared))
        if found is None or not self._is_half_full(compared):
            return
        waits = f"the others wait {number_text(found.waited, SECONDS, 3)}"
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
                text += f"; it takes {number_text(longer, SECONDS, 3)} longer for {phase}"
        if (cause := find_cause(self._health[found.host], found.rank)) is not None:
            who, text = f"{who} with a cause", f"{text}; {one_line(cause)}"
        # A straggler costs all ranks time, so its threshold is lower.
        yield Verdict(found.costs(len(compared)), self._threshold / 3, f"straggler {who}", text)


def _report(state: Snapshot, resumed: int | None) -> Report | None:
    """Return the measurement of a batch that began at that time; ``None`` for an unmeasured batch."""
    phases = read_phases(state.fields.get("phases"))
    if phases is None:
        return None
    forward = phases.starts("forward")
    arrival = Arrival(forward[0] if forward else None, tuple(phases.starts("backward")), state.time_ns)
    # The GPU is behind the host: a finished batch of the host may take longer there.
    reached = max((span.start_ns + span.duration_ns for span in phases.spans), default=0)
    passed = state.time_ns - (phases.began_ns if resumed is None else resumed)
    # Training time stops in a pause; other loops may not report a batch's time.
    trained = 1000 * state.timestamp.values.batch_wct
    paused = passed - trained if trained and passed - trained > _PAUSE_NS else 0
    step = max(passed, reached) - paused
    return Report(step / 1e9, phases.split(step), arrival)


@dataclass
class _Evaluation:
    """Cost of evaluations, in nanoseconds, from the first rank's events."""

    began: int | None = None
    before: int = 0  # the batches before the last evaluation, or before the training began
    spent: int = 0
    batches: int = 0  # between the last two evaluations

    def end(self, time_ns: int, batch: int) -> None:
        if self.began is None:
            return
        spent, self.began = time_ns - self.began, None
        if batch > self.before:
            self.spent, self.batches, self.before = spent, batch - self.before, batch
        elif self.batches:
            self.spent += spent

    def seconds_per_batch(self, batch: int) -> float:
        """Return each batch's part of the last evaluation, which decreases while none follows."""
        return self.spent / 1e9 / max(self.batches, batch - self.before, 1)
