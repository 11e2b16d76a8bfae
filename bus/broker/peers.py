"""The connections at a broker's control endpoint."""

from typing import Any

import zmq

from offloop.bus.protocol.frames import encode_control


class Peers:
    """The peers that are connected to the control endpoint ``socket``."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket

    def send(self, identity: bytes, kind: str, content: dict[str, Any]) -> bool:
        """Sends a control message, which is dropped when the peer does not read; whether the peer is connected."""
        try:
            self._socket.send_multipart([identity, encode_control(kind, content)], zmq.NOBLOCK)
        except zmq.Again:
            return True
        except zmq.ZMQError:
            return False
        return True

    def is_there(self, identity: bytes) -> bool:
        """Whether a peer is connected, as far as the socket has noticed."""
        return self.send(identity, "beat", {})
