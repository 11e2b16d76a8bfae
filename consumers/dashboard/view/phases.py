"""The parts of a step's time."""

from typing import NamedTuple

from offloop.bus.types import phases as measured
from offloop.bus.types.phases import BatchPhases
from offloop.consumers.api.optional import np
from offloop.consumers.dashboard.view.series import Floats, NumericTable

PHASES = (*measured.PHASES, "evaluation", "other")
"""The parts of a step, in their order; ``other`` is the time in none of them."""

_PLACES = {name: place for place, name in enumerate(PHASES)}
_EVALUATION = _PLACES["evaluation"]
_PUBLISHING = _PLACES["publishing"]


class PhaseView(NamedTuple):
    batches: Floats  # number of batches trained at the end of each; of several shown as one, the last
    seconds: "dict[str, Floats]"  # phase to the seconds in each of the batches; of several shown as one, the mean
    on_device: bool  # forward to optimizer were measured on the GPU

    def shares(self, last: int | None = None) -> dict[str, float]:
        """Share of each phase in the last rows; the sum is 1. Empty without rows."""
        sums = {name: float(one[-last:].sum() if last else one.sum()) for name, one in self.seconds.items()}
        total = sum(sums.values())
        return {name: one / total for name, one in sums.items()} if total > 0 else {}


class PublishingView(NamedTuple):
    """Cost of publishing in the training thread: medians of the last measured batches."""

    microseconds: float | None  # A batch; None before a measurement
    share: float | None  # share of a step's time, from 0 to 1


class RankPhases:
    """The phases of the measured batches of one rank. Beyond 262,144 rows it drops every second one."""

    MAX_ROWS = 1 << 18
    RECENT = 20

    def __init__(self) -> None:
        self._table = NumericTable(1 + len(PHASES))
        self.on_device: bool = False
        self._evaluation = 0.0
        self._last_batch: int | None = None

    def __len__(self) -> int:
        return len(self._table)

    def see(self, batch: int, ended_ns: int, phases: BatchPhases, trained_ns: int = 0) -> None:
        """Add the phases of a batch; ``trained_ns`` is its duration without pauses, 0 if unknown."""
        passed_ns = ended_ns - phases.began_ns
        seconds = phases.split(min(passed_ns, trained_ns) if trained_ns else passed_ns)
        if self._last_batch is not None:
            seconds["evaluation"] = self._evaluation / max(batch - self._last_batch, 1)
        self._evaluation, self._last_batch = 0.0, batch
        self.on_device = phases.on_device
        row = [batch, *(seconds.get(name, 0.0) for name in PHASES)]
        for append, number in zip(self._table.appends, row, strict=True):
            append(number)
        self._table.limit(self.MAX_ROWS)

    def refine(self, other: "RankPhases") -> None:
        rows = other._table.rows()
        if len(rows):
            self._table.replace_part(rows)

    def add_evaluation(self, seconds: float) -> None:
        """Add the time of an evaluation, for the next measured batch.

        Only some batches are measured, but every evaluation: the time is divided by the batches since the last one."""
        self._evaluation += seconds

    def view(self, width: int | None = None) -> PhaseView:
        """Return all rows; or at most ``width``, each the mean of several."""
        rows = self._table.rows()
        if width is not None and len(rows) > width:
            starts = np.unique(np.linspace(0, len(rows), width, endpoint=False).astype(np.intp))
            counts = np.diff(starts, append=len(rows))
            means = np.add.reduceat(rows, starts, axis=0) / counts[:, None]
            means[:, 0] = rows[starts + counts - 1, 0]
            rows = means
        return PhaseView(
            rows[:, 0].copy(), {name: rows[:, 1 + place].copy() for name, place in _PLACES.items()}, self.on_device
        )

    def publishing(self) -> PublishingView:
        rows = self._table.rows()[-self.RECENT :, 1:]
        if not len(rows):
            return PublishingView(None, None)
        spent, step = rows[:, _PUBLISHING], rows.sum(axis=1) - rows[:, _EVALUATION]
        # Medians: a thread that is not scheduled for a while loses time in any phase, which a mean would show.
        share = float(np.median(spent / step)) if (step > 0).all() else None
        return PublishingView(float(np.median(spent)) * 1e6, share)
