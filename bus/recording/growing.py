"""A growing recording, as its bridge reads it: only bytes that are never replaced."""

import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from offloop.bus.recording.records import MAGIC, CheckRecord, FileSource, walk

_MOST_PARTS = 10_000


class _Part(NamedTuple):
    end: int
    total: int
    seen: float


class Backlog:
    """The newest parts of a growing file that its copy lacks."""

    def __init__(self) -> None:
        self._parts: deque[_Part] = deque(maxlen=_MOST_PARTS)
        self._total = self._before = 0

    def add(self, end: int, total: int) -> None:
        """Add the part that ends at an offset; the file has ``total`` events or windows up to there."""
        self._total = total
        self._parts.append(_Part(end, total, time.monotonic()))

    def drop(self, offset: int) -> int:
        """Forget parts before an offset; return the number of events or windows after it."""
        while self._parts and self._parts[0].end <= offset:
            self._before = self._parts.popleft().total
        return self._total - (self._before if offset else 0)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._parts[0].seen if self._parts else 0.0


class GrowingRecording(FileSource):
    """A recording that a broker writes. Only bytes up to its last whole check record are final."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, follow=False)
        self.end = 0  # offset of the end of the last whole check record
        self.check: CheckRecord | None = None
        self.backlog = Backlog()

    def look(self) -> int:
        """Read new check records; return :attr:`end`."""
        for head in walk(self, self.end or len(MAGIC)):
            if head.check is not None:
                self.check, self.end = head.check, head.end
                self.backlog.add(self.end, head.check.total)
        return self.end

    def piece(self, offset: int, end: int, most: int) -> bytes:
        return self.read_at(offset, min(end - offset, most))
