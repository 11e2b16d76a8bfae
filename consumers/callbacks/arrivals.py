"""The rank that arrives last: in a batch of one host's ranks, in a window of batches over all hosts, and most often."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from statistics import fmean
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec

from offloop.bus.protocol.host_windows import ARRIVAL, STEP, HostWindow

Place: TypeAlias = tuple[int, int]
"""Number of restarts of the count, and number of the batch: later batches are greater."""

T = TypeVar("T")


class Together(Generic[T]):
    """Collects the reports of ranks or hosts about the same batches.

    ``fit(reset_time=True)`` restarts the count: a lower number at a later time of the same source. No two clocks are
    compared. When more than ``most_open`` batches wait for reports, the oldest waits no longer."""

    def __init__(self, most_open: int, kind: type[T]) -> None:
        self.open: dict[Place, dict[Hashable, T]] = {}  # batches that wait for reports, with the reports by source
        self._most_open = most_open
        self._kind = kind  # of the reports
        self._newest: dict[Hashable, tuple[int, int, int]] = {}
        self._settled: Place = 0, 0

    def add(
        self, source: Hashable, batch: int, time_ns: int, report: T | None, is_all: Callable[[Collection[T]], bool]
    ) -> list[tuple[int, dict[Hashable, T]]]:
        """Add a report of a batch that ended at ``time_ns``, ``None`` for one without a measurement.

        ``is_all`` decides whether the reports of a batch are complete. Returns settled batches, as :meth:`settle`."""
        restarts, newest, before_ns = self._newest.get(source, (self._settled[0], -1, 0))
        if batch > newest or time_ns > before_ns:
            restarts += batch <= newest
            self._newest[source] = restarts, batch, time_ns
        place = restarts, batch
        if report is None or place <= self._settled:
            return []
        together = self.open.setdefault(place, {})
        together.setdefault(source, report)
        if is_all(together.values()):
            return self.settle(place)
        return self.settle(min(self.open)) if len(self.open) > self._most_open else []

    def settle(self, until: Place) -> list[tuple[int, dict[Hashable, T]]]:
        """Remove the batches up to that one; return their numbers and reports in order."""
        self._settled = until
        return [(place[1], self.open.pop(place)) for place in sorted(self.open) if place <= until]

    def state_dict(self) -> dict[str, Any]:
        return {
            "open": [[*place, *one] for place, reports in self.open.items() for one in reports.items()],
            "newest": [[source, *newest] for source, newest in self._newest.items()],
            "settled": list(self._settled),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for restarts, batch, source, report in state["open"]:
            self.open.setdefault((restarts, batch), {})[source] = msgspec.convert(report, self._kind)
        self._newest = {source: (restarts, batch, time_ns) for source, restarts, batch, time_ns in state["newest"]}
        restarts, batch = state["settled"]
        self._settled = restarts, batch


_MOST_OPEN = 8
_MEET_IN_FORWARD = 4


class Arrival(NamedTuple):
    """The arrival of a rank at the common work of one batch; nanoseconds of its own clock."""

    forward: int | None  # the beginning of its first forward pass
    backward: tuple[int, ...]  # the beginnings of its backward passes: one for each microbatch
    ended: int  # the end of the batch, which all ranks reach together


class LastArrival(NamedTuple):
    host: str  # empty where the ranks of one host are compared
    rank: int
    waited: float  # mean seconds that the others waited for it
    step: float  # seconds per batch, the mean of all ranks; NaN where no host reports it


class Straggler(NamedTuple):
    """A rank that arrives last most often, or a host whose ranks take turns."""

    host: str
    rank: int | None
    times: int
    waited: float
    step: float  # as in LastArrival, the means over those times

    def costs(self, compared: int) -> float:
        """Return the share of the others' time spent waiting for it, of ``compared`` batches."""
        return self.waited * self.times / compared / self.step


def find_straggler(arrivals: Iterable[LastArrival | None], often: float) -> Straggler | None:
    """Return the rank, else the host, that arrived last at least ``often`` times; ``None`` without one."""
    found = [one for one in arrivals if one is not None and one.waited > 0 and one.step > 0]
    for by_rank in (True, False):
        counted = Counter((one.host, one.rank if by_rank else -1) for one in found)
        (host, rank), times = min(counted.items(), key=lambda one: (-one[1], one[0]), default=(("", -1), 0))
        if times and times >= often and (by_rank or host):
            late = [one for one in found if one.host == host and rank in (one.rank, -1)]
            waited, step = fmean(one.waited for one in late), fmean(one.step for one in late)
            return Straggler(host, rank if by_rank else None, times, waited, step)
    return None


def last_to_arrive(arrivals: Mapping[int, Arrival]) -> tuple[int, int] | None:
    """Return the rank that arrived last where the ranks meet, and the others' mean wait in nanoseconds.

    Durations do not show it: an early rank waits within its own backward pass, so that all take equally long. The ranks
    meet in the backward pass, where gradients are exchanged: at the first one or, with microbatches, at the last one,
    whichever had the longer wait. Ranks with shards of the weights meet in the forward pass already: they start the
    backward pass together although they came to the forward pass one after the other.

    Each time is relative to the end of the batch on the same rank, so the ranks' clocks need not agree."""
    computing = {rank: arrival for rank, arrival in arrivals.items() if arrival.backward}
    found = max(
        _last(computing, lambda arrival: arrival.backward[0]),
        _last(computing, lambda arrival: arrival.backward[-1]),
        key=lambda last: last[1],
    )
    at_forward = _last(computing, lambda arrival: arrival.forward)
    if at_forward[1] > _MEET_IN_FORWARD * found[1]:
        found = at_forward
    return found if found[1] > 0 else None


def _last(arrivals: Mapping[int, Arrival], point: Callable[[Arrival], int | None]) -> tuple[int, int]:
    lateness = {
        rank: at - arrival.ended for rank, arrival in sorted(arrivals.items()) if (at := point(arrival)) is not None
    }
    if len(lateness) < 2:
        return -1, 0
    rank = max(lateness, key=lateness.__getitem__)
    latest = lateness.pop(rank)
    return rank, round(fmean(latest - one for one in lateness.values()))


class HostArrivals:
    """Finds the last arrivals in windows of all hosts about the same batches.

    A rank's :data:`~offloop.bus.protocol.host_windows.ARRIVAL` is relative to the end of a batch, which ranks that
    train together reach together: no two clocks are compared."""

    def __init__(self) -> None:
        self._windows: Together[HostWindow] = Together(_MOST_OPEN, HostWindow)

    def add(self, windows: Iterable[HostWindow]) -> list[LastArrival]:
        found: list[LastArrival] = []
        for window in windows:
            settled = self._windows.add(
                *(window.host, window.last, window.time_ns, window),
                lambda heard, size=window.world_size: _ranks_in(heard) >= size,  # type: ignore[misc]
            )
            # A host with longer windows, or a silent one, may be the one that the others waited for.
            heard = [_ranks_in(reports.values()) for _, reports in settled]
            most = max([*heard, *(_ranks_in(reports.values()) for reports in self._windows.open.values())], default=0)
            lasts = (
                _last_of(reports.values()) for (_, reports), ranks in zip(settled, heard, strict=True) if ranks == most
            )
            found += [last for last in lasts if last is not None]
        return found


def _ranks_in(windows: Collection[HostWindow]) -> int:
    return sum(len(window.ranks) for window in windows)


def _last_of(windows: Collection[HostWindow]) -> LastArrival | None:
    arrivals = [
        (at, window.host, rank)
        for window in windows
        if ARRIVAL in window.quantities
        for rank, at in zip(window.ranks, window.quantities[ARRIVAL].ranks, strict=True)
        if math.isfinite(at)
    ]
    if len(arrivals) < 2:
        return None
    at, host, rank = max(arrivals, key=lambda one: one[0])
    others = (math.fsum(one[0] for one in arrivals) - at) / (len(arrivals) - 1)
    steps = [
        (window.quantities[STEP].mean, len(window.ranks))
        for window in windows
        if STEP in window.quantities and math.isfinite(window.quantities[STEP].mean)
    ]
    ranks = sum(count for _, count in steps)
    step = sum(mean * count for mean, count in steps) / ranks if ranks else math.nan
    return LastArrival(host, rank, at - others, step)
