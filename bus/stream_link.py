"""A subscriber's connection to a broker: the stream, and the lease that says what is wanted."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import zmq

from bus.demand import RENEW_SECONDS, Demand
from bus.errors import ConfigurationError
from bus.security import ClientSecurity, allow_ipv6
from bus.stream import StreamOrder
from bus.wire import MAX_FRAME, encode_control

__all__ = ["StreamLink", "connected", "notice_silence"]

STREAM_QUEUE = 5000
KEEPALIVE_SECONDS = 10
KEEPALIVE_PROBE_SECONDS = 5
KEEPALIVE_PROBES = 3
HANDSHAKE_MILLISECONDS = 5000
RECONNECT_MILLISECONDS = 100
RECONNECT_MAX_MILLISECONDS = 2000


def connected(
    context: "zmq.Context[zmq.Socket[bytes]]",
    kind: int,
    address: str,
    security: ClientSecurity | None,
    prepare: "Callable[[zmq.Socket[bytes]], object]" = lambda _: None,
) -> "zmq.Socket[bytes]":
    """A socket that stays connected to ``address``, through every loss of the connection.

    Raises:
        ConfigurationError: that is no address.
    """
    made: zmq.Socket[bytes] = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    made.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
    made.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MILLISECONDS)
    if address.startswith("tcp://"):
        notice_silence(made)
    allow_ipv6(made, address)
    if security is not None:
        security.apply(made)
    prepare(made)
    try:
        made.connect(address)
    except zmq.ZMQError as error:
        made.close()
        raise ConfigurationError(
            f"{address!r} is not an address of a broker ({error.strerror}): use one like tcp://127.0.0.1:5570"
        ) from None
    return made


def notice_silence(made: "zmq.Socket[bytes]") -> None:
    """Has the system close a connection of which the other side is gone without a word, and a new one be begun: a cable
    that is pulled closes none.

    ZeroMQ's own heartbeats would find out sooner, but libzmq 4.3 aborts the process when one waits behind a full queue
    and the connection is reset (libzmq issue 4767)."""
    made.setsockopt(zmq.TCP_KEEPALIVE, 1)
    made.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_SECONDS)
    made.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_PROBE_SECONDS)
    made.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
    made.setsockopt(zmq.TCP_MAXRT, KEEPALIVE_PROBES * KEEPALIVE_PROBE_SECONDS * 1000)
    made.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
    made.setsockopt(zmq.CONNECT_TIMEOUT, HANDSHAKE_MILLISECONDS)


class StreamLink:
    """The connection to a broker's stream, and to its door, where the subscriber's lease is renewed."""

    def __init__(
        self,
        stream: str,
        door: str,
        order: StreamOrder,
        demand: Demand,
        report: Callable[[], dict[str, Any]],
        name: str | None,
        security: ClientSecurity | None = None,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

        def subscribe(made: "zmq.Socket[bytes]") -> None:
            made.setsockopt(zmq.RCVHWM, STREAM_QUEUE)
            for topic in order.topics:
                made.subscribe(topic)

        try:
            self._socket = connected(self._context, zmq.SUB, stream, security, subscribe)
            renewals = connected(self._context, zmq.DEALER, door, security)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._lease = _Lease(renewals, {"run": order.run, "name": name, "demand": demand.to_wire()}, report)
        _open_links.add(self)

    def receive(self) -> bytes | None:
        """The next frame, if there is one now."""
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def wait(self, seconds: float) -> None:
        """Waits so long, or until a frame is there."""
        self._socket.poll(int(seconds * 1000))

    async def wait_async(self, seconds: float) -> None:
        """As :meth:`wait`, while the event loop goes on."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        descriptor = int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(descriptor, readable.set)
        try:
            # The descriptor tells only of changes, so what is there already has to be asked for.
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                await asyncio.wait_for(readable.wait(), seconds)
        except TimeoutError:
            return
        finally:
            loop.remove_reader(descriptor)

    def close(self) -> None:
        """Ends the connection."""
        _open_links.discard(self)
        self._lease.stop()
        self._context.destroy(linger=0)


# See bus.link: a context that the garbage collector finds in a cycle waits for its sockets for ever.
_open_links: set[StreamLink] = set()


class _Lease:
    """Tells the broker once a second what is wanted and how the subscriber is doing, on a thread of its own: a slow
    callback must not let the lease run out."""

    def __init__(self, door: "zmq.Socket[bytes]", wanted: dict[str, Any], report: Callable[[], dict[str, Any]]) -> None:
        self._socket = door
        self._wanted = wanted
        self._report = report
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="offloop-lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while True:
            message = encode_control("want", {**self._wanted, "report": self._report()})
            try:
                self._socket.send(message, zmq.NOBLOCK)
                while self._socket.poll(0):
                    self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                pass  # the broker does not read now: the next renewal says the same
            if self._stop.wait(RENEW_SECONDS):
                return

    def stop(self) -> None:
        """Ends the renewals; the lease runs out by itself."""
        self._stop.set()
        self._thread.join()
        self._socket.close()
