"""Events on their way to a broker: kept until it has them on disk, sent together, bounded."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import zmq

from bus.protocol.frames import MAX_FRAME, check_size, decode_frame_batch, encode_control, encode_frame_batch

BATCH_FRAMES = 256
BATCH_BYTES = 64 * 1024


class _Batch(NamedTuple):
    """Frames sent as one message: a message costs sender and receiver far more than a frame in it."""

    message: bytes
    first: int
    last: int
    size: int


class Outbox:
    """The frames of one rank in order, numbered from 1 as they are put in, until they are acknowledged.

    Sent frames stay in the send buffer, so that they can be sent again (:meth:`retransmit`) to a broker that was
    restarted or has lost some of them. The buffer is bounded in bytes: past the bound the oldest frames are removed. A
    frame that was sent before has most likely arrived already; one that was not is lost, and counted as dropped."""

    def __init__(self, send: Callable[[bytes, int], object], limit: int) -> None:
        self._send = send
        self._limit = limit
        self._frames: deque[bytes] = deque()
        self._unsent: deque[_Batch] = deque()
        self._sent: deque[_Batch] = deque()
        self._put = 0
        self._announce = False
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
        """How many frames wait to be sent."""
        # A copy, because another thread may send meanwhile.
        return len(self._frames) + sum(batch.last - batch.first + 1 for batch in tuple(self._unsent))

    @property
    def is_half_full(self) -> bool:
        """Whether what is kept takes more than half of what it may."""
        return self.size > self._limit // 2

    @property
    def count(self) -> int:
        """How many frames were ever put in: the number of the last one."""
        return self._put

    @property
    def first(self) -> int:
        """Number of the oldest frame that is kept; of the next one when none is."""
        for batches in (self._sent, self._unsent):
            if batches:
                return batches[0].first
        return self._put - len(self._frames) + 1

    def put(self, frame: bytes) -> None:
        """Puts a frame at the end.

        Raises:
            ConfigurationError: it is larger than the protocol allows.
        """
        size = len(frame)
        if size > MAX_FRAME:
            check_size(size)
        self._frames.append(frame)
        self._put += 1
        self.size += size
        if self.size > self._limit:
            self._make_room()

    def _make_room(self) -> None:
        self.size_high = max(self.size_high, self._limit)
        while self.size > self._limit and (self._sent or self._unsent or self._frames):
            if self._sent:
                self.size -= self._sent.popleft().size
                continue
            if self._unsent:
                batch = self._unsent.popleft()
                self.size -= batch.size
                self.dropped += self._new_in(batch)
            else:
                self.size -= len(self._frames.popleft())
                self.dropped += 1
            self._announce = True

    def send(self) -> None:
        """Sends what the socket takes now; the rest stays for the next time."""
        if self.paused:
            return
        try:
            if self._announce:
                self._send(encode_control("resume", {"from": self.first}), zmq.NOBLOCK)
                self._announce = False
            while self._unsent or self._frames:
                if not self._unsent:
                    self._unsent.append(self._next_batch())
                batch = self._unsent[0]
                self._send(batch.message, zmq.NOBLOCK)
                self._sent.append(self._unsent.popleft())
                self.last_sent = batch.last
                new = self._new_in(batch)
                self.sent += new
                self.resent += batch.last - batch.first + 1 - new
        except zmq.Again:
            pass
        if self.size > self.size_high:
            self.size_high = self.size

    def _new_in(self, batch: _Batch) -> int:
        """The number of frames in a batch that were neither sent nor dropped before."""
        return max(0, batch.last - max(batch.first - 1, self.sent + self.dropped))

    def _next_batch(self) -> _Batch:
        """Takes the frames of the next message from the front of the queue."""
        queue = self._frames
        first = self._put - len(queue) + 1
        size = sum(map(len, queue)) if len(queue) <= BATCH_FRAMES else BATCH_BYTES + 1
        if size <= BATCH_BYTES:
            gathered = list(queue)
            queue.clear()
        else:
            gathered = [queue.popleft()]
            size = len(gathered[0])
            while queue and len(gathered) < BATCH_FRAMES and size + len(queue[0]) <= BATCH_BYTES:
                frame = queue.popleft()
                gathered.append(frame)
                size += len(frame)
        message = gathered[0] if len(gathered) == 1 else encode_frame_batch(gathered)
        return _Batch(message, first, first + len(gathered) - 1, size)

    def acknowledge(self, number: int) -> None:
        """Forgets the frames up to ``number``: they are on disk."""
        for batches in (self._sent, self._unsent):
            while batches and batches[0].last <= number:
                self.size -= batches.popleft().size

    def retransmit(self) -> None:
        """Sends all kept frames again, after a message with the number of the oldest."""
        self._unsent.extendleft(reversed(self._sent))
        self._sent.clear()
        self._announce = True

    @property
    def oldest(self) -> bytes | None:
        """The oldest frame that is kept."""
        for batches in (self._sent, self._unsent):
            if batches:
                message, first, last, _ = batches[0]
                frame: bytes = message if first == last else decode_frame_batch(message[1:])[0]
                return frame
        return self._frames[0] if self._frames else None

    def put_in_front(self, frame: bytes) -> None:
        """Puts a frame before the oldest one that is kept, with the number before it, and sends all again."""
        number = self.first - 1
        self.retransmit()
        self._unsent.appendleft(_Batch(frame, number, number, len(frame)))
        self.size += len(frame)

    def clear(self) -> None:
        """Forgets everything."""
        self._frames.clear()
        self._unsent.clear()
        self._sent.clear()
        self.size = 0
