"""Where the time of a step goes, and who is waited for."""

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.bus.types.phases import read_phases
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger
from offloop.consumers.callbacks.phases.arrivals import Arrival, HostArrivals, LastArrival
from offloop.consumers.callbacks.phases.together import Together
from offloop.consumers.callbacks.phases.window import PhaseWindow, Report, sample_of

_NAME = "time/phase"
_UNSETTLED = 32
# Less than that is how far apart the ranks are, of which the first one tells the training time.
_PAUSE_NS = 50_000_000


class Phases(Callback):
    """Where the time of a step goes, and a verdict in words when something dominates.

    Of every so many batches it logs ``time/phase/data`` (waiting for data), ``forward``, ``loss``, ``backward``,
    ``optimizer``, ``publishing`` and ``other`` (what is in none of them), in seconds per batch, as the mean over the
    last ``window`` batches that were measured and over all ranks; microbatches are added up. ``time/phase/evaluation``
    is what a batch costs in evaluations: the time of the last one, divided by the batches since the one before. On a
    GPU the phases are those of the GPU, not of the host.

    ``time/phase/verdict`` is a text, logged as a metric and as a text, and only when it becomes another one:
    ``input-bound: 63 % of the step waits for data``, ``evaluation-bound``, ``publishing-bound``, ``bound by other
    work``, ``compute-bound``, or, with several ranks, ``straggling rank 2: arrived last in 9 of 10 batches, the others
    wait 12 ms``. A straggler is found by who arrives last where the ranks meet, whatever their clocks say.

    Of a run on several hosts, read with ``--stream``, it is sought over all of them, in the last ``window`` windows
    that the hosts send about once a second: ``straggling host node17, rank 139: arrives last, the others wait 40 ms``;
    ``straggling host node17`` alone where its ranks take turns. All else is about the ranks of the first host. A
    recording has nothing of other hosts: a replay of it names the stragglers of that host.

    Args:
        every: which batches are measured: each 10th, or an interval such as ``1ep``.
        window: over how many of those the means go; a verdict takes half of them.
        threshold: which share of the time makes something dominate; of a straggler, a third of it.
    """

    all_ranks = True
    resumes = False
    fields = ("phases",)

    def __init__(self, every: int | str = 10, window: int = 10, threshold: float = 0.3) -> None:
        if window < 1:
            raise ConfigurationError(f"window counts batches and is at least 1, not {window}")
        if not 0 < threshold < 1:
            raise ConfigurationError(f"threshold is {threshold}: it is a share of the time, use one between 0 and 1")
        self.every = every  # type: ignore[misc]
        self._window = PhaseWindow(window, threshold)
        self._verdict: str | None = None
        self._reports: Together[Report] = Together(_UNSETTLED)
        # When the batch at hand began on each rank.
        self._resumed: dict[int, int] = {}
        self._evaluation = _Evaluation()
        self._arrivals = HostArrivals()
        self._arrived: deque[LastArrival] = deque(maxlen=window)
        self._has_hosts = False

    def demand(self) -> Demand:
        others = (Event.FIT_START, Event.EVAL_BEFORE_ALL, Event.EVAL_AFTER_ALL)
        return Demand({Event.BATCH_END: EventDemand(1, {"phases": self.every}), **dict.fromkeys(others, EventDemand())})

    def state_dict(self) -> dict[str, Any]:
        return {
            "window": self._window.state_dict(),
            "verdict": self._verdict,
            "reports": self._reports.state_dict(),
            "resumed": [list(one) for one in self._resumed.items()],
            "evaluation": asdict(self._evaluation),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._window.load_state_dict(state["window"])
        self._verdict = state["verdict"]
        self._reports.load_state_dict(state["reports"], Report)
        self._resumed = dict(state["resumed"])
        self._evaluation = _Evaluation(**state["evaluation"])

    def host_windows(self, windows: Sequence[HostWindow], logger: Logger) -> None:
        self._has_hosts = True
        self._arrived.extend(self._arrivals.add(one for one in windows if len(one.ranks) < one.world_size))

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
            self._window.add(sample_of(reports))
            evaluation = self._evaluation.seconds_per_batch(batch)
            means = {**self._window.means(), "evaluation": evaluation}
            logger.log_metrics({f"{_NAME}/{part}": seconds for part, seconds in means.items()}, batch)
            verdict = self._window.verdict(evaluation, self._verdict, self._arrived)
            kind = None if verdict is None else verdict.kind
            if kind != self._verdict:
                self._verdict = kind
                text = "balanced: nothing dominates any more" if verdict is None else verdict.text
                logger.log_metrics({f"{_NAME}/verdict": text}, batch)
                logger.log_text(text, f"{_NAME}/verdict", batch)


def _report(state: Snapshot, resumed: int | None) -> Report | None:
    """The measurement of a batch that began at that time; ``None`` for a batch that was not measured."""
    phases = read_phases(state.fields.get("phases"))
    if phases is None:
        return None
    forward = phases.starts("forward")
    arrival = Arrival(forward[0] if forward else None, tuple(phases.starts("backward")), state.time_ns)
    # The GPU is behind the host: a batch that the host is through with may take longer there.
    reached = max((span.start_ns + span.duration_ns for span in phases.spans), default=0)
    passed = state.time_ns - (phases.began_ns if resumed is None else resumed)
    # Training time stands still in a pause; other loops may not tell how much of it a batch took.
    trained = 1000 * state.timestamp.values.batch_wct
    paused = passed - trained if trained and passed - trained > _PAUSE_NS else 0
    step = max(passed, reached) - paused
    return Report(step / 1e9, phases.split(step), arrival)


@dataclass
class _Evaluation:
    """The cost of evaluations, from the first rank's events."""

    began: int | None = None
    before: int = 0
    """The batches before the last evaluation, or before the training began."""
    spent: int = 0
    batches: int = 0
    """Between the last two evaluations."""

    def end(self, time_ns: int, batch: int) -> None:
        """Add an evaluation; several after the same batch count together."""
        if self.began is None:
            return
        spent, self.began = time_ns - self.began, None
        if batch > self.before:
            self.spent, self.batches, self.before = spent, batch - self.before, batch
        elif self.batches:
            self.spent += spent

    def seconds_per_batch(self, batch: int) -> float:
        """Each batch's part of the last evaluation; less when none has come for longer than before."""
        return self.spent / 1e9 / max(self.batches, batch - self.before, 1)
