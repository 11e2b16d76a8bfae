"""The ranks of a training side by side, and which of them the others wait for."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from bus.trace.phases import BatchPhases


class RankView(NamedTuple):
    """How a rank is doing."""

    rank: int
    batch: int
    """How many batches it has trained."""
    seconds_per_batch: float | None
    """Over its last batches; ``None`` before there are two."""
    last_share: float | None
    """In which part of the batches that were measured last it was the last to arrive, from 0 to 1; ``None`` where there
    are too few to compare."""
    late: float | None
    """How many seconds after the first rank to arrive it arrives, on average."""
    behind: int
    """How many batches it is behind the rank that is the furthest."""


class Ranks:
    """Follows every rank. Ranks that train together end a batch together, however long each has worked on it, so what
    tells them apart is when each arrives at the first backward pass, where they begin to exchange gradients. That is
    compared by how long before the end of the batch it was: their clocks need not agree."""

    RECENT = 20
    WAITING = 64
    COMPARED = 50
    LEAST_COMPARED = 10

    def __init__(self) -> None:
        self._ends: dict[int, deque[tuple[int, int]]] = {}
        self._waiting: dict[int, dict[int, int]] = {}
        # Of each of the last batches: which rank came last, and how late each was.
        self._compared: deque[tuple[int, dict[int, int]]] = deque(maxlen=self.COMPARED)

    def batch_end(self, rank: int, batch: int, time_ns: int) -> None:
        """Takes the end of a batch."""
        ends = self._ends.get(rank)
        if ends is None:
            ends = self._ends[rank] = deque(maxlen=self.RECENT + 1)
        ends.append((batch, time_ns))

    def arrived(self, rank: int, batch: int, world_size: int, ended_ns: int, phases: BatchPhases) -> None:
        """Takes the phases of a batch."""
        starts = phases.starts("backward")
        if not starts or world_size < 2:
            return
        together = self._waiting.setdefault(batch, {})
        together[rank] = starts[0] - ended_ns
        if len(together) == world_size:
            first = min(together.values())
            late = {rank: at - first for rank, at in self._waiting.pop(batch).items()}
            self._compared.append((max(late, key=late.__getitem__), late))
        while len(self._waiting) > self.WAITING:
            del self._waiting[next(iter(self._waiting))]

    def view(self) -> list[RankView]:
        """Every rank that was heard of."""
        furthest = max((ends[-1][0] for ends in self._ends.values()), default=0)
        came_last = Counter(last for last, _ in self._compared)
        compared = len(self._compared) if len(self._compared) >= self.LEAST_COMPARED else 0
        views = []
        for rank in sorted(self._ends):
            ends = self._ends[rank]
            (batch, time), (first, began) = ends[-1], ends[0]
            late_ns = sum(late.get(rank, 0) for _, late in self._compared)
            views.append(
                RankView(
                    rank,
                    batch,
                    (time - began) / 1e9 / (batch - first) if batch > first else None,
                    came_last[rank] / compared if compared else None,
                    late_ns / compared / 1e9 if compared else None,
                    furthest - batch,
                )
            )
        return views


def straggler(ranks: Sequence[RankView]) -> RankView | None:
    """The rank that the others wait for: it arrives last three times as often as it would by chance, but at least in
    one of four batches, or in three of four. ``None`` when none does."""
    often = min(max(3 / max(len(ranks), 1), 0.25), 0.75)
    slow = [one for one in ranks if one.last_share is not None and one.last_share >= often]
    return max(slow, key=lambda one: one.last_share or 0.0) if len(ranks) > 1 and slow else None
