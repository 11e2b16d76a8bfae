"""What happened in a run, as lines for people."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["LogEntry", "RunLog", "folded"]


class LogEntry(NamedTuple):
    """One line."""

    number: int
    """Counts the lines of a run from 1."""
    time: float
    """When it happened: seconds since 1970, UTC."""
    rank: int
    kind: str
    """``event``, ``begin`` (of an evaluation, whose end follows as an event), ``command``, ``text``, ``end``, ``note``
    or ``output``."""
    text: str


class RunLog:
    """The last 2,000 lines."""

    MAX_LINES = 2000

    def __init__(self) -> None:
        self._entries: deque[LogEntry] = deque(maxlen=self.MAX_LINES)
        self._count = 0

    def add(self, time: float, rank: int, kind: str, text: str) -> None:
        """Takes a line."""
        self._count += 1
        self._entries.append(LogEntry(self._count, time, rank, kind, " ".join(text.split())))

    def after(self, number: int) -> list[LogEntry]:
        """The lines with higher numbers."""
        new = min(self._count - number, len(self._entries))
        return [self._entries[place] for place in range(-new, 0)] if new > 0 else []


def folded(entries: Sequence[LogEntry]) -> list[LogEntry]:
    """The lines without those that an evaluation begins, but for one that is going on."""
    last = max((place for place, entry in enumerate(entries) if entry.kind in ("event", "end")), default=-1)
    return [entry for place, entry in enumerate(entries) if entry.kind != "begin" or place > last]
