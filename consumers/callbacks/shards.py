"""Adds up norms and histograms of sharded weights, of which each rank publishes those of its shards."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from offloop.bus.printing import say
from offloop.bus.protocol.host_windows import SHARD_NORM, HostWindow
from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers.callbacks.arrivals import Together

_MOST_OPEN = 64
_MOST_OPEN_WINDOWS = 8


class Shards(NamedTuple):
    shards: float | dict[str, float | list[int]]  # norms or counts, by name where the field has several
    ranks: int  # the number of ranks with shards, from the first rank; otherwise 0


class WholeNorms(Together[Shards]):
    """A field of norms or histograms, added up over the ranks of sharded weights. For callbacks with ``all_ranks``.

    A batch for which the shards of a rank are missing is left out; the numbers 1, 2, 4, ... of them are reported."""

    def __init__(self, field: str) -> None:
        super().__init__(_MOST_OPEN, Shards)
        self.field = field
        self._left_out = 0

    def whole(self, state: Snapshot) -> Any:
        """Return the norms of the whole model once all ranks of the event's batch have reported theirs, else ``None``.

        Those of a model that is not sharded are the first rank's."""
        value = state.get(self.field)
        if not isinstance(value, dict) or value.keys() != set(Shards._fields):
            return value if state.rank == 0 else None
        report = msgspec.convert([value[name] for name in Shards._fields], Shards)
        settled = self.add(
            state.rank,
            state.timestamp.values.batch,
            state.time_ns,
            report,
            lambda found: len(found) == max(one.ranks for one in found),
        )
        whole = None
        for batch, reports in settled:
            ranks = max(one.ranks for one in reports.values())
            if len(reports) == ranks:
                whole = _sum(reports)
            else:
                self._leave_out(batch, len(reports), ranks, state)
        return whole

    def _leave_out(self, batch: int, found: int, ranks: int, state: Snapshot) -> None:
        self._left_out += 1
        if self._left_out.bit_count() == 1:
            say(
                f"run {state.run_name}: {self.field} is left out of {self._left_out} batches; of batch {batch} the "
                f"shards of {found} of {ranks or 'all'} ranks came. A consumer sees the ranks of one host; over "
                "several, OptimizerMonitor's l2_norm/grad/global alone is known, by their windows.",
                err=True,
            )


class HostNorms:
    """Adds up the norms of all gradients of weights that are sharded over several hosts, from the hosts' windows."""

    def __init__(self) -> None:
        self._windows: Together[HostWindow] = Together(_MOST_OPEN_WINDOWS, HostWindow)

    def add(self, windows: Iterable[HostWindow]) -> list[tuple[int, float]]:
        """Return batches of which all shards are known, with the norm; NaN if that of a shard is not finite."""
        found = []
        for window in windows:
            report = window if SHARD_NORM in window.quantities else None
            for batch, reports in self._windows.add(window.host, window.last, window.time_ns, report, _has_all):
                # Shards of one host come as events.
                if len(reports) > 1 and _has_all(reports.values()):
                    parts = [one.quantities[SHARD_NORM] for one in reports.values()]
                    norms = (norm for part in parts for norm in part.ranks if not math.isnan(norm))
                    found.append(
                        (batch, math.hypot(*norms) if all(part.first_nan is None for part in parts) else math.nan)
                    )
        return found


def _has_all(windows: Collection[HostWindow]) -> bool:
    return sum(one.quantities[SHARD_NORM].count for one in windows) == max(one.shards for one in windows)


def of_rank(state: Snapshot) -> str:
    """Return what distinguishes the numbers of a rank's events from those of the first rank."""
    return f"-{state.rank}" if state.rank else ""


def _sum(reports: Mapping[Any, Shards]) -> Any:
    parts: list[Any] = [reports[rank].shards for rank in sorted(reports)]
    if not isinstance(parts[0], dict):
        return math.hypot(*parts)
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _added([part[name] for part in parts if name in part]) for name in names}


def _added(parts: Sequence[Any]) -> Any:
    return [sum(counts) for counts in zip(*parts, strict=True)] if isinstance(parts[0], list) else math.hypot(*parts)
