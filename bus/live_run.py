"""What the broker keeps of a run while it is live."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bus.demand import Leases
from bus.journal import JournalWriter
from bus.runs import RunDirectory
from bus.stream import SEVERITY

__all__ = ["LiveRank", "LiveRun"]

JOIN_SECONDS = 30.0


@dataclass
class LiveRank:
    """One publisher: its connection, and the last numbers that came from it."""

    identity: bytes
    rank: int
    process: int | None
    """A file descriptor of its process (pidfd), readable once that has ended; ``None`` when it cannot be watched."""
    seq: int = 0
    acknowledged: int = 0
    base_seq: int = 0
    time: int = 0
    ended: bool = False
    died: float | None = None
    """When its process was found dead, on the steady clock."""


class LiveRun:
    """One live run: its directory, its journal, its publishers and what its consumers want."""

    def __init__(self, directory: RunDirectory, attempt: int, recording: Path, world_size: int) -> None:
        self.directory = directory
        self.name = directory.name
        self.attempt = attempt
        self.journal = JournalWriter(recording, self.name, attempt)
        self.world_size = world_size
        self.ranks: dict[int, LiveRank] = {}
        self.leases = Leases()
        self.demand: frozenset[str] = frozenset()
        self.status = "finished"
        self.error: str | None = None
        self.last_end: float | None = None
        self.recording_error: str | None = None
        """Why nothing is recorded any more; ``None`` while all is well."""

    @property
    def over(self) -> bool:
        """Whether every rank has ended."""
        return len(self.ranks) == self.world_size and all(rank.ended for rank in self.ranks.values())

    def is_abandoned(self, now: float) -> bool:
        """Whether every rank that came has ended, and the others have had their time to come."""
        return (
            self.last_end is not None
            and now - self.last_end > JOIN_SECONDS
            and all(rank.ended for rank in self.ranks.values())
        )

    def note_end(self, rank: LiveRank, fields: dict[str, Any], now: float) -> None:
        """Notes that a rank's stream has ended, and how."""
        rank.ended = True
        self.last_end = now
        status = str(fields.get("status", "lost"))
        if status in SEVERITY and SEVERITY.index(status) > SEVERITY.index(self.status):
            self.status, self.error = status, fields.get("error") and str(fields["error"])
