"""The ranks of a run side by side, host by host: their values, the slowest rank, and silent hosts."""

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from offloop.bus.hosts.windows import HostWindows
from offloop.bus.printing import one_line
from offloop.bus.protocol.host_windows import ARRIVAL, GRADIENT_NORM, LOSS, MEMORY, PHASE, STEP, THROUGHPUT, HostWindow
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.health import Health, find_cause, recent_health
from offloop.bus.types.units import SECONDS, number_text
from offloop.consumers.api.optional import np
from offloop.consumers.callbacks.arrivals import HostArrivals, LastArrival, find_straggler

Floats32: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"
FEW_RANKS = 16  # up to this number, the ranks of one host are lines instead of a map

_FIRST = (STEP, ARRIVAL, MEMORY, LOSS, THROUGHPUT, GRADIENT_NORM)
_MOST_NAMED = 3
_CALM_SHARE = 0.05
_CALM_ARRIVAL = 0.02
_SPREADS = 24.0
_MOST_RANKS = 1 << 17
_SILENT_WINDOWS = 4
_LEAST_SILENT = 5.0
_COMPARED = 20
_LEAST_COMPARED = 5
_OFTEN = 0.5
_WAITED_SHARE = 0.05


class RankView(NamedTuple):
    rank: int
    batch: int
    seconds_per_batch: float | None
    last_share: float | None
    """Share of the last windows of batches in which it arrived last, from 0 to 1; ``None`` for too few windows."""
    late: float | None  # mean seconds after the first rank to arrive
    behind: int  # batches behind the rank with the most
    host: str = ""  # empty for a run on one host


class HostView(NamedTuple):
    name: str  # empty for a run on one host
    ranks: tuple[int, ...]
    batch: int  # batches trained by each of its ranks
    silent: float | None  # seconds since its last window, where those are more than usual


class Waiting(NamedTuple):
    cell: int
    seconds: float  # mean of a batch
    cause: str | None = None  # what slows it down, if its host's health shows it


class FirstNan(NamedTuple):
    quantity: str
    batch: int
    rank: int
    host: str


class RankMap:
    """The ranks at one moment. A cell is the number of a rank in the order of hosts, which are ordered by their ranks.

    Args:
        windows: the newest of each host, in order.
        silent: seconds since the last window of each host, where those are more than usual.
        compared: the last rank to arrive in each of the last windows of batches.
        first_nan: the first value that was not finite.
        health: the last measurements of each host.
    """

    def __init__(
        self,
        windows: Sequence[HostWindow] = (),
        silent: Sequence[float | None] = (),
        compared: Sequence[LastArrival] = (),
        first_nan: FirstNan | None = None,
        health: Mapping[str, Sequence[Health]] = {},
    ) -> None:
        self.hosts: tuple[HostView, ...] = tuple(
            HostView(one.host, one.ranks, one.last, seconds) for one, seconds in zip(windows, silent, strict=True)
        )
        self.world_size: int = max((one.world_size for one in windows), default=0)
        """The ranks of the run, of which some may be unknown."""
        self.ranks: tuple[int, ...] = tuple(rank for one in windows for rank in one.ranks)
        behind = {rank for one in windows for rank in one.late}
        self.late: tuple[int, ...] = tuple(cell for cell, rank in enumerate(self.ranks) if rank in behind)
        """The cells that had not ended a batch when the others had."""
        self.first_nan = first_nan
        self._windows = windows
        self._batches = [batch for one in windows for batch in one.batches]
        self._host_of = [host for host in self.hosts for _ in host.ranks]
        self._furthest = max(self._batches, default=0)
        self._values: dict[str, Floats32] = {}
        self._last_shares: dict[int, float] | None = None
        self.waiting: Waiting | None = None
        if len(compared) >= _LEAST_COMPARED:
            counts = Counter(one.rank for one in compared)
            self._last_shares = {rank: count / len(compared) for rank, count in counts.items()}
            slow = find_straggler(compared, _OFTEN * len(compared))
            if slow is not None and slow.waited > _WAITED_SHARE * slow.step and slow.rank in self.ranks:
                cause = find_cause(health.get(slow.host, ()), slow.rank)
                self.waiting = Waiting(self.ranks.index(slow.rank), slow.waited, cause)

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def has_hosts(self) -> bool:
        return any(host.name for host in self.hosts)

    @property
    def quantities(self) -> list[str]:
        places = {name: place for place, name in enumerate(_FIRST)}
        known = {name for one in self._windows for name in one.quantities}
        return sorted(known, key=lambda name: (places.get(name, len(places)), name))

    @property
    def silent(self) -> list[HostView]:
        return sorted((host for host in self.hosts if host.silent is not None), key=lambda host: host.batch)

    def values(self, quantity: str) -> Floats32:
        if quantity not in self._values:
            values: list[float] = []
            for window in self._windows:
                known = window.quantities.get(quantity)
                values += [math.nan] * len(window.ranks) if known is None else known.ranks
            with np.errstate(over="ignore"):
                found = np.array(values, np.float32)
            finite = found[np.isfinite(found)]
            self._values[quantity] = found - finite.min() if quantity == ARRIVAL and len(finite) else found
        return self._values[quantity]

    def _finite(self, quantity: str) -> Floats32:
        values = self.values(quantity)
        return values[np.isfinite(values)]

    def median(self, quantity: str) -> float:
        finite = self._finite(quantity)
        return float(np.median(finite)) if len(finite) else math.nan

    def range(self, quantity: str) -> tuple[float, float]:
        """Return the values at the ends of the colours of a heat map.

        From the least to the greatest, without outliers far beyond the others' noise, and wide enough that noise does
        not look like a difference."""
        finite = self._finite(quantity).astype(np.float64)
        if not len(finite):
            return 0.0, 1.0
        median = self.median(quantity)
        spread = float(np.median(np.abs(finite - median)))
        calm = _CALM_SHARE * abs(median)
        if quantity == ARRIVAL and math.isfinite(step := self.median(STEP)):
            calm = _CALM_ARRIVAL * abs(step)
        reach = max(_SPREADS * spread, calm) or 1.0
        low, high = max(float(finite.min()), median - reach), min(float(finite.max()), median + reach)
        return low, max(high, low + calm) if high > low or calm else low + 1.0

    def slowest(self, quantity: str, most: int) -> list[int]:
        values = self.values(quantity)
        found = np.flatnonzero(np.isfinite(values))
        keys = values[found] if quantity == THROUGHPUT else -values[found]
        return [int(cell) for cell in found[np.lexsort((found, keys))][:most]]

    def name(self, cell: int) -> str:
        host = self._host_of[cell].name
        return f"rank {self.ranks[cell]}" + (f" on {one_line(host)}" if host else "")

    def facts(self) -> list[tuple[str, str]]:
        """Kind (``nan``, ``silent``, ``waiting``, ``late``, ``unknown``) and text of each fact, urgent ones first."""
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
            cell, seconds, cause = self.waiting
            waits = f"the others wait for {self.name(cell)}: {number_text(seconds, SECONDS, 3)} a batch"
            found.append(("waiting", waits if cause is None else f"{waits}; {one_line(cause)}"))
        if self.late:
            found.append(("late", f"behind the others: {_some_of([self.name(cell) for cell in self.late])}"))
        if len(self) < self.world_size:
            found.append(("unknown", f"{len(self):,} of {self.world_size:,} ranks are known"))
        return found

    def row(self, cell: int) -> RankView:
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
        value = float(self.values(quantity)[cell])
        return value if math.isfinite(value) else None


def _some_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def usual_quantity(quantities: Sequence[str]) -> str:
    """Return the default quantity: the arrival, because ranks that train together have equal step times."""
    return ARRIVAL if ARRIVAL in quantities else quantities[0]


def quantity_text(name: str) -> str:
    texts = {STEP: "step time", ARRIVAL: "arrival", GRADIENT_NORM: "gradient norm"}
    return texts.get(name, f"phase {name.removeprefix(PHASE)}" if name.startswith(PHASE) else name)


class RankTiming:
    """Follows every rank by the windows of its host; without windows they are made of the ends of batches."""

    def __init__(self) -> None:
        self.batches: dict[int, int] = {}  # trained batches of each rank with events
        self._of_events: HostWindows | None = None
        self._hosts: dict[str, _Host] = {}
        self._ordered: list[_Host] = []
        self._taken = 0
        self._count = 0
        self._first_nan: FirstNan | None = None
        self._arrivals = HostArrivals()
        self._compared: deque[LastArrival] = deque(maxlen=_COMPARED)
        self._health = recent_health()
        self._made: tuple[object, RankMap] | None = None

    def batch_end(self, snapshot: Snapshot) -> None:
        rank, batch = snapshot.rank, snapshot._body.timestamp.batch
        if batch <= self.batches.get(rank, 0):
            self._of_events = None  # the count has restarted from zero
        self.batches[rank] = batch
        if len(self.batches) > 1 and self._hosts.keys() <= {""}:
            if self._of_events is None:
                self._of_events = HostWindows("", 1, (), 0, 0)
            self.add_windows(self._of_events.take(snapshot))

    def add_windows(self, windows: Iterable[HostWindow], now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        for window in windows:
            self._taken += 1
            host = self._hosts.get(window.host)
            before = None if host is None else host.window.ranks
            count = self._count + len(window.ranks) - len(before or ())
            if count > _MOST_RANKS:
                continue
            if host is None:
                host = self._hosts[window.host] = _Host(window, now)
            elif window.last <= host.window.last and window.time_ns <= host.window.time_ns:
                # Windows after a restart count from zero again.
                continue
            host.window, host.heard = window, now
            if window.health is not None:
                self._health[window.host].append(window.health)
            if window.ranks != before:
                self._count = count
                self._ordered = sorted(self._hosts.values(), key=lambda one: (one.window.ranks, one.window.host))
            for name, quantity in window.quantities.items():
                if quantity.first_nan is not None:
                    batch, rank = quantity.first_nan
                    if self._first_nan is None or batch < self._first_nan.batch:
                        self._first_nan = FirstNan(name, batch, rank, window.host)
            self._compared.extend(self._arrivals.add((window,)))

    def add_health(self, health: Health) -> None:
        """Add a measurement of the host, in a run on one host."""
        self._taken += 1
        self._health[""].append(health)

    @property
    def count(self) -> int:
        return self._count or len(self.batches)

    def map(self, is_live: bool = False, now: float | None = None) -> RankMap:
        now = (time.monotonic() if now is None else now) if is_live else None
        # Several browsers share one map; silence is measured in seconds.
        key = self._taken, None if now is None else int(now)
        if self._made is None or self._made[0] != key:
            windows, silent = [host.window for host in self._ordered], [host.silent(now) for host in self._ordered]
            self._made = key, RankMap(windows, silent, self._compared, self._first_nan, self._health)
        return self._made[1]


@dataclass
class _Host:
    window: HostWindow
    heard: float

    def silent(self, now: float | None) -> float | None:
        """Seconds since its last window, where those are more than usual."""
        seconds = 0.0 if now is None or not self.window.host else now - self.heard
        return seconds if seconds >= max(_LEAST_SILENT, _SILENT_WINDOWS * self.window.seconds) else None
