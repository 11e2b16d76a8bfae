"""One rank of a live run: order and recording of its events, and the state of its publisher."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from offloop.bus.broker.messages import StackMemory
from offloop.bus.errors import ConfigurationError, ProtocolError
from offloop.bus.protocol.frames import CHECKPOINT, COMMAND, DEMAND, END, EventBody, split_frame
from offloop.bus.protocol.order import SEVERITY, base_seq_problem
from offloop.bus.types.actor import ActorName
from offloop.bus.types.event import OWN, Event
from offloop.bus.types.timestamp import TrainingTime

MAX_TOPICS = 200
QUIET_SECONDS = 0.2  # the stream of a dead process ends as lost after this long without any message
REAP_SECONDS = 2.0  # longest wait for that silence
UNSEEN_SECONDS = 60.0  # the same for a disconnected publisher whose process the broker cannot see
RETRANSMIT_SECONDS = 0.5
PUBLISHED_MARKS = (END, DEMAND, COMMAND, CHECKPOINT)  # marks that publishers may send


class Placement(enum.Enum):
    """Position of an event in its rank's order."""

    NEXT = enum.auto()
    EARLY = enum.auto()  # events before it are missing
    DUPLICATE = enum.auto()


@dataclass
class LiveRank:
    """One rank, without sockets and processes. Times are monotonic, in seconds."""

    rank: int
    actor: ActorName | None = None
    publisher_id: str = ""  # the publisher's own id, unchanged by reconnects
    identity: bytes | None = None  # its connection; ``None`` after a restart of the broker, until it reconnects
    pid: int | None = None  # its process, if that is visible on this machine
    started: int | None = None  # start time of the process, see ``offloop.bus.processes.start_time``
    stacks: StackMemory | None = None  # of the process, if it shows its stacks
    seq: int = 0  # last event accepted, or known to be lost
    base_seq: int = 0  # ``base_seq`` of the last accepted event
    base_seq_at: int = 0  # ``seq`` of the last accepted event
    time: int = 0  # time of the last accepted event, in nanoseconds since 1970
    recorded: int = 0  # last event in the recording, flushed or not
    acknowledged: int = 0  # last event on disk
    ended: bool = False
    last: EventBody | None = None  # last event other than marks, since this broker's start
    end: tuple[bytes, EventBody, bytes] | None = None  # topic, event and body of its end
    died: float | None = None
    """Time at which its process was found dead, or the connection of an invisible process gone."""
    reached: TrainingTime | None = None  # of an actor: the training time that was sent to it
    report: Mapping[str, Any] = field(default_factory=dict)
    reported_at: float = 0.0
    names: dict[bytes, str] = field(default_factory=dict)  # topics used by its connection, with their event names
    _acknowledgement_sent: int = 0
    _requested_after: int = -1
    _requested_at: float = 0.0
    _undecodable: int = 0  # number of an event that arrived malformed

    def add_topic(self, run: str, topic: bytes, frame: bytes) -> str:
        """Check a new topic, add it to ``names``, and return its event name; raise ProtocolError if not allowed."""
        parsed, _ = split_frame(frame)
        if parsed is None or (parsed.run, parsed.rank) != (run, self.rank):
            raise ProtocolError(f"an event of {parsed} from the publisher of {run}/{self.rank}")
        name = parsed.name
        if name.startswith("$") and name not in PUBLISHED_MARKS:
            raise ProtocolError(f"publishers do not send {name[:40]!r}: their marks are {', '.join(PUBLISHED_MARKS)}")
        if name.startswith(OWN):
            try:
                Event(name)
            except ConfigurationError as error:
                raise ProtocolError(str(error)) from None
        if len(self.names) >= MAX_TOPICS:
            raise ProtocolError(f"{run}/{self.rank} has sent {MAX_TOPICS} kinds of events, the maximum")
        self.names[topic] = name
        return name

    def take(self, name: str, event: EventBody) -> Placement:
        """Accept an event if it is the next one. Raise ProtocolError for an inconsistent one, and after the end."""
        seq = event.seq
        if seq <= self.seq:
            return Placement.DUPLICATE
        if self.ended:
            raise ProtocolError("an event after its end")
        if seq > self.seq + 1:
            return Placement.EARLY
        problem = base_seq_problem(name, seq, event.base_seq, (self.base_seq_at, self.base_seq))
        if problem is None and name == END:
            problem = _end_problem(event)
            self.ended = problem is None
        if problem is not None:
            raise ProtocolError(problem)
        self.seq = self.base_seq_at = seq
        self.base_seq = event.base_seq
        self.time = event.time
        if not name.startswith("$"):
            self.last = event
        return Placement.NEXT

    def is_lost(self, number: int | None) -> bool:
        """Return whether a refused event was the next one, and so is lost.

        An event without a readable number counts only if it repeats after a retransmit request."""
        if self.ended:
            return False
        if number is not None:
            return number == self.seq + 1
        if self._requested_after == self.seq and self._undecodable != self.seq + 1:
            self._undecodable = self.seq + 1
            return False
        return self._requested_after == self.seq

    def should_request(self, now: float) -> bool:
        """Return whether to request missing events, and note that: at most once in :data:`RETRANSMIT_SECONDS`."""
        if self.identity is None or now - self._requested_at <= RETRANSMIT_SECONDS:
            return False
        self._requested_at, self._requested_after = now, self.seq
        return True

    @property
    def retransmit_after(self) -> int:
        """Last event that need not be sent again."""
        return min(self.seq, self.recorded)

    def acknowledgement(self) -> int | None:
        """Return the number to acknowledge now, if it is new, and note that it is sent."""
        if self.acknowledged <= self._acknowledgement_sent:
            return None
        self._acknowledgement_sent = self.acknowledged
        return self.acknowledged

    def note_presence(self, is_there: bool, now: float) -> None:
        """Note whether its process, or the connection of an invisible one, exists."""
        self.died = None if is_there else self.died or now

    def is_dead(self, heard: float, now: float) -> bool:
        """Return whether it is dead and all its messages were received.

        A death may be noticed before the last message arrives, so there must be a silence since ``heard``."""
        if self.died is None or self.ended:
            return False
        if self.pid is None:
            return now - self.died > UNSEEN_SECONDS
        return now - max(self.died, heard) > QUIET_SECONDS or now - self.died > REAP_SECONDS


def _end_problem(event: EventBody) -> str | None:
    status = event.fields.get("status")
    if status not in SEVERITY:
        return f"its end has the status {str(status)[:40]!r}: use {', '.join(SEVERITY)}"
    for name in ("error", "reason"):
        if not isinstance(event.fields.get(name), str | None):
            return f"its end has a value of {name!r} that is not a text"
    return None
