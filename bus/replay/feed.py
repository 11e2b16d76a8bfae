"""Hands recorded events to a broker as their publisher did: one session for each rank."""

import time
from collections.abc import Iterable

import msgpack
import zmq

from offloop.bus.errors import BrokerError
from offloop.bus.protocol.frames import MAX_FRAME, Topic
from offloop.bus.publisher.session import BrokerSession

KEPT_BYTES = 8 * 1024 * 1024
BACKLOG_BYTES = KEPT_BYTES + 2 * MAX_FRAME
"""For the session: what is put in beyond :data:`KEPT_BYTES` has room."""
_BROKER_RETURN_SECONDS = 60.0
_TAKEN_SECONDS = 5.0
"""For which the broker's sign is waited for that it has taken everything, before it is asked again."""

_REFUSAL = "this is a recording that is replayed: its training has ended, and nothing can be sent to it"
_NUMBERS_BYTES = 64


def reframe(topic: Topic, body: bytes, attempt: int, left_out: int = 0, base_left_out: int = 0) -> bytes:
    """A recorded event as a frame of another run: everything is as it was recorded, but for the topic, the attempt, and
    the two numbers of the event, which are lower by how many events before it were left out."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(body[:_NUMBERS_BYTES])
    elements = unpacker.read_array_header()
    version, _, seq, base_seq = (unpacker.unpack() for _ in range(4))
    packer = msgpack.Packer(autoreset=False)
    packer.pack_array_header(elements)
    for number in (version, attempt, seq - left_out, base_seq - base_left_out):
        packer.pack(number)
    return topic.encode() + bytes(packer.bytes()) + body[unpacker.tell() :]


class Feed:
    """One rank's session with the broker. Events put in are sent in order, and again to a broker that is started again.
    Commands are answered with a refusal.

    Raises BrokerError: from any of its methods: the broker is gone for good, or takes the run no more."""

    def __init__(self, session: BrokerSession, rank: int) -> None:
        self._rank = rank
        self._session = session
        self._outbox = session.state.outbox
        self.attempt: int = session.welcome["attempt"]
        self.is_taken = True
        """The broker has taken everything up to the last :meth:`ask`."""
        self._asked = 0.0
        self._progress = 0, True
        self._progressed = time.monotonic()

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        """Becomes readable when the broker has sent a message."""
        return self._session.socket

    @property
    def is_full(self) -> bool:
        """So much waits for the broker that no more should be put in."""
        return self._outbox.size > KEPT_BYTES

    @property
    def is_settled(self) -> bool:
        """The broker has everything on disk."""
        return self._session.state.acknowledged >= self._outbox.seq

    def put(self, number: int, frame: bytes) -> None:
        """Puts in the event of that number; it goes out with the next :meth:`exchange`. Numbers left out are missing in
        the served run too."""
        if number != self._outbox.seq + 1:
            self._outbox.skip_to(number - 1)
        self._outbox.put(frame)
        self._session.state.end(number)

    def exchange(self) -> None:
        """Sends what the connection takes, and receives what the broker has sent; does not wait."""
        session, state, now = self._session, self._session.state, time.monotonic()
        while (message := session.receive()) is not None:
            if message.kind == "statistics":
                self.is_taken = True
            elif message.kind == "welcome":
                self._asked = 0.0
            elif message.kind == "command" and self._rank == 0:
                session.say("applied", {"id": message.content.get("id"), "error": _REFUSAL})
        self._outbox.send()
        session.tick()
        if not self.is_taken and not len(self._outbox) and now - self._asked > _TAKEN_SECONDS:
            # The question itself may have been lost with a connection.
            self._asked = now
            session.say("statistics", {"run": self._session.run_name})
        if (progress := (state.acknowledged, self.is_taken)) != self._progress or (self.is_settled and self.is_taken):
            self._progress, self._progressed = progress, now
        run, patience = self._session.run_name, _BROKER_RETURN_SECONDS
        if state.lost:
            raise BrokerError(f"the broker of the replay {run!r} does not take it up again: start it again")
        if now - self._progressed > patience:
            raise BrokerError(f"the broker of the replay {run!r} has recorded nothing for {patience:g} s")

    def ask(self) -> None:
        """Asks the broker for a sign that it has taken everything so far: once it has, what another rank sends comes
        after that."""
        self._asked = 0.0
        self.is_taken = False

    def close(self) -> None:
        """Ends the connection; waits a moment for a broker of ours to end."""
        self._session.close()


def wait_for_any(feeds: Iterable[Feed], seconds: float) -> None:
    """Waits for a message of the broker on one of the connections, no longer than so many seconds."""
    poller = zmq.Poller()
    for feed in feeds:
        poller.register(feed.socket, zmq.POLLIN)
    poller.poll(max(1, round(1000 * seconds)))
