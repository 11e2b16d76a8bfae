"""Who arrives last of all ranks of all hosts, from what the hosts say of their ranks."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from offloop.bus.protocol.host_windows import ARRIVAL, STEP, HostWindow
from offloop.consumers.callbacks.phases.restarts import Place, Restarts

_MOST_OPEN = 8


class LastArrival(NamedTuple):
    """Of about the same batches on all hosts: the rank that arrived last on average."""

    batch: int
    """The last of them."""
    host: str
    rank: int
    waited: float
    """How many seconds the others waited for it, on average."""
    step: float
    """Seconds a batch, the mean of all ranks; not a number where no host says it."""


class _Arrivals:
    """Of one window of batches: what has come of it."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.hosts: set[str] = set()
        self.heard = 0
        """How many ranks are in what has come."""
        self._latest: tuple[float, str, int] | None = None
        self._sum = self._steps = 0.0
        self._count = self._stepped = 0

    def add(self, window: HostWindow) -> None:
        """Takes what a host says of it."""
        self.hosts.add(window.host)
        self.heard += len(window.ranks)
        step, arrival = window.quantities.get(STEP), window.quantities.get(ARRIVAL)
        if step is not None and math.isfinite(step.mean):
            self._steps += step.mean * len(window.ranks)
            self._stepped += len(window.ranks)
        if arrival is None:
            return
        known = arrival.ranks
        if not math.isfinite(sum(known)):
            known = tuple(at for at in known if math.isfinite(at))
        if known:
            self._sum += sum(known)
            self._count += len(known)
            at = max(known)
            if self._latest is None or at > self._latest[0]:
                self._latest = at, window.host, window.ranks[arrival.ranks.index(at)]

    def last(self) -> LastArrival | None:
        """Who arrived last; ``None`` with fewer than two hosts to compare."""
        if self._latest is None or self._count < 2 or len(self.hosts) < 2:
            return None
        at, host, rank = self._latest
        waited = at - (self._sum - at) / (self._count - 1)
        step = self._steps / self._stepped if self._stepped else math.nan
        return LastArrival(self.batch, host, rank, waited, step)


class HostArrivals:
    """Brings together the windows of all hosts that are about the same batches.

    What each rank's :data:`~offloop.bus.protocol.host_windows.ARRIVAL` is relative to is the end of a batch, which
    ranks that train together reach together: no two clocks are compared.
    """

    def __init__(self) -> None:
        self._restarts = Restarts()
        self._open: dict[Place, _Arrivals] = {}
        self._settled: Place = 0, 0

    def add(self, windows: Iterable[HostWindow]) -> list[LastArrival]:
        """Takes windows in; returns what is known now of batches of which all ranks have been heard, or will not be."""
        found: list[LastArrival] = []
        for window in windows:
            place = self._restarts.place(window.host, window.last, window.time_ns, self._settled)
            if place <= self._settled:
                continue
            together = self._open.get(place)
            if together is None:
                together = self._open[place] = _Arrivals(window.last)
            if window.host in together.hosts:
                continue
            together.add(window)
            if together.heard >= window.world_size:
                found += self._settle(place)
            elif len(self._open) > _MOST_OPEN:
                # Some host says nothing any more.
                found += self._settle(min(self._open))
        return found

    def _settle(self, until: Place) -> list[LastArrival]:
        self._settled = until
        # A host with longer windows, or that says nothing for a while, may be the one that the others waited for.
        heard = max(together.heard for together in self._open.values())
        ready = [self._open.pop(place) for place in sorted(place for place in self._open if place <= until)]
        arrivals = [together.last() for together in ready if together.heard == heard]
        return [one for one in arrivals if one is not None]
