"""The rule by which ``base_seq`` counts: brokers refuse publishers, and readers name recordings, that break it."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from offloop.bus.printing import shorten
from offloop.bus.protocol.frames import CHECKPOINT, COMMAND, DEMAND, END
from offloop.bus.types.demand import BASE_EVENTS
from offloop.bus.types.event import Event

_BASE = frozenset({*(event.value for event in BASE_EVENTS), END, DEMAND, COMMAND, CHECKPOINT})
_INNER = frozenset(event.value for event in Event) - _BASE
BASE_STEPS = {event.value: int(event.value in _BASE) for event in Event}
"""The increase of ``base_seq`` by an event; of events alone, not of marks."""


class Numbers(NamedTuple):
    """The numbers of one event of a rank."""

    seq: int
    base_seq: int


START = Numbers(0, 0)
"""Those before the first event."""


def base_seq_problem(name: str, seq: int, base_seq: int, last: tuple[int, int]) -> str | None:
    """Describes a wrong ``base_seq`` of an event; ``last`` are ``seq`` and ``base_seq`` of one before it. Those
    between the two may be base events or not, and so may one of a name that is not known."""
    last_seq, last_base_seq = last
    low = last_base_seq + (name in _BASE)
    high = last_base_seq + seq - last_seq - (name in _INNER)
    if low <= base_seq <= high:
        return None
    expected = str(low) if low == high else f"{low} to {high}"
    return f"event {seq} ({name}) has the base_seq {base_seq}, where {expected} belongs"


class Numbering:
    """Follows the events of a run and names those that are wrongly numbered. A reader may pass over events, but not go
    back."""

    def __init__(self, positions: Mapping[int, tuple[int, int]] | None = None) -> None:
        self.reached: dict[int, tuple[int, int]] = dict(positions or {})
        """Of each rank ``(seq, base_seq)`` of its last event. A caller that has checked an event may put it in."""
        self._wrong: dict[int, str] = {}
        self._more: Counter[int] = Counter()

    def last(self, rank: int) -> Numbers:
        """The numbers of the last event of a rank."""
        return Numbers(*self.reached.get(rank, START))

    def follow(self, rank: int, name: str, seq: int, base_seq: int) -> None:
        """Advances to an event."""
        problem = base_seq_problem(name, seq, base_seq, self.last(rank))
        if problem is not None and rank in self._wrong:
            self._more[rank] += 1
        elif problem is not None:
            self._wrong[rank] = problem
        self.reached[rank] = seq, base_seq

    def skip_to(self, rank: int, numbers: Numbers) -> None:
        """Advances to a position that is known without its event."""
        self.reached[rank] = numbers

    @property
    def problems(self) -> list[str]:
        """The wrong numbers, one line for each rank; of many ranks, the number of the others."""
        lines = (
            f"rank {rank} is wrongly numbered: {first}"
            + (f"; so are {self._more[rank]:,} more events" if self._more[rank] else "")
            for rank, first in tuple(self._wrong.items())
        )
        return shorten(lines, "ranks that are wrongly numbered")
