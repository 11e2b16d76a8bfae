"""Sockets: those at which a broker listens, those that stay connected to one, and how much may wait in them."""

from collections.abc import Callable

import zmq

from offloop.bus.errors import BrokerError, ConfigurationError
from offloop.bus.net.curve import ClientSecurity, allow_ipv6
from offloop.bus.protocol.frames import MAX_FRAME
from offloop.bus.types.timeouts import Timeouts

KEEPALIVE_PROBES = 3
RECONNECT_MILLISECONDS = 100
RECONNECT_MAX_MILLISECONDS = 2000


# Without a bound: with one, any peer can make libzmq 4.3 abort the process, by a PING behind a full queue and a reset.
RECEIVE_QUEUE = 0
ANSWER_QUEUE = 100
STREAM_QUEUE = 600
"""Messages for a slow consumer; each holds up to 80 KiB of events, see ``offloop.bus.broker.broker.LIVE_BATCH``."""
STREAM_LINGER = 1000
ACCEPT_QUEUE = 4096


def listen(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str, timeouts: Timeouts
) -> "zmq.Socket[bytes]":
    """A socket that is bound to the Unix socket ``address``: ``zmq.ROUTER`` for the control endpoint, ``zmq.PUB`` for
    the event feed. When it cannot be had, the context is left to be destroyed.

    Raises:
        BrokerError: the address cannot be listened at.
    """
    bound: zmq.Socket[bytes] = context.socket(kind)
    bound.setsockopt(zmq.LINGER, STREAM_LINGER)
    bound.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    bound.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
    bound.setsockopt(zmq.SNDHWM, STREAM_QUEUE if kind == zmq.PUB else ANSWER_QUEUE)
    bound.setsockopt(zmq.HANDSHAKE_IVL, round(timeouts.handshake * 1000))
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
    security: ClientSecurity | None,
    prepare: "Callable[[zmq.Socket[bytes]], object]" = lambda _: None,
    timeouts: Timeouts | None = None,
) -> "zmq.Socket[bytes]":
    """A socket that stays connected to ``address``, through every loss of the connection.

    Raises:
        ConfigurationError: that is not an address.
    """
    made: zmq.Socket[bytes] = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    made.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
    made.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MILLISECONDS)
    if address.startswith("tcp://"):
        notice_silence(made, timeouts or Timeouts.default)
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


def notice_silence(made: "zmq.Socket[bytes]", timeouts: Timeouts) -> None:
    """Has the system close a connection of which the other side is gone without a word, and a new one be begun: a cable
    that is pulled closes none.

    ZeroMQ's own heartbeats would find out sooner, but libzmq 4.3 aborts the process when one waits behind a full queue
    and the connection is reset (libzmq issue 4767)."""
    made.setsockopt(zmq.TCP_KEEPALIVE, 1)
    made.setsockopt(zmq.TCP_KEEPALIVE_IDLE, round(timeouts.keepalive))
    made.setsockopt(zmq.TCP_KEEPALIVE_INTVL, round(timeouts.keepalive_probe))
    made.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
    made.setsockopt(zmq.TCP_MAXRT, KEEPALIVE_PROBES * round(timeouts.keepalive_probe * 1000))
    made.setsockopt(zmq.HANDSHAKE_IVL, round(timeouts.handshake * 1000))
    made.setsockopt(zmq.CONNECT_TIMEOUT, round(timeouts.handshake * 1000))
