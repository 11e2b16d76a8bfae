"""Channels for control messages to a run's broker and its answers, on this machine or elsewhere."""

import asyncio
import os
import time
from contextlib import suppress
from typing import Any, Protocol

import zmq

from offloop.bus.errors import BrokerError, ProtocolError
from offloop.bus.net.sockets import connect_socket, in_use
from offloop.bus.protocol.frames import Control, decode_control, encode_control, split_frame
from offloop.bus.types.timeouts import Timeouts


class Channel(Protocol):
    """Sends control messages and receives answers, in one thread at a time."""

    peer: str  # the other end, for error messages

    def send(self, kind: str, content: dict[str, Any]) -> bool:
        """Send a message without waiting; return whether it was sent."""

    def receive(self) -> Control | None:
        """Return the next answer, if one has arrived."""

    def wait(self, seconds: float) -> bool:
        """Wait that many seconds, or until an answer arrives; return whether one has."""

    def close(self, linger: float = 0.0) -> None:
        """Close it; sent messages have ``linger`` seconds to be read. Further calls have no effect."""


class SocketChannel(Channel):
    """Channel to a broker on this machine. Raises ConfigurationError: the address is invalid."""

    def __init__(self, address: str) -> None:
        self.peer: str = f"the broker at {address}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = connect_socket(self._context, zmq.DEALER, address)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        in_use.add(self)

    def send(self, kind: str, content: dict[str, Any]) -> bool:
        try:
            self._socket.send(encode_control(kind, content), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Control | None:
        return receive_control(self._socket)

    def wait(self, seconds: float) -> bool:
        return bool(self._socket.poll(max(0, int(1000 * seconds))))

    def close(self, linger: float = 0.0) -> None:
        in_use.discard(self)
        self._context.destroy(linger=round(1000 * linger))


def receive_control(socket: "zmq.Socket[bytes]") -> Control | None:
    """Return the next control message, if one has arrived; skip malformed ones."""
    # This check takes a third of the time of a receive without a message.
    while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        with suppress(zmq.Again, ProtocolError):
            topic, body = split_frame(socket.recv(zmq.NOBLOCK))
            if topic is None:
                return decode_control(body)
    return None


async def wait_readable(socket: "zmq.Socket[bytes]", seconds: float) -> bool:
    """Wait that many seconds, while the event loop runs, for a message; return whether there is one."""
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    descriptor = int(socket.getsockopt(zmq.FD))
    deadline = loop.time() + seconds
    loop.add_reader(descriptor, changed.set)
    try:
        # The descriptor signals changes only, so the event is cleared before the socket is checked.
        while not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            async with asyncio.timeout_at(deadline):
                await changed.wait()
            changed.clear()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
    return True


def ask(channel: Channel, kind: str, content: dict[str, Any]) -> dict[str, Any]:
    """Send one request, return the answer, and close the channel. Raise BrokerError without an answer or if refused."""
    with RequestClient(channel) as client:
        return client(kind, content)


class RequestClient:
    """Sends requests by one channel, one after the other. Closes the channel at the end of its ``with`` block."""

    def __init__(self, channel: Channel, timeouts: Timeouts | None = None) -> None:
        self._channel = channel
        self._patience = (timeouts or Timeouts.default).answer

    def __call__(self, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        asked = os.urandom(8).hex()
        deadline = time.monotonic() + self._patience
        is_sent = self._channel.send(kind, {**content, "id": asked})
        while is_sent and self._channel.wait(deadline - time.monotonic()):
            answer = self._channel.receive()
            if answer is None or answer.content.get("id") != asked:
                continue
            if answer.kind == "refused":
                raise BrokerError(str(answer.content.get("reason", "the broker refused without a reason")))
            return answer.content
        raise BrokerError(f"{self._channel.peer} does not answer: it may be busy or gone")

    def __enter__(self) -> "RequestClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
