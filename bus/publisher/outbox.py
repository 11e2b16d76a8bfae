"""Events on their way to a broker: kept until it has them on disk, sent together, bounded."""

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import zmq

from offloop.bus.protocol.frames import MAX_FRAME, check_size, encode_control, encode_frame_batch

BATCH_FRAMES = 256
BATCH_BYTES = 64 * 1024


class _Batch(NamedTuple):
    """Frames in one message, which costs sender and receiver far more than a frame in it."""

    message: bytes
    first: int
    last: int
    size: int


class Outbox:
    """The frames of one rank in order, numbered from 1 as they are put in, until they are acknowledged.

    Sent frames stay in the send buffer, so that they can be sent again (:meth:`retransmit`) to a broker that was
    restarted or has lost some of them. The buffer is bounded in bytes: past the bound the oldest frames are removed. A
    frame that was sent before has most likely arrived already; one that was not is lost, and counted as dropped.

    A signal handler may raise after any call in here, as Ctrl-C does: what belongs together is done without a call in
    between."""

    def __init__(self, send: Callable[[bytes, int], object], limit: int) -> None:
        self._send = send
        self._limit = limit
        self._frames: deque[bytes] = deque()
        self._unsent: deque[_Batch] = deque()
        self._sent: deque[_Batch] = deque()
        # How many frames at the front are in a batch already.
        self._taken = 0
        self._announce = False
        self.seq = 0
        """Number of the frame that was put in last: how many ever were."""
        self.base_seq = 0
        """What :meth:`put` was given with it."""
        self.last_sent = 0
        """Number of the frame that was handed to the socket last."""
        self.paused = False
        """While true nothing is sent: no broker serves the run."""
        self.size = 0
        """Bytes kept, whether sent or not."""
        self.size_high = 0
        """The most bytes that were ever kept."""
        self.sent = 0
        """Frames handed to the socket, those sent once more not counted."""
        self.resent = 0
        """Frames sent again."""
        self.dropped = 0
        """Frames given up before they were sent, because the bound was reached."""

    def __len__(self) -> int:
        """Number of unsent frames."""
        # A copy, because another thread may send meanwhile.
        return len(self._frames) + sum(batch.last - batch.first + 1 for batch in tuple(self._unsent))

    @property
    def first(self) -> int:
        """Number of the oldest frame that is kept; of the next one when none is."""
        for batches in (self._sent, self._unsent):
            if batches:
                return batches[0].first
        return self.seq - len(self._frames) + 1

    def put(self, frame: bytes, base_seq: int = 0) -> None:
        """Puts a frame at the end; ``base_seq`` is the number of base events up to it. Raises ConfigurationError: it is
        larger than the protocol allows."""
        size = len(frame)
        if size > MAX_FRAME:
            check_size(size)
        self.size += size
        self.seq += 1
        self.base_seq = base_seq
        self._frames.append(frame)
        if self.size > self._limit:
            self._make_room()

    def skip_to(self, seq: int) -> None:
        """Continues behind the number ``seq``: frames between the last one and that are missing for good."""
        self._remove_taken()
        while self._frames:
            self._gather()
        resume = encode_control("resume", {"from": seq + 1, "after": self.seq})
        self._unsent.append(_Batch(resume, self.seq + 1, seq, 0))
        self.seq = seq

    def _make_room(self) -> None:
        self.size_high = max(self.size_high, self._limit)
        self._remove_taken()
        while self.size > self._limit and (self._sent or self._unsent or self._frames):
            if self._sent:
                self.size -= self._sent[0].size
                del self._sent[0]
                continue
            self._announce = True
            if self._unsent:
                batch = self._unsent[0]
                new = self._new_in(batch)
                self.size -= batch.size
                self.dropped += new
                del self._unsent[0]
            else:
                size = len(self._frames[0])
                self.size -= size
                self.dropped += 1
                del self._frames[0]

    def send(self) -> None:
        """Sends what the socket takes now; the rest stays for the next time."""
        if self.paused:
            return
        self._remove_taken()
        try:
            if self._announce:
                self._send(encode_control("resume", {"from": self.first}), zmq.NOBLOCK)
                self._announce = False
            while self._unsent or self._frames:
                if not self._unsent:
                    self._gather()
                batch = self._unsent[0]
                new = self._new_in(batch)
                self._send(batch.message, zmq.NOBLOCK)
                del self._unsent[0]
                self.last_sent = batch.last
                self.sent += new
                self.resent += batch.last - batch.first + 1 - new
                self._sent.append(batch)
        except zmq.Again:
            pass
        if self.size > self.size_high:
            self.size_high = self.size

    def _new_in(self, batch: _Batch) -> int:
        """The number of frames in a batch that were neither sent nor dropped before."""
        return max(0, batch.last - max(batch.first - 1, self.sent + self.dropped))

    def _gather(self) -> None:
        """Takes the frames of the next message from the front of the queue."""
        queue = self._frames
        first, rest = self.seq - len(queue) + 1, deque[bytes]()
        size = sum(map(len, queue)) if len(queue) <= BATCH_FRAMES else BATCH_BYTES + 1
        if size <= BATCH_BYTES:
            gathered = list(queue)
        else:
            gathered, size = [queue[0]], len(queue[0])
            for frame in islice(queue, 1, BATCH_FRAMES):
                if size + len(frame) > BATCH_BYTES:
                    break
                gathered.append(frame)
                size += len(frame)
        message = gathered[0] if len(gathered) == 1 else encode_frame_batch(gathered)
        taken = len(gathered)
        batch = _Batch(message, first, first + taken - 1, size)
        if taken == len(queue):
            self._frames = rest
            self._unsent.append(batch)
        else:
            self._taken = taken
            self._unsent.append(batch)
            self._remove_taken()

    def _remove_taken(self) -> None:
        while self._taken:
            self._taken -= 1
            del self._frames[0]

    def acknowledge(self, number: int) -> None:
        """Forgets the frames up to ``number``: they are on disk."""
        for batches in (self._sent, self._unsent):
            while batches and batches[0].last <= number:
                self.size -= batches[0].size
                del batches[0]

    def retransmit(self) -> None:
        """Sends all kept frames again, after a message with the number of the oldest."""
        unsent, sent = deque([*self._sent, *self._unsent]), deque[_Batch]()
        self._unsent, self._sent, self._announce = unsent, sent, True

    def clear(self) -> None:
        """Forgets everything."""
        self._frames.clear()
        self._unsent.clear()
        self._sent.clear()
        self.size = 0
