"""One clock for ranks on several hosts."""

from collections import deque
from statistics import median_low
from typing import Any

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event

_PAIRS = 15
_WAITING = 64
_TOGETHER = {Event.INIT, Event.FIT_START, Event.BATCH_END}


class RankClocks:
    """Puts the times of all ranks on the clock of the first one.

    Ranks on one host have one clock, and so have ranks that have not said where they run. The clocks of other hosts
    are compared where ranks are together: at the ends of batches, which none can reach before the others. The
    difference is the median over the last 15 of them, so that a rank that was held up at one end bends nothing. Before
    the first batch the beginning of the run is all there is to go by.
    """

    def __init__(self) -> None:
        self._hosts: dict[int, str] = {}
        self._waiting: dict[int, deque[tuple[str, int, int]]] = {}
        self._differences: dict[int, deque[int]] = {}
        self._offsets: dict[int, int] = {}

    def see(self, state: Snapshot) -> None:
        """Takes in an event, if it says anything about its rank's clock."""
        event, rank = state.event, state.rank
        if event not in _TOGETHER:
            return
        if event is Event.INIT:
            self._note_host(state)
        if rank and self._hosts.get(rank) == self._hosts.get(0):
            return
        place = (event.value, state.timestamp.values.batch, state.time_ns)
        self._waiting.setdefault(rank, deque(maxlen=_WAITING)).append(place)
        for other in [rank] if rank else self._waiting:
            self._compare(other)

    def host(self, rank: int) -> str | None:
        """Where a rank runs; ``None`` when it has not said so."""
        return self._hosts.get(rank)

    def aligned(self, rank: int, time_ns: int) -> int:
        """A time of a rank by the first rank's clock."""
        return time_ns - self._offsets.get(rank, 0)

    def state_dict(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return {
            "hosts": [list(one) for one in self._hosts.items()],
            "waiting": [[rank, [list(place) for place in places]] for rank, places in self._waiting.items()],
            "differences": [[rank, list(values)] for rank, values in self._differences.items()],
            "offsets": [list(one) for one in self._offsets.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what :meth:`state_dict` gave."""
        self._hosts = dict(state["hosts"])
        self._offsets = dict(state["offsets"])
        for rank, places in state["waiting"]:
            self._waiting[rank] = deque(((name, batch, time) for name, batch, time in places), maxlen=_WAITING)
        for rank, values in state["differences"]:
            self._differences[rank] = deque(values, maxlen=_PAIRS)

    def _note_host(self, state: Snapshot) -> None:
        system = state.fields.get("system")
        host = system.get("host") if isinstance(system, dict) else None
        if isinstance(host, str):
            self._hosts[state.rank] = host

    def _compare(self, rank: int) -> None:
        own, host = self._hosts.get(rank), self._hosts.get(0)
        if rank == 0 or own is None or host is None or own == host:
            return
        first = {(name, batch): time for name, batch, time in self._waiting.get(0, ())}
        places = self._waiting[rank]
        for name, batch, time in places:
            if (name, batch) in first:
                self._note_difference(rank, name, time - first[name, batch])
        self._waiting[rank] = deque((place for place in places if place[:2] not in first), maxlen=_WAITING)

    def _note_difference(self, rank: int, name: str, difference: int) -> None:
        known = self._differences.setdefault(rank, deque(maxlen=_PAIRS))
        if name == Event.BATCH_END.value:
            known.append(difference)
            self._offsets[rank] = median_low(known)
        elif not known:
            # Ranks begin a run only roughly together.
            self._offsets[rank] = difference
