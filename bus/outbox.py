"""Frames on their way to a socket that does not wait: kept in order, sent together, bounded."""

from collections import deque
from collections.abc import Callable

import zmq

from bus.errors import ConfigurationError
from bus.wire import MAX_FRAME, encode_bundle

__all__ = ["Outbox"]

BUNDLE_FRAMES = 256
BUNDLE_BYTES = 64 * 1024


class Outbox:
    """A queue of frames bounded in bytes; when it is full the oldest are dropped and counted.

    What has gathered is sent as one message: a message costs sender and receiver far more than a frame in it."""

    def __init__(self, send: Callable[[bytes, int], object], limit: int) -> None:
        self._send = send
        self._limit = limit
        self._frames: deque[bytes] = deque()
        self._message: bytes | None = None
        self._message_frames = self._message_size = 0
        self.size = 0
        """Bytes in the queue."""
        self.size_high = 0
        """The most bytes that an attempt to send it left in the queue."""
        self.dropped = 0
        """Frames given up because the queue was full."""

    def __len__(self) -> int:
        return len(self._frames) + self._message_frames

    def put(self, frame: bytes) -> None:
        """Puts a frame at the end.

        Raises:
            ConfigurationError: it is larger than the protocol allows.
        """
        size = len(frame)
        if size > MAX_FRAME:
            raise ConfigurationError(f"an event of {size:,} bytes cannot be sent: at most {MAX_FRAME:,} are allowed")
        self._frames.append(frame)
        self.size += size
        while self.size > self._limit and self._frames:
            self.size -= len(self._frames.popleft())
            self.dropped += 1

    def send(self) -> None:
        """Sends what the socket takes now; the rest stays for the next time."""
        try:
            while self._frames or self._message is not None:
                if self._message is None:
                    self._message = self._gather()
                self._send(self._message, zmq.NOBLOCK)
                self._message = None
                self.size -= self._message_size
                self._message_frames = self._message_size = 0
        except zmq.Again:
            self.size_high = max(self.size_high, self.size)

    def _gather(self) -> bytes:
        """Takes the frames of the next message from the front of the queue."""
        queue = self._frames
        gathered = [queue.popleft()]
        size = len(gathered[0])
        while queue and len(gathered) < BUNDLE_FRAMES and size + len(queue[0]) <= BUNDLE_BYTES:
            frame = queue.popleft()
            gathered.append(frame)
            size += len(frame)
        self._message_frames, self._message_size = len(gathered), size
        return gathered[0] if len(gathered) == 1 else encode_bundle(gathered)

    def clear(self) -> None:
        """Forgets what was not sent."""
        self._frames.clear()
        self._message = None
        self.size = self._message_frames = self._message_size = 0
