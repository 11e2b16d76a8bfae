"""Hands recorded events to a broker as their publisher did: one connection for each rank."""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import msgpack
import zmq

from offloop.bus.errors import BrokerError
from offloop.bus.protocol.frames import Topic, encode_control, encode_frame_batch
from offloop.bus.publisher.connection import BrokerConnection
from offloop.bus.publisher.launch import TEMPORARY, error_by_name
from offloop.bus.publisher.outbox import BATCH_BYTES, BATCH_FRAMES
from offloop.bus.types.timeouts import Timeouts

_log = logging.getLogger("offloop")

KEPT_BYTES = 8 * 1024 * 1024

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


class _Batch(NamedTuple):
    """Events that follow one another, as one message."""

    message: bytes
    first: int
    last: int
    size: int


class Feed:
    """One rank's connection. What is put in is sent in order, and kept until the broker has it on disk: a broker that
    is started again is sent it once more. Commands are answered with a refusal.

    Raises:
        BrokerError: from any of its methods: the broker is gone for good, or takes the run no more.
    """

    def __init__(self, connection: BrokerConnection, rank: int, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._connection = connection
        self._rank = rank
        self.attempt: int = connection.welcome["attempt"]
        self.last = 0
        """Number of the event put in last."""
        self._acknowledged = 0
        self._frames: deque[tuple[int, bytes]] = deque()
        self._unsent: deque[_Batch] = deque()
        self._sent: deque[_Batch] = deque()
        self._size = 0
        # Number of the event that the broker expects, as far as it has said.
        self._next = 1
        self._away = False
        self._asks = False
        self.is_taken = True
        """Whether the broker has taken everything up to the last :meth:`ask`."""
        self._last_error: str | None = None
        self._died: float | None = None
        self._heard = self._probed = time.monotonic()

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        """What becomes readable when the broker says something."""
        return self._connection.socket

    @property
    def is_full(self) -> bool:
        """Whether so much waits for the broker that no more should be put in."""
        return self._size > KEPT_BYTES

    @property
    def is_settled(self) -> bool:
        """Whether the broker has everything on disk."""
        return self._acknowledged >= self.last

    def put(self, number: int, frame: bytes) -> None:
        """Puts in the event of that number; it goes out with the next :meth:`exchange`."""
        self._frames.append((number, frame))
        self._size += len(frame)
        self.last = number

    def exchange(self) -> None:
        """Sends what the connection takes, and takes what the broker says; does not wait."""
        self._listen()
        self._look_after_broker()
        if not self._away:
            with contextlib.suppress(zmq.Again):
                self._send()
        self._mind_silence()

    def _send(self) -> None:
        while self._unsent or self._frames:
            if not self._unsent:
                self._unsent.append(self._next_batch())
            batch = self._unsent[0]
            if batch.first != self._next:
                # What is missing in the recording is missing here.
                after = {"after": self._next - 1} if self._next else {}
                self._connection.send(encode_control("resume", {"from": batch.first, **after}), zmq.NOBLOCK)
            self._connection.send(batch.message, zmq.NOBLOCK)
            self._next = batch.last + 1
            self._sent.append(self._unsent.popleft())
        if self._asks:
            self._connection.send(encode_control("statistics", {"run": self._connection.run_name}), zmq.NOBLOCK)
            self._asks = False

    def _next_batch(self) -> _Batch:
        first, frame = self._frames.popleft()
        frames, last, size = [frame], first, len(frame)
        while self._frames and len(frames) < BATCH_FRAMES:
            number, frame = self._frames[0]
            if number != last + 1 or size + len(frame) > BATCH_BYTES:
                break
            self._frames.popleft()
            frames.append(frame)
            last, size = number, size + len(frame)
        return _Batch(frames[0] if len(frames) == 1 else encode_frame_batch(frames), first, last, size)

    def _listen(self) -> None:
        while (message := self._connection.receive()) is not None:
            self._heard = time.monotonic()
            kind, content = message.kind, message.content
            # Kinds that are not known come from a newer broker: they are skipped.
            if kind == "ack":
                self._acknowledge(content.get("seq"))
            elif kind == "retransmit":
                self._begin_again()
            elif kind == "command" and self._rank == 0:
                outcome = {"id": content.get("id"), "event": None, "batch": None, "error": _REFUSAL}
                with contextlib.suppress(zmq.Again):
                    self._connection.send(encode_control("applied", outcome), zmq.NOBLOCK)
            elif kind == "statistics":
                self.is_taken = True
            elif kind == "unknown" and not self._away:
                self._find_again()
            elif kind == "welcome":
                if content.get("ended") not in (None, self.last):
                    raise BrokerError(
                        f"the broker took the replay {self._connection.run_name!r} for lost while it could not be "
                        "reached, and ended its recording: start it again"
                    )
                self._acknowledge(content.get("acknowledged"))
                self._begin_again()
                self._away = False
                self._asks = not self.is_taken
            elif kind == "refused":
                if self._away:
                    why = error_by_name(str(content.get("error")), str(content.get("reason")))
                    if isinstance(why, TEMPORARY):
                        # Hello is said again.
                        self._last_error = str(why)
                        continue
                    raise BrokerError(f"the broker does not take the replay up again: {why}")
                # A key that may not view is refused an answer, and that is one too.
                self.is_taken = True
            elif kind == "trouble":
                self._last_error = str(content.get("reason"))
                _log.warning("run %s is not recorded at the moment: %s", self._connection.run_name, self._last_error)
            elif kind == "recovered":
                self._last_error = None

    def _acknowledge(self, number: object) -> None:
        if not isinstance(number, int) or number <= self._acknowledged:
            return
        self._acknowledged = number
        for batches in (self._sent, self._unsent):
            while batches and batches[0].last <= number:
                self._size -= batches.popleft().size

    def _begin_again(self) -> None:
        self._unsent.extendleft(reversed(self._sent))
        self._sent.clear()
        # The first of them shows the broker where it continues, even if it has those before it.
        self._next = 0

    def _find_again(self) -> None:
        self._away = True
        self._probed = time.monotonic()
        self._renew()

    def _renew(self) -> None:
        try:
            self._connection.renew()
        except (OSError, zmq.ZMQError) as error:
            self._last_error = str(error)  # the system may have room for a connection later

    def _look_after_broker(self) -> None:
        process, now = self._connection.process, time.monotonic()
        if process is None or process.ended() is None:
            self._died = None
        elif self._died is None:
            self._died = now
        elif now - self._died > self._timeouts.last_words:
            # Nothing comes any more of what it said before, which may have been that all has ended.
            refusal = process.refusal()
            if refusal is not None and not isinstance(refusal, TEMPORARY):
                raise BrokerError(
                    f"the broker of run {self._connection.run_name!r} ended, and does not continue: {refusal}"
                )
            try:
                is_restarted = process.restart()
            except OSError as error:
                self._last_error = str(error)
            else:
                if is_restarted:
                    self._find_again()

    def _mind_silence(self) -> None:
        now = time.monotonic()
        if self.is_settled and self.is_taken:
            self._heard = now
        elif now - self._heard > (patience := self._timeouts.broker_return):
            raise BrokerError(
                f"the broker at {self._connection.address} has recorded nothing for {patience:g} s: "
                f"{self._last_error or 'see whether it runs'}"
            )
        elif now - max(self._heard, self._probed) > self._timeouts.probe:
            # A broker that was started again says nothing to a publisher that it does not know, until that writes.
            self._probed = now
            if self._away:
                self._renew()
                return
            with contextlib.suppress(zmq.Again):
                self._connection.send(encode_control("report", {"last_sent": self._next - 1}), zmq.NOBLOCK)
            # The question itself may have been lost with a connection.
            self._asks |= not self.is_taken and now - self._heard > self._timeouts.taken

    def ask(self) -> None:
        """Asks the broker for a sign that it has taken everything so far: once it has, what another rank sends comes
        after that."""
        self._asks = True
        self.is_taken = False

    def close(self) -> None:
        """Ends the connection; waits a moment for a broker of ours to end."""
        self._connection.close()


def wait_for_any(feeds: Iterable[Feed], seconds: float) -> None:
    """Waits until the broker says something on one of the connections, no longer than so many seconds."""
    poller = zmq.Poller()
    for feed in feeds:
        poller.register(feed.socket, zmq.POLLIN)
    poller.poll(max(1, round(1000 * seconds)))
