"""What the broker keeps of a run while it is live: its publishers, its record, and what its consumers want."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bus.broker.leases import ConsumerTable, Leases
from bus.errors import OffloopError, RunDirectoryError
from bus.protocol.frames import EventBody
from bus.protocol.order import Ending, Reached, worst_of
from bus.recording.writer import RecordingWriter
from bus.runs.directory import Pause, RunDirectory
from bus.types.demand import Demand
from bus.types.timeouts import Timeouts

_log = logging.getLogger("offloop.broker")

MAX_RESUME = 1 << 53  # what is missing is added up, and has to stay a number that can be sent


@dataclass
class LiveRank:
    """One publisher: its connection, and the last numbers that came from it."""

    rank: int
    publisher_id: str = ""
    """The publisher's own id, the same through every connection."""
    identity: bytes | None = None
    """Its connection; ``None`` until it has one to a broker that was started again."""
    process: int | None = None
    """A file descriptor of its process (pidfd), readable once that has ended; ``None`` when it cannot be watched."""
    pid: int | None = None
    """Its process, while that runs on this machine."""
    seq: int = 0
    """Of the last event that was sent out, or of the last one that is known to be lost."""
    base_seq: int = 0
    """Of the last event that was sent out."""
    base_seq_at: int = 0
    """``seq`` of the event that ``base_seq`` is of."""
    time: int = 0
    recorded: int = 0
    """Number of the last event in the recording, on disk or about to be."""
    acknowledged: int = 0
    """Number of the last event on disk."""
    ack_sent: int = 0
    """The number in the last acknowledgement that the publisher was sent."""
    names: dict[bytes, str] = field(default_factory=dict)
    """The topics that its connection has used, and the names of events in them."""
    spoiled: int = 0
    """Number of the event in whose place something came that makes no sense at all."""
    asked_after: int = -1
    """Behind which event it was last asked to."""
    asked_times: int = 0
    """How often it was asked for the event behind that one."""
    may_cut: bool = False
    """Whether it may send ``$cut``: it sends a recording again, or goes on with what another broker has recorded."""
    ended: bool = False
    last: EventBody | None = None
    """Its last event, but for marks; ``None`` until one came to this broker."""
    end: tuple[bytes, EventBody, bytes] | None = None
    """Topic, event and body of its end."""
    died: float | None = None
    """When its process was found dead, on the steady clock."""
    gone: float | None = None
    """Since when its connection is, on the steady clock; only of processes that cannot be watched."""
    asked: float = 0.0
    """When it was last asked to send again, on the steady clock."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """What it last said about itself."""


class LiveRun:
    """One live run. ``writer`` may hold an attempt that goes on: then the ranks in it are where it left them."""

    def __init__(
        self, directory: RunDirectory, attempt: int, writer: RecordingWriter, world_size: int, timeouts: Timeouts
    ) -> None:
        self._timeouts = timeouts
        self.directory = directory
        self.name = directory.name
        self.attempt = attempt
        self.writer = writer
        self.world_size = world_size
        self.ranks: dict[int, LiveRank] = {}
        self.leases = Leases(timeouts.lease)
        self.demand = Demand()
        self.unlimited: Demand | None = None
        """What of it consumers want that may command; ``None`` while all of them may."""
        self.consumers = ConsumerTable(world_size, timeouts.lease)
        self.consumers_reported = 0
        """Of which version of them the publishers were told."""
        self.ending = Ending("finished")
        """How it ended, as far as it has."""
        self.last_end: float | None = None
        self.write_error: str | None = None
        """Why nothing is recorded at the moment; ``None`` without an error."""
        self.lost = 0
        """Events that came but are not in the recording."""
        self.flush_soon = False
        self._retry_at = 0.0
        for number, position in writer.positions.items():
            self.ranks[number] = LiveRank(
                number,
                seq=position.seq,
                base_seq=position.base_seq,
                base_seq_at=position.seq,
                time=position.time,
                ended=position.ended,
            )
        self._back_to_disk()

    @property
    def over(self) -> bool:
        """Whether every rank has ended."""
        return len(self.ranks) == self.world_size and all(rank.ended for rank in self.ranks.values())

    def is_abandoned(self, now: float) -> bool:
        """Whether every rank that came has ended, and the others have had their time to come."""
        return (
            self.last_end is not None
            and now - self.last_end > self._timeouts.join
            and all(rank.ended for rank in self.ranks.values())
        )

    def note_end(self, rank: LiveRank, topic: bytes, event: EventBody, body: bytes, now: float) -> None:
        """Notes that a rank's stream has ended, and how."""
        rank.ended = True
        rank.end = topic, event, body
        self.last_end = now
        self.note_ending(Ending.from_fields(event.fields))

    def note_command(self, rank: LiveRank, event: EventBody) -> None:
        """Writes down that the training stands still, or goes on, by a command that its first rank has obeyed."""
        command = event.fields.get("command")
        if rank.rank or event.fields.get("error") is not None or command not in ("pause", "resume", "stop"):
            return
        try:
            self.directory.note_pause(Pause(event.time / 1e9, event.timestamp.batch) if command == "pause" else None)
        except RunDirectoryError as error:
            _log.error("run %s: %s", self.name, error)

    def note_ending(self, ending: Ending) -> None:
        """Notes how something of the run ended: of several endings the worst is the run's."""
        self.ending = worst_of([self.ending, ending])

    def publishers(self) -> list[LiveRank]:
        """Those that have not ended and are connected."""
        return [rank for rank in self.ranks.values() if rank.identity is not None and not rank.ended]

    def connections(self) -> list[bytes]:
        """Of the publishers that have one."""
        return [rank.identity for rank in self.ranks.values() if rank.identity is not None]

    @property
    def reached(self) -> Reached | None:
        """How far the training came, as its first rank says."""
        first = self.ranks.get(0)
        return None if first is None or first.last is None else Reached.of(first.last)

    @property
    def incomplete(self) -> str | None:
        """What is to be said of a recording that lacks something."""
        if self.write_error is not None:
            return f"the recording is incomplete: {self.write_error}"
        return f"the recording lacks {self.lost} events" if self.lost else None

    # -- the recording -----------------------------------------------------------------------------------------------

    def record(self, rank: LiveRank, topic: bytes, event: EventBody, body: bytes) -> None:
        """Appends an event to the recording if it is the next one there. While the disk takes nothing, none is: the
        publishers keep what was not acknowledged, and send it again when it does."""
        if self.write_error is not None or event.seq != rank.recorded + 1:
            return
        try:
            self.writer.append(topic, event.seq, event.base_seq, event.time, body)
        except (OSError, OffloopError) as error:
            self._fail(error)
        else:
            rank.recorded = event.seq

    def flush(self) -> None:
        """Puts what was recorded on the disk."""
        self.flush_soon = False
        if self.write_error is None and any(rank.recorded > rank.acknowledged for rank in self.ranks.values()):
            try:
                self.writer.flush()
            except (OSError, OffloopError) as error:
                self._fail(error)
            else:
                for rank in self.ranks.values():
                    rank.acknowledged = rank.recorded

    def retry_write(self, now: float) -> bool:
        """Tries to record again after a write error, at most once in a while; returns whether it succeeded."""
        if self.write_error is None or now < self._retry_at:
            return False
        self._retry_at = now + self._timeouts.retry_write
        try:
            self.writer.recover()
        except (OSError, OffloopError):
            return False
        self.write_error = None
        self._back_to_disk()
        _log.warning("run %s is recorded again, from what is on disk on", self.name)
        return True

    def close_recording(self) -> None:
        """Ends the recording. If the disk takes it now, it says at least how the run ended."""
        self.retry_write(self._retry_at)
        if self.write_error is None:
            for rank in self.ranks.values():
                if rank.end is not None and rank.end[1].seq > rank.recorded:
                    self.lost += rank.end[1].seq - 1 - rank.recorded
                    rank.recorded = rank.end[1].seq - 1
                    self.record(rank, *rank.end)
        try:
            self.writer.close()
        except (OSError, OffloopError) as error:
            self._fail(error)
        else:
            if self.write_error is None:
                for rank in self.ranks.values():
                    rank.acknowledged = rank.recorded

    def _back_to_disk(self) -> None:
        for number, position in self.writer.positions.items():
            rank = self.ranks[number]
            rank.recorded = rank.acknowledged = position.seq

    def _fail(self, error: Exception) -> None:
        if self.write_error is None:
            self.write_error = str(error)
            for rank in self.ranks.values():
                rank.recorded = rank.acknowledged
            _log.error("run %s is not recorded at the moment: %s", self.name, error)
