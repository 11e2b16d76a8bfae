"""Sockets: those at which a broker listens, those that stay connected to one, and how much may wait in them."""

from collections.abc import Callable

import zmq

from offloop.bus.errors import BrokerError, ConfigurationError
from offloop.bus.net.curve import ClientSecurity, ServerSecurity, allow_ipv6, check_listen_address
from offloop.bus.protocol.frames import MAX_FRAME
from offloop.bus.types.timeouts import Timeouts

KEEPALIVE_PROBES = 3
RECONNECT_MILLISECONDS = 100
RECONNECT_MAX_MILLISECONDS = 2000


# Without a bound: with one, any peer can make libzmq 4.3 abort the process, by a PING behind a full queue and a reset.
# The ConnectionGuard bounds what may wait.
RECEIVE_QUEUE = 0
ANSWER_QUEUE = 100
STREAM_QUEUE = 600
"""Messages for a slow consumer; each holds up to 80 KiB of events, see ``offloop.bus.broker.broker.LIVE_BATCH``."""
STREAM_LINGER = 1000
ACCEPT_QUEUE = 4096


def listen(
    context: "zmq.Context[zmq.Socket[bytes]]",
    kind: int,
    address: str,
    domain: str,
    security: ServerSecurity | None,
    timeouts: Timeouts,
) -> "zmq.Socket[bytes]":
    """A socket that is bound to ``address``: ``zmq.ROUTER`` for the control endpoint, ``zmq.PUB`` for the stream.
    The gatekeeper knows it by ``domain``. When it cannot be had, the context is left to be destroyed.

    Raises:
        BrokerError: the address is in use, or cannot be listened at.
        ConfigurationError: a broker must not listen there.
    """
    check_listen_address(address, security)
    bound: zmq.Socket[bytes] = context.socket(kind)
    bound.setsockopt(zmq.LINGER, STREAM_LINGER)
    allow_ipv6(bound, address)
    bound.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    bound.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
    bound.setsockopt(zmq.SNDHWM, STREAM_QUEUE if kind == zmq.PUB else ANSWER_QUEUE)
    bound.setsockopt(zmq.HANDSHAKE_IVL, round(timeouts.handshake * 1000))
    # With libzmq's 100 a burst of connections keeps honest ones out for seconds: TCP tries again after one.
    bound.setsockopt(zmq.BACKLOG, ACCEPT_QUEUE)
    if kind == zmq.ROUTER:
        # A publisher that reconnects keeps its name; the connection that it lost must not keep it out.
        bound.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # Sending is how we learn that a connection is gone.
        bound.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if address.startswith("tcp://"):
        notice_silence(bound, timeouts)
    if security is not None:
        security.apply(bound, domain)
    try:
        bound.bind(address)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise BrokerError(
                f"{address} is in use by another program: choose another port with '--listen'", address=address
            ) from None
        raise BrokerError(
            f"cannot listen at {address}: {error.strerror}; use an address like tcp://127.0.0.1:5570", address=address
        ) from None
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
