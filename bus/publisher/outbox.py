"""Send buffer of one rank's events: bounded, sent in batches, kept until the broker has recorded them."""

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import zmq

from offloop.bus.protocol.frames import MAX_FRAME, check_size, encode_control, encode_frame_batch

BATCH_FRAMES = 256
BATCH_BYTES = 64 * 1024


class _Batch(NamedTuple):
    """Frames in one message: a message costs sender and receiver far more than a frame in it."""

    message: bytes
    first: int
    last: int
    size: int


class Outbox:
    """The frames of one rank in order, numbered from 1, until they are acknowledged.

    Sent frames are kept for :meth:`retransmit`, to a broker that was restarted or has lost some. Above ``limit`` bytes
    the oldest frames are removed. If one was sent, it has most likely arrived; an unsent one counts as dropped.

    A signal handler may raise after any call here, as Ctrl-C does. So dependent changes have no call between them."""

    def __init__(self, send: Callable[[bytes, int], object], limit: int) -> None:
        self._send = send
        self.limit = limit
        self._frames: deque[bytes] = deque()
        self._unsent: deque[_Batch] = deque()
        self._sent: deque[_Batch] = deque()
        # Number of frames at the front that are in a batch already.
        self._taken = 0
        self._announce = False
        self.seq: int = 0  # number of the last frame, and so of all frames ever put in
        self.base_seq: int = 0
        self.last_sent: int = 0  # number of the last frame handed to the socket
        self.paused = False  # send nothing: no broker serves the run
        self.size: int = 0  # bytes of all kept frames, sent or not
        self.size_high: int = 0  # maximum of ``size`` so far
        self.sent: int = 0  # frames handed to the socket, each counted once
        self.resent: int = 0
        self.dropped: int = 0  # frames removed unsent because the limit was reached

    def __len__(self) -> int:
        # Unsent frames; a copy, because another thread may send meanwhile.
        return len(self._frames) + sum(batch.last - batch.first + 1 for batch in tuple(self._unsent))

    @property
    def first(self) -> int:
        """Number of the oldest kept frame, or of the next frame if none is kept."""
        for batches in (self._sent, self._unsent):
            if batches:
                return batches[0].first
        return self.seq - len(self._frames) + 1

    def put(self, frame: bytes, base_seq: int = 0) -> None:
        """Append a frame, or raise ConfigurationError if it is too large. ``base_seq`` counts base events up to it."""
        size = len(frame)
        if size > MAX_FRAME:
            check_size(size)
        self.size += size
        self.seq += 1
        self.base_seq = base_seq
        self._frames.append(frame)
        if self.size > self.limit:
            self._make_room()

    def _make_room(self) -> None:
        self.size_high = max(self.size_high, self.limit)
        self._remove_taken()
        while self.size > self.limit and (self._sent or self._unsent or self._frames):
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
        """Return the number of frames in a batch that were neither sent nor dropped before."""
        return max(0, batch.last - max(batch.first - 1, self.sent + self.dropped))

    def _gather(self) -> None:
        """Move the frames of the next message from the queue into a batch."""
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
        for batches in (self._sent, self._unsent):
            while batches and batches[0].last <= number:
                self.size -= batches[0].size
                del batches[0]

    def retransmit(self) -> None:
        """Queue all kept frames again, after a message with the number of the oldest."""
        unsent, sent = deque([*self._sent, *self._unsent]), deque[_Batch]()
        self._unsent, self._sent, self._announce = unsent, sent, True

    def clear(self) -> None:
        self._frames.clear()
        self._unsent.clear()
        self._sent.clear()
        self.size = 0
