"""The connections at a broker's control endpoint: sends to them, and closes those that send what has to be dropped."""

from typing import Any

import zmq

from offloop.bus.broker.connection_guard import ConnectionGuard
from offloop.bus.protocol.frames import encode_control

WASTED_MESSAGES = 2000
WASTED_BYTES = 32 << 20
"""How much of what is dropped may come from a connection at a time, before it is closed."""


class Peers:
    """The peers that are connected to the control endpoint ``socket``."""

    def __init__(self, socket: "zmq.Socket[bytes]", guard: ConnectionGuard) -> None:
        self._socket = socket
        self._guard = guard
        self._wasted: dict[bytes, tuple[int, int]] = {}
        self._gone: set[bytes] = set()

    def send(self, identity: bytes, kind: str, content: dict[str, Any]) -> bool:
        """Sends a control message, which is dropped when the peer does not read; whether the peer is connected."""
        try:
            self._socket.send_multipart([identity, encode_control(kind, content)], zmq.NOBLOCK)
        except zmq.Again:
            return True
        except zmq.ZMQError:
            self._gone.add(identity)
            return False
        return True

    def is_there(self, identity: bytes) -> bool:
        """Whether a peer is connected, as far as the socket has noticed."""
        return self.send(identity, "beat", {})

    def is_connected(self, identity: bytes) -> bool:
        """Whether a peer is known to be connected at this very moment."""
        # Asked for its events, the socket takes what its connections have to say at once.
        self._socket.getsockopt(zmq.EVENTS)
        try:
            self._socket.send_multipart([identity, encode_control("beat", {})], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def know(self, message: zmq.Frame) -> None:
        """Notes that a message came from a publisher or consumer, whose connection stays when descriptors are short."""
        self._guard.know(int(message.get(zmq.SRCFD)))

    def waste(self, identity: bytes, message: zmq.Frame) -> None:
        """Counts what is dropped of a connection while more waits than is taken; closes one that sends too much."""
        messages, size = self._wasted.get(identity, (0, 0))
        self._wasted[identity] = messages + 1, size + len(message)
        if self.has_wasted_too_much(identity):
            self._guard.close_connection(int(message.get(zmq.SRCFD)), lambda: self.is_connected(identity))

    def has_wasted_too_much(self, identity: bytes) -> bool:
        """Whether so much of what a connection sends was dropped that the rest is left unread."""
        wasted = self._wasted.get(identity)
        return wasted is not None and (wasted[0] > WASTED_MESSAGES or wasted[1] > WASTED_BYTES)

    def is_gone(self, identity: bytes) -> bool:
        """Whether nothing that is asked for there can be answered: the connection was gone when it was last sent to."""
        return identity in self._gone

    def forget_waste(self) -> None:
        """Nothing more waits to be read: whatever was dropped has delayed no peer."""
        self._wasted.clear()
        self._gone.clear()
