"""One rank of a live run: the order of its events, what is recorded of them, and how its publisher is."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from offloop.bus.errors import ProtocolError
from offloop.bus.protocol.frames import CHECKPOINT, COMMAND, CUT, DEMAND, END, EventBody, split_frame
from offloop.bus.protocol.order import SEVERITY, base_seq_problem

MAX_TOPICS = 200
QUIET_SECONDS = 0.2
"""For which nothing must have come after a publisher's process died for its stream to end as lost."""
REAP_SECONDS = 2.0
"""The longest that a broker waits for that silence."""
UNSEEN_SECONDS = 60.0
"""For which the connection may be gone of a publisher whose process the broker cannot see."""
RETRANSMIT_SECONDS = 0.5
PUBLISHED_MARKS = (END, DEMAND, COMMAND, CHECKPOINT)
"""The marks that a publisher may send; :attr:`LiveRank.may_cut` is about one more."""


class Placement(enum.Enum):
    """Place of an event among those of its rank."""

    NEXT = enum.auto()
    EARLY = enum.auto()
    """Events before it are missing."""
    DUPLICATE = enum.auto()


@dataclass
class LiveRank:
    """One rank, without its sockets and processes. Times are seconds on a steady clock."""

    rank: int
    publisher_id: str = ""
    """The publisher's own id, the same through every connection."""
    identity: bytes | None = None
    """Its connection; ``None`` until it has one to a broker that was started again."""
    pid: int | None = None
    """Its process, if that is one of this machine."""
    started: int | None = None
    """When that began, see :func:`offloop.bus.processes.start_time`."""
    seq: int = 0
    """The last event that was accepted, or the last one that is known to be lost."""
    base_seq: int = 0
    """Of the last event that was accepted."""
    base_seq_at: int = 0
    """``seq`` of the event that ``base_seq`` is of."""
    time: int = 0
    """Of the last event that was accepted, in nanoseconds since 1970."""
    recorded: int = 0
    """The last event in the recording, on disk or about to be."""
    acknowledged: int = 0
    """The last event on disk."""
    ended: bool = False
    last: EventBody | None = None
    """Its last event that is not a mark; ``None`` until one came to this broker."""
    end: tuple[bytes, EventBody, bytes] | None = None
    """Topic, event and body of its end."""
    may_cut: bool = False
    """It may send ``$cut``: it sends a recording again."""
    died: float | None = None
    """When its process was found dead, or the connection gone of one that cannot be seen."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """Its last report."""
    reported_at: float = 0.0
    """When that came."""
    names: dict[bytes, str] = field(default_factory=dict)
    """The topics that its connection has used, and the names of events in them."""
    _acknowledgement_sent: int = 0
    _requested_after: int = -1
    _requested_at: float = 0.0
    _undecodable: int = 0  # the event in whose place something came that cannot be decoded

    # -- events -------------------------------------------------------------------------------------------------------

    def add_topic(self, run: str, topic: bytes, frame: bytes) -> str:
        """The name of the event in the first frame that begins with ``topic``; it is in :attr:`names` from then on.
        Raises ProtocolError: it is not one that this rank of that run may send."""
        parsed, _ = split_frame(frame)
        if parsed is None or (parsed.run, parsed.rank) != (run, self.rank):
            raise ProtocolError(f"an event of {parsed} from the publisher of {run}/{self.rank}")
        name = parsed.name
        if name.startswith("$") and name not in PUBLISHED_MARKS and not (name == CUT and self.may_cut):
            raise ProtocolError(f"publishers do not send {name[:40]!r}: their marks are {', '.join(PUBLISHED_MARKS)}")
        if len(self.names) >= MAX_TOPICS:
            raise ProtocolError(f"{run}/{self.rank} has sent {MAX_TOPICS} kinds of events, which is as many as may be")
        self.names[topic] = name
        return name

    def take(self, name: str, event: EventBody) -> Placement:
        """Accepts an event that is the next one. Raises ProtocolError: it would be, but cannot be what it says, or
        comes after the end."""
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
        """Whether the next event is lost because a refused one came in its place: by its number if that can be read. A
        frame without one counts only when it comes again in the place of the event that was requested."""
        if self.ended:
            return False
        if number is not None:
            return number == self.seq + 1
        if self._requested_after == self.seq and self._undecodable != self.seq + 1:
            self._undecodable = self.seq + 1
            return False
        return self._requested_after == self.seq

    def should_request(self, now: float) -> bool:
        """Whether to request the events after :attr:`retransmit_after` now, which notes that it is done: not without a
        connection, and not twice within :data:`RETRANSMIT_SECONDS`."""
        if self.identity is None or now - self._requested_at <= RETRANSMIT_SECONDS:
            return False
        self._requested_at, self._requested_after = now, self.seq
        return True

    @property
    def retransmit_after(self) -> int:
        """The last event that need not be sent again."""
        return min(self.seq, self.recorded)

    def acknowledgement(self) -> int | None:
        """The number to acknowledge now, which counts as sent then; ``None`` when there is no new one."""
        if self.acknowledged <= self._acknowledgement_sent:
            return None
        self._acknowledgement_sent = self.acknowledged
        return self.acknowledged

    # -- its publisher ------------------------------------------------------------------------------------------------

    def note_presence(self, is_there: bool, now: float) -> None:
        """Notes whether its process, or its connection if that is not seen, is there."""
        self.died = None if is_there else self.died or now

    def is_dead(self, heard: float, now: float) -> bool:
        """Whether it is gone and everything that it sent has come. A death may be noticed before the last message, so
        nothing must have been ``heard`` from any peer for a while."""
        if self.died is None or self.ended:
            return False
        if self.pid is None:
            return now - self.died > UNSEEN_SECONDS
        return now - max(self.died, heard) > QUIET_SECONDS or now - self.died > REAP_SECONDS


def _end_problem(event: EventBody) -> str | None:
    """What is wrong with an ``$end``, which all readers have to understand alike."""
    status = event.fields.get("status")
    if status not in SEVERITY:
        return f"its end has the status {str(status)[:40]!r}: use {', '.join(SEVERITY)}"
    for name in ("error", "reason"):
        if not isinstance(event.fields.get(name), str | None):
            return f"its end has a value of {name!r} that is not a text"
    return None
