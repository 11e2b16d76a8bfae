"""The timing of the ranks of a run: which one the others wait for, and which host is silent."""

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offloop.bus.hosts.windows import HostWindows
from offloop.bus.protocol.host_windows import ARRIVAL, HostWindow
from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers.callbacks.phases.arrivals import HostArrivals, LastArrival, find_straggler
from offloop.consumers.dashboard.view.rank_map import FirstNan, HostView, RankMap, Waiting

if TYPE_CHECKING:
    from offloop.consumers.dashboard.view.rank_map import Floats32

_MOST_RANKS = 1 << 17
_SILENT_WINDOWS = 4
_LEAST_SILENT = 5.0
_COMPARED = 20
_LEAST_COMPARED = 5
_OFTEN = 0.5
_WAITED_SHARE = 0.05


class RankTiming:
    """Follows every rank by the windows of its host, see :class:`offloop.bus.protocol.host_windows.HostWindow`. Where
    no host sends windows, they are made of the ends of batches, as those of one host without a name."""

    def __init__(self) -> None:
        self.batches: dict[int, int] = {}
        """The batches that each rank has trained whose events come."""
        self._of_events: HostWindows | None = None
        self._hosts: dict[str, _Host] = {}
        self._ordered: list[_Host] = []
        self._taken = 0
        self._count = 0
        self._first_nan: FirstNan | None = None
        self._arrivals = HostArrivals()
        self._compared: deque[LastArrival] = deque(maxlen=_COMPARED)
        self._made: tuple[object, RankMap] | None = None

    def batch_end(self, snapshot: Snapshot) -> None:
        """Add the end of a batch of any rank."""
        rank, batch = snapshot.rank, snapshot._body.timestamp.batch
        if batch <= self.batches.get(rank, 0):
            # They are counted from zero again.
            self._of_events = None
        self.batches[rank] = batch
        if len(self.batches) > 1 and self._hosts.keys() <= {""}:
            if self._of_events is None:
                self._of_events = HostWindows("", 1, (), 0, 0)
            self.add_windows(self._of_events.take(snapshot))

    def add_windows(self, windows: Iterable[HostWindow], now: float | None = None) -> None:
        """Add the windows of hosts, in order; ``now`` is the time of this process's monotonic clock."""
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
                # Later ones count from zero again.
                continue
            host.window, host.heard = window, now
            if window.ranks != before:
                self._count = count
                self._ordered = sorted(self._hosts.values(), key=lambda one: (one.window.ranks, one.window.host))
            for name, quantity in window.quantities.items():
                if quantity.first_nan is not None:
                    batch, rank = quantity.first_nan
                    if self._first_nan is None or batch < self._first_nan.batch:
                        self._first_nan = FirstNan(name, batch, rank, window.host)
            self._compared.extend(self._arrivals.add((window,)))

    @property
    def count(self) -> int:
        """The number of known ranks."""
        return self._count or len(self.batches)

    def map(self, is_live: bool = False, now: float | None = None) -> RankMap:
        """All ranks side by side, of a run that ``is_live`` with the hosts that are silent at a time of this process's
        monotonic clock."""
        now = (time.monotonic() if now is None else now) if is_live else None
        # Several browsers look at the same one; silence is measured in seconds.
        key = self._taken, None if now is None else int(now)
        if self._made is None or self._made[0] != key:
            self._made = key, self._map(now)
        return self._made[1]

    def _map(self, now: float | None) -> RankMap:
        windows = [host.window for host in self._ordered]
        late: list[int] = []
        batches: list[int] = []
        for window in windows:
            behind = set(window.late)
            late += [len(batches) + place for place, rank in enumerate(window.ranks) if rank in behind]
            batches += window.batches
        compared = len(self._compared)
        shares = {rank: count / compared for rank, count in Counter(one.rank for one in self._compared).items()}
        is_enough = compared >= _LEAST_COMPARED
        return RankMap(
            [
                HostView(host.window.host, host.window.ranks, host.window.last, host.silent(now))
                for host in self._ordered
            ],
            max((window.world_size for window in windows), default=0),
            _Newest(windows),
            batches,
            shares if is_enough else None,
            late,
            self._first_nan,
            self._waiting() if is_enough else None,
        )

    def _waiting(self) -> Waiting | None:
        """The rank that is the last one most often, where that costs the others something."""
        slow = find_straggler(self._compared, _OFTEN * len(self._compared))
        if slow is None or slow.waited <= _WAITED_SHARE * slow.step:
            return None
        cells = (rank for host in self._ordered for rank in host.window.ranks)
        return next((Waiting(cell, slow.waited) for cell, rank in enumerate(cells) if rank == slow.rank), None)


@dataclass
class _Host:
    window: HostWindow
    heard: float

    def silent(self, now: float | None) -> float | None:
        """Seconds since its last window, where those are more than usual."""
        seconds = 0.0 if now is None or not self.window.host else now - self.heard
        return seconds if seconds >= max(_LEAST_SILENT, _SILENT_WINDOWS * self.window.seconds) else None


class _Newest(Mapping[str, "Floats32"]):
    """The newest values of each quantity, gathered when they are requested."""

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
