"""Sockets: those at which a broker listens, those that stay connected to one, and how much may wait in them."""

from collections.abc import Callable

import zmq

from offloop.bus.errors import BrokerError, ConfigurationError
from offloop.bus.protocol.frames import MAX_FRAME

RECONNECT_MILLISECONDS = 100
RECONNECT_MAX_MILLISECONDS = 2000
HANDSHAKE_MILLISECONDS = 5000

# Without a bound: with one, any peer can make libzmq 4.3 abort the process, by a PING behind a full queue and a reset.
RECEIVE_QUEUE = 0
ANSWER_QUEUE = 100
STREAM_QUEUE = 600
"""Messages for a slow consumer; each holds up to 80 KiB of events, see ``offloop.bus.broker.broker.LIVE_BATCH``."""
STREAM_LINGER = 1000
ACCEPT_QUEUE = 4096

in_use: set[object] = set()
"""The owners of open contexts. The garbage collector makes a context that it finds in a cycle forget its sockets before
anything can close them, and the context then waits for them for ever. What is held here it does not collect."""


def listen(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str) -> "zmq.Socket[bytes]":
    """A socket that is bound to the Unix socket ``address``: ``zmq.ROUTER`` for the control endpoint, ``zmq.PUB`` for
    the event feed. When it cannot be had, the context is left to be destroyed.

    Raises BrokerError: the address cannot be listened at."""
    bound: zmq.Socket[bytes] = context.socket(kind)
    bound.setsockopt(zmq.LINGER, STREAM_LINGER)
    bound.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    bound.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
    bound.setsockopt(zmq.SNDHWM, STREAM_QUEUE if kind == zmq.PUB else ANSWER_QUEUE)
    bound.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
    # With libzmq's 100 a burst of connections keeps others out.
    bound.setsockopt(zmq.BACKLOG, ACCEPT_QUEUE)
    if kind == zmq.ROUTER:
        # A publisher that reconnects keeps its name; the connection that it lost must not keep it out.
        bound.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # Sending is how we learn that a connection is gone.
        bound.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        bound.bind(address)
    except zmq.ZMQError as error:
        raise BrokerError(f"cannot listen at {address}: {error.strerror}", address=address) from None
    return bound


def connect_socket(
    context: "zmq.Context[zmq.Socket[bytes]]",
    kind: int,
    address: str,
    prepare: "Callable[[zmq.Socket[bytes]], object]" = lambda _: None,
) -> "zmq.Socket[bytes]":
    """A socket that stays connected to ``address``, through every loss of the connection.

    Raises ConfigurationError: that is not an address."""
    made: zmq.Socket[bytes] = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    made.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
    made.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MILLISECONDS)
    prepare(made)
    try:
        made.connect(address)
    except zmq.ZMQError as error:
        made.close()
        raise ConfigurationError(
            f"{address!r} is not an address of a broker ({error.strerror}): use one like ipc:///runs/NAME/broker.sock"
        ) from None
    return made
