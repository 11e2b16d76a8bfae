"""Channels: how control messages go to the broker of a run and its answers come back, on this machine or elsewhere."""

import asyncio
from typing import Any, Protocol

import zmq

from offloop.bus.errors import ProtocolError
from offloop.bus.net.sockets import connect_socket
from offloop.bus.protocol.frames import Control, decode_control, encode_control, split_frame


class Channel(Protocol):
    """Sends control messages and receives answers, each on whatever thread; one thread at a time."""

    peer: str
    """The other end, for error messages."""

    def send(self, kind: str, content: dict[str, Any]) -> bool:
        """Sends a message, without waiting; returns whether it could be sent now."""

    def receive(self) -> Control | None:
        """The next answer, if there is one now."""

    def wait(self, seconds: float) -> bool:
        """Waits so long, or until something has come; returns whether it has."""

    async def wait_async(self, seconds: float) -> bool:
        """As :meth:`wait`, while the event loop runs."""

    def close(self, linger: float = 0.0) -> None:
        """Ends it; what was sent last has so many seconds to be read. Can be called more than once."""


class SocketChannel(Channel):
    """A channel to a broker of this machine, by a connection of its own.

    Raises:
        ConfigurationError: that is not an address.
    """

    def __init__(self, address: str) -> None:
        self.peer = f"the broker at {address}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = connect_socket(self._context, zmq.DEALER, address)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        _open_channels.add(self)

    def send(self, kind: str, content: dict[str, Any]) -> bool:
        try:
            self._socket.send(encode_control(kind, content), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Control | None:
        while True:
            try:
                topic, body = split_frame(self._socket.recv(zmq.NOBLOCK))
                if topic is None:
                    return decode_control(body)
            except zmq.Again:
                return None
            except ProtocolError:
                continue

    def wait(self, seconds: float) -> bool:
        return bool(self._socket.poll(max(0, int(1000 * seconds))))

    async def wait_async(self, seconds: float) -> bool:
        return await wait_readable(self._socket, seconds)

    def close(self, linger: float = 0.0) -> None:
        _open_channels.discard(self)
        self._context.destroy(linger=round(1000 * linger))


# A context that the garbage collector finds in a cycle waits for its sockets for ever.
_open_channels: set[SocketChannel] = set()


async def wait_readable(socket: "zmq.Socket[bytes]", seconds: float) -> bool:
    """Waits at most so long, while the event loop runs, until a message is there; returns whether one is."""
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    descriptor = int(socket.getsockopt(zmq.FD))
    deadline = loop.time() + seconds
    loop.add_reader(descriptor, changed.set)
    try:
        # The descriptor reports changes only, so the event is cleared before the socket is asked.
        while not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            async with asyncio.timeout_at(deadline):
                await changed.wait()
            changed.clear()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
    return True
