"""All ranks of a run side by side, host by host: the values of a heat map, and the ranks that stand out."""

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
"""As many ranks of one host need no map: there is room for a line of each."""

_FIRST = (STEP, ARRIVAL, MEMORY, LOSS, THROUGHPUT, GRADIENT_NORM)
_MOST_NAMED = 3
_CALM_SHARE = 0.05
_CALM_ARRIVAL = 0.02
_SPREADS = 24.0


class RankView(NamedTuple):
    """The state of a rank."""

    rank: int
    batch: int
    """Batches it has trained."""
    seconds_per_batch: float | None
    last_share: float | None
    """Share of the last windows of batches in which it was the last to arrive, from 0 to 1; ``None`` where there are
    too few to compare."""
    late: float | None
    """Seconds after the first rank to arrive, on average."""
    behind: int
    """Batches behind the rank that is the furthest."""
    host: str = ""
    """Empty for a run on one host, which does not say it."""


class HostView(NamedTuple):
    """The state of a host."""

    name: str
    """Empty for a run on one host."""
    ranks: tuple[int, ...]
    batch: int
    """Batches that each of its ranks has trained."""
    silent: float | None
    """Seconds since its last window, where those are more than usual."""


class Waiting(NamedTuple):
    """The rank that the others wait for."""

    cell: int
    seconds: float
    """In each batch on average."""


class FirstNan(NamedTuple):
    """The first value of a quantity that was not finite."""

    quantity: str
    batch: int
    rank: int
    host: str


class Range(NamedTuple):
    """The values at the ends of the colours of a heat map; values beyond have the colour of the end."""

    low: float
    high: float


class RankMap:
    """The ranks at one moment. A cell is the number of a rank in the order of hosts, which are ordered by their ranks.

    Args:
        hosts: in order.
        world_size: the ranks of the run, of which some may not have been heard of.
        quantities: the newest value of each cell by the names of :mod:`offloop.bus.protocol.host_windows`, NaN where
            there is none; :data:`~offloop.bus.protocol.host_windows.ARRIVAL` in seconds after the first rank to arrive.
        batches: the batches that each cell has trained.
        last_shares: by rank, see :attr:`RankView.last_share`; ``None`` where there is nothing to compare.
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
        """The known quantities, the most important first."""
        places = {name: place for place, name in enumerate(_FIRST)}
        return sorted(self._quantities, key=lambda name: (places.get(name, len(places)), name))

    @property
    def silent(self) -> list[HostView]:
        """The silent hosts, those that are furthest behind first."""
        return sorted((host for host in self.hosts if host.silent is not None), key=lambda host: host.batch)

    def host_of(self, cell: int) -> HostView:
        """The host of a cell."""
        return self._host_of[cell]

    def values(self, quantity: str) -> "Floats32":
        """The newest value of each cell, NaN where there is none. Raises ``KeyError`` for an unknown name."""
        return self._quantities[quantity]

    def _finite(self, quantity: str) -> "Floats32":
        import numpy as np

        values = self._quantities[quantity]
        return values[np.isfinite(values)]

    def median(self, quantity: str) -> float:
        """The median of the finite values; NaN without any."""
        if quantity not in self._medians:
            import numpy as np

            finite = self._finite(quantity)
            self._medians[quantity] = float(np.median(finite)) if len(finite) else math.nan
        return self._medians[quantity]

    def range(self, quantity: str) -> Range:
        """From the least value to the greatest, but no further than what is far beyond the others' noise, and never so
        little that noise looks like a difference."""
        if quantity not in self._ranges:
            self._ranges[quantity] = self._range(quantity)
        return self._ranges[quantity]

    def _range(self, quantity: str) -> Range:
        import numpy as np

        finite = self._finite(quantity).astype(np.float64)
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
        return [int(cell) for cell in found[np.lexsort((found, keys))][:most]]

    def name(self, cell: int) -> str:
        """A rank with its host, in words."""
        host = self._host_of[cell].name
        return f"rank {self.ranks[cell]}" + (f" on {one_line(host)}" if host else "")

    def facts(self) -> list[tuple[str, str]]:
        """The kind (``nan``, ``silent``, ``waiting``, ``late``, ``unknown``) and a sentence for everything that stands
        out, the most urgent first."""
        found: list[tuple[str, str]] = []
        if self.first_nan is not None:
            quantity, batch, rank, host = self.first_nan
            where = f"rank {rank}" + (f" on {one_line(host)}" if host else "")
            found.append(("nan", f"{quantity_text(one_line(quantity))} first not finite at batch {batch:,}: {where}"))
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
        """The state of the rank in that cell."""
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
    """The default quantity: the arrival, because ranks that train together all take the same time for a step."""
    return ARRIVAL if ARRIVAL in quantities else quantities[0]


def quantity_text(name: str) -> str:
    """The label of a quantity."""
    texts = {STEP: "step time", ARRIVAL: "arrival", GRADIENT_NORM: "gradient norm"}
    return texts.get(name, f"phase {name.removeprefix(PHASE)}" if name.startswith(PHASE) else name)
