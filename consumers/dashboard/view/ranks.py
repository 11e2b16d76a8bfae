"""The ranks of a training side by side, and which of them the others wait for."""

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from offloop.bus.protocol.host_windows import ARRIVAL, PHASE, STEP, HostWindow, Quantity
from offloop.bus.trace.phases import BatchPhases
from offloop.consumers.callbacks.phases.hosts import HostArrivals, LastArrival
from offloop.consumers.dashboard.view.rank_map import FirstNan, HostView, RankMap, RankView, Waiting

if TYPE_CHECKING:
    from offloop.consumers.dashboard.view.rank_map import Floats32

_MOST_RANKS = 1 << 17
_SILENT_WINDOWS = 4
_LEAST_SILENT = 5.0


class RankTracker:
    """Follows every rank. Ranks that train together end a batch together, however long each has worked on it, so what
    tells them apart is when each arrives at the first backward pass, where they begin to exchange gradients. That is
    compared by how long before the end of the batch it was: their clocks need not agree.

    Of a run on several hosts it takes what each host says of its ranks about once a second, and no more of events."""

    RECENT = 20
    WAITING = 64
    COMPARED = 50
    LEAST_COMPARED = 10

    def __init__(self) -> None:
        self._ends: dict[int, deque[tuple[int, int]]] = {}
        self._waiting: dict[int, dict[int, int]] = {}
        # Of each of the last batches: which rank came last, and how late each was.
        self._compared: deque[tuple[int, dict[int, int]]] = deque(maxlen=self.COMPARED)
        self._phases: dict[int, dict[str, int]] = {}
        self._hosts = _Hosts()
        self._made: tuple[object, RankMap] | None = None

    def batch_end(self, rank: int, batch: int, time_ns: int) -> None:
        """Takes the end of a batch."""
        ends = self._ends.get(rank)
        if ends is None:
            ends = self._ends[rank] = deque(maxlen=self.RECENT + 1)
        ends.append((batch, time_ns))

    def arrived(self, rank: int, batch: int, world_size: int, ended_ns: int, phases: BatchPhases) -> None:
        """Takes the phases of a batch."""
        self._phases[rank] = phases.totals()
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

    def take_windows(self, windows: Iterable[HostWindow], now: float | None = None) -> None:
        """Takes what hosts say of their ranks, in order; ``now`` is the time of this process's monotonic clock."""
        self._hosts.take(windows, time.monotonic() if now is None else now)

    @property
    def count(self) -> int:
        """How many there are."""
        return self._hosts.count or len(self._ends)

    def map(self, is_live: bool = False, now: float | None = None) -> RankMap:
        """All ranks side by side: of all hosts where they have said something, else those whose events have come. Of a
        run that ``is_live`` with the hosts that say nothing any more."""
        if not self._hosts:
            return self._map_of_events()
        now = (time.monotonic() if now is None else now) if is_live else None
        # Several browsers look at the same one; silence is measured in seconds.
        key = self._hosts.taken, None if now is None else int(now)
        if self._made is None or self._made[0] != key:
            self._made = key, self._hosts.map(now)
        return self._made[1]

    def _map_of_events(self) -> RankMap:
        import numpy as np

        views = self.view()
        columns: dict[str, list[float | None]] = {
            STEP: [one.seconds_per_batch for one in views],
            ARRIVAL: [one.late for one in views],
        }
        totals = [self._phases.get(one.rank, {}) for one in views]
        for phase in sorted({phase for of_rank in totals for phase in of_rank}):
            columns[PHASE + phase] = [of_rank[phase] / 1e9 if phase in of_rank else None for of_rank in totals]
        quantities: dict[str, Floats32] = {
            name: np.array([math.nan if one is None else one for one in values], np.float32)
            for name, values in columns.items()
            if any(one is not None for one in values)
        }
        shares = {one.rank: one.last_share for one in views if one.last_share is not None}
        slow = straggler(views)
        waiting = None if slow is None else Waiting(views.index(slow), _waited(views, slow))
        ranks = tuple(one.rank for one in views)
        batches = [one.batch for one in views]
        hosts = [HostView("", ranks, max(batches, default=0), None)]
        return RankMap(hosts, len(views), quantities, batches, shares or None, waiting=waiting)

    def view(self) -> list[RankView]:
        """Every rank whose events have come."""
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


def _waited(ranks: Sequence[RankView], slow: RankView) -> float:
    others = [one.late for one in ranks if one is not slow and one.late is not None]
    return (slow.late or 0.0) - math.fsum(others) / max(len(others), 1)


class _Host:
    """What a host has said of its ranks."""

    def __init__(self, window: HostWindow) -> None:
        self.window = window
        self.heard = 0.0


class _Hosts:
    """What all hosts have said of their ranks."""

    COMPARED = 20
    LEAST_COMPARED = 5
    WAITED_SHARE = 0.05

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}
        self._ordered: list[_Host] = []
        self.taken = 0
        """How many windows have come."""
        self.count = 0
        self._first_nan: FirstNan | None = None
        self._arrivals = HostArrivals()
        self._compared: deque[LastArrival] = deque(maxlen=self.COMPARED)

    def __bool__(self) -> bool:
        return bool(self._hosts)

    def take(self, windows: Iterable[HostWindow], now: float) -> None:
        for window in windows:
            self.taken += 1
            host = self._hosts.get(window.host)
            before = None if host is None else host.window.ranks
            count = self.count + len(window.ranks) - len(before or ())
            if count > _MOST_RANKS:
                continue
            if host is None:
                host = self._hosts[window.host] = _Host(window)
            elif window.last <= host.window.last and window.time_ns <= host.window.time_ns:
                # Later ones count from zero again.
                continue
            host.window, host.heard = window, now
            if window.ranks != before:
                self.count = count
                self._ordered = sorted(self._hosts.values(), key=lambda one: (one.window.ranks, one.window.host))
            for name, quantity in window.quantities.items():
                if quantity.first_nan is not None:
                    self._note_nan(name, quantity, window.host)
            self._compared.extend(self._arrivals.add((window,)))

    def map(self, now: float | None) -> RankMap:
        """The hosts that have been silent at that time, of this process's monotonic clock, are marked."""
        windows = [host.window for host in self._ordered]
        hosts, late = [], []
        batches: list[int] = []
        for host in self._ordered:
            window = host.window
            silent = None if now is None else now - host.heard
            if silent is not None and silent < max(_LEAST_SILENT, _SILENT_WINDOWS * window.seconds):
                silent = None
            hosts.append(HostView(window.host, window.ranks, window.last, silent))
            if window.late:
                behind = set(window.late)
                late += [len(batches) + place for place, rank in enumerate(window.ranks) if rank in behind]
            batches += window.batches
        compared = len(self._compared)
        shares = {rank: count / compared for rank, count in Counter(one.rank for one in self._compared).items()}
        is_enough = compared >= self.LEAST_COMPARED
        world_size = max(window.world_size for window in windows)
        return RankMap(
            *(hosts, world_size, _Newest(windows), batches, shares if is_enough else None, late, self._first_nan),
            waiting=self._waiting(shares) if is_enough else None,
        )

    def _waiting(self, shares: dict[int, float]) -> Waiting | None:
        """The rank that is the last one most often, where that costs the others something."""
        rank = max(shares, key=lambda one: (shares[one], -one))
        late = [one for one in self._compared if one.rank == rank]
        waited = math.fsum(one.waited for one in late) / len(late)
        step = late[-1].step
        if shares[rank] < 0.5 or not waited > self.WAITED_SHARE * step:
            return None
        cells = (rank for host in self._ordered for rank in host.window.ranks)
        return next((Waiting(cell, waited) for cell, known in enumerate(cells) if known == rank), None)

    def _note_nan(self, name: str, quantity: Quantity, host: str) -> None:
        assert quantity.first_nan is not None
        batch, rank = quantity.first_nan
        if self._first_nan is None or batch < self._first_nan.batch:
            self._first_nan = FirstNan(name, batch, rank, host)


class _Newest(Mapping[str, "Floats32"]):
    """The newest values of each quantity, gathered when they are asked for."""

    def __init__(self, windows: Sequence[HostWindow]) -> None:
        self._windows = windows
        self._names = dict.fromkeys(name for window in windows for name in window.quantities)
        self._found: dict[str, Floats32] = {}

    def __getitem__(self, name: str) -> "Floats32":
        import numpy as np

        if name not in self._names:
            raise KeyError(name)
        if name not in self._found:
            values: list[float] = []
            for window in self._windows:
                quantity = window.quantities.get(name)
                values += [math.nan] * len(window.ranks) if quantity is None else quantity.ranks
            with np.errstate(over="ignore"):
                found = np.array(values, np.float32)
            finite = found[np.isfinite(found)]
            self._found[name] = found - finite.min() if name == ARRIVAL and len(finite) else found
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
