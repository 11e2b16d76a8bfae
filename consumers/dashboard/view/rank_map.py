"""All ranks of a run side by side, host by host: what a heat map shows, and who stands out."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from offloop.bus.printing import one_line
from offloop.bus.protocol.host_windows import ARRIVAL, GRADIENT_NORM, LOSS, MEMORY, PHASE, STEP, THROUGHPUT
from offloop.consumers.dashboard.view.progress import seconds_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats32 = NDArray[np.float32]

FEW_RANKS = 16
"""So many ranks of one host need no map: there is room for a line of each."""

_FIRST = (STEP, ARRIVAL, MEMORY, LOSS, THROUGHPUT, GRADIENT_NORM)
_MOST_NAMED = 3
_CALM_SHARE = 0.05
_CALM_ARRIVAL = 0.02
_SPREADS = 24.0


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
    host: str = ""
    """Its host; empty for a run on one host, which does not say it."""


class HostView(NamedTuple):
    """How a host is doing."""

    name: str
    """Empty for a run on one host."""
    ranks: tuple[int, ...]
    batch: int
    """How many batches each of its ranks has trained."""
    silent: float | None
    """For how many seconds nothing has come of it, where that is longer than usual."""


class Waiting(NamedTuple):
    """The rank that the others wait for."""

    cell: int
    seconds: float
    """How long, in each batch on average."""


class FirstNan(NamedTuple):
    """Where a quantity was not finite for the first time."""

    quantity: str
    batch: int
    rank: int
    host: str


class Range(NamedTuple):
    """What the colours of a heat map stand for."""

    low: float
    high: float
    """Values beyond it have the colour of its end."""


class RankMap:
    """The ranks at one moment. A cell is the number of a rank in the order of hosts, which are ordered by their ranks.

    Args:
        hosts: in order.
        world_size: the ranks of the run, of which some may not have been heard of.
        quantities: of each name the newest value of each cell, not a number where there is none. Names are those of
            :mod:`offloop.bus.protocol.host_windows`; :data:`~offloop.bus.protocol.host_windows.ARRIVAL` is in seconds
            after the first rank to arrive.
        batches: how many batches each cell has trained.
        last_shares: of a rank, see :attr:`RankView.last_share`; ``None`` where there is nothing to compare.
        late: the cells that had not ended a batch when the others had.
    """

    def __init__(
        self,
        hosts: Sequence[HostView],
        world_size: int,
        quantities: "Mapping[str, Floats32]",
        batches: Sequence[int],
        last_shares: Mapping[int, float] | None,
        late: Sequence[int] = (),
        first_nan: FirstNan | None = None,
        waiting: Waiting | None = None,
    ) -> None:
        self.hosts = tuple(hosts)
        self.world_size = world_size
        self.ranks = tuple(rank for host in hosts for rank in host.ranks)
        self.late = tuple(late)
        self.first_nan = first_nan
        self.waiting = waiting
        self._quantities = quantities
        self._batches = batches
        self._last_shares = last_shares
        self._host_of = [host for host in hosts for _ in host.ranks]
        self._furthest = max(batches, default=0)
        self._medians: dict[str, float] = {}
        self._ranges: dict[str, Range] = {}

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def has_hosts(self) -> bool:
        """Whether it is known on which host each rank is."""
        return any(host.name for host in self.hosts)

    @property
    def quantities(self) -> list[str]:
        """What is known of the ranks, in the order in which people look at it."""
        places = {name: place for place, name in enumerate(_FIRST)}
        return sorted(self._quantities, key=lambda name: (places.get(name, len(places)), name))

    @property
    def silent(self) -> list[HostView]:
        """The hosts of which nothing comes any more, those that are furthest behind first."""
        return sorted((host for host in self.hosts if host.silent is not None), key=lambda host: host.batch)

    def host_of(self, cell: int) -> HostView:
        """The host of a cell."""
        return self._host_of[cell]

    def values(self, quantity: str) -> "Floats32":
        """The newest value of each cell, not a number where there is none. Raises ``KeyError`` for an unknown name."""
        return self._quantities[quantity]

    def median(self, quantity: str) -> float:
        """Of the finite values of all ranks; not a number without any."""
        if quantity not in self._medians:
            import numpy as np

            values = self._quantities[quantity]
            finite = values[np.isfinite(values)]
            self._medians[quantity] = float(np.median(finite)) if len(finite) else math.nan
        return self._medians[quantity]

    def range(self, quantity: str) -> Range:
        """What colours stand for: from the least value to the greatest, but no further than what is far beyond the
        others' noise, and never so little that noise looks like a difference."""
        if quantity not in self._ranges:
            self._ranges[quantity] = self._range(quantity)
        return self._ranges[quantity]

    def _range(self, quantity: str) -> Range:
        import numpy as np

        values = self._quantities[quantity]
        finite = values[np.isfinite(values)].astype(np.float64)
        if not len(finite):
            return Range(0.0, 1.0)
        median = self.median(quantity)
        spread = float(np.median(np.abs(finite - median)))
        calm = _CALM_SHARE * abs(median)
        if quantity == ARRIVAL and STEP in self._quantities and math.isfinite(self.median(STEP)):
            calm = _CALM_ARRIVAL * abs(self.median(STEP))
        reach = max(_SPREADS * spread, calm) or 1.0
        low, high = max(float(finite.min()), median - reach), min(float(finite.max()), median + reach)
        return Range(low, max(high, low + calm) if high > low or calm else low + 1.0)

    def slowest(self, quantity: str, most: int) -> list[int]:
        """The cells with the greatest values, of throughput those with the least."""
        import numpy as np

        values = self._quantities[quantity]
        found = np.flatnonzero(np.isfinite(values))
        keys = values[found] if quantity == THROUGHPUT else -values[found]
        if len(found) > most:
            part = np.argpartition(keys, most - 1)[:most]
            found, keys = found[part], keys[part]
        return [int(cell) for cell in found[np.lexsort((found, keys))]]

    def name(self, cell: int) -> str:
        """A rank with its host, in words."""
        host = self._host_of[cell].name
        return f"rank {self.ranks[cell]}" + (f" on {one_line(host)}" if host else "")

    def facts(self) -> list[tuple[str, str]]:
        """What stands out, the most urgent first: of what kind it is (``nan``, ``silent``, ``waiting``, ``late``,
        ``unknown``), and a sentence."""
        found: list[tuple[str, str]] = []
        if self.first_nan is not None:
            quantity, batch, rank, host = self.first_nan
            what = f"{quantity_text(one_line(quantity))} first not finite at batch {batch:,}"
            found.append(("nan", f"{what}: rank {rank} on {one_line(host)}"))
        if self.silent:
            every = "every host is silent" if len(self.silent) == len(self.hosts) else "silent"
            named = [f"{one_line(host.name)} for {host.silent:.0f} s" for host in self.silent]
            found.append(("silent", f"{every}: {_some_of(named)}"))
        if self.waiting is not None:
            cell, seconds = self.waiting
            found.append(("waiting", f"the others wait for {self.name(cell)}: {seconds_text(seconds)} a batch"))
        if self.late:
            found.append(("late", f"behind the others: {_some_of([self.name(cell) for cell in self.late])}"))
        if len(self) < self.world_size:
            found.append(("unknown", f"{len(self):,} of {self.world_size:,} ranks have been heard of"))
        return found

    def row(self, cell: int) -> RankView:
        """How the rank in that cell is doing."""
        rank = self.ranks[cell]
        shares = self._last_shares
        return RankView(
            rank,
            self._batches[cell],
            self._known(STEP, cell),
            None if shares is None else shares.get(rank, 0.0),
            self._known(ARRIVAL, cell),
            self._furthest - self._batches[cell],
            self._host_of[cell].name,
        )

    def _known(self, quantity: str, cell: int) -> float | None:
        values = self._quantities.get(quantity)
        value = math.nan if values is None else float(values[cell])
        return value if math.isfinite(value) else None


def _some_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def usual_quantity(quantities: Sequence[str]) -> str:
    """What ranks are shown by unless somebody chooses: what tells those apart that train together, who all take the
    same time for a step."""
    return ARRIVAL if ARRIVAL in quantities else quantities[0]


def quantity_text(name: str) -> str:
    """What a quantity is called."""
    texts = {STEP: "step time", ARRIVAL: "arrival", GRADIENT_NORM: "gradient norm"}
    return texts.get(name, f"phase {name.removeprefix(PHASE)}" if name.startswith(PHASE) else name)
