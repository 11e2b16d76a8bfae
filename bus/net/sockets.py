"""Sockets of brokers and their peers, with the limits of their queues."""

from collections.abc import Callable

import zmq

from offloop.bus.errors import BrokerError, ConfigurationError
from offloop.bus.protocol.frames import MAX_FRAME

RECONNECT_MILLISECONDS = 100
RECONNECT_MAX_MILLISECONDS = 2000
HANDSHAKE_MILLISECONDS = 5000

# Unlimited: with a limit, any peer can make libzmq 4.3 abort the process, by a PING behind a full queue and a reset.
RECEIVE_QUEUE = 0
ANSWER_QUEUE = 100
STREAM_QUEUE = 600
"""Messages for a slow consumer, with up to 80 KiB of events each, see ``offloop.bus.broker.broker.LIVE_BATCH``."""
STREAM_LINGER = 1000
ACCEPT_QUEUE = 4096

in_use: set[object] = set()
"""Owners of open contexts, kept from the garbage collector: in a cycle it would make a context forget its sockets
before they are closed, and the context would wait for them for ever."""


def listen(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str) -> "zmq.Socket[bytes]":
    """Bind a socket to the Unix socket ``address``: ``zmq.ROUTER`` for the control endpoint, ``zmq.PUB`` for events."""
    bound: zmq.Socket[bytes] = context.socket(kind)
    bound.setsockopt(zmq.LINGER, STREAM_LINGER)
    bound.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    bound.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
    bound.setsockopt(zmq.SNDHWM, STREAM_QUEUE if kind == zmq.PUB else ANSWER_QUEUE)
    bound.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
    # libzmq's default of 100 would refuse peers during a burst of connections.
    bound.setsockopt(zmq.BACKLOG, ACCEPT_QUEUE)
    if kind == zmq.ROUTER:
        # A publisher keeps its name when it reconnects; its lost connection must not block it.
        bound.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # Sending shows that a connection is gone.
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
    """Connect a socket to ``address``. It reconnects by itself."""
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
