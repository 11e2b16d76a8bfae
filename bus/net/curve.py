"""Who may talk to a broker over TCP: CURVE keys on both sides, and an allow-list that decides at every handshake.

CURVE (https://rfc.zeromq.org/spec/26) encrypts the connection and proves both keys; ZAP
(https://rfc.zeromq.org/spec/27) is how ZeroMQ asks whether a key is admitted. The answer comes from the
broker's own poll loop, by :class:`Gatekeeper`.
"""

import contextlib
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from offloop.bus.errors import ConfigurationError
from offloop.bus.net.allow_list import AllowList
from offloop.bus.net.keys import KeyPair, load_public_key, load_secret_key

_log = logging.getLogger("offloop.broker")

CONTROL = "control endpoint"
STREAM = "stream"

ROLE_NEEDED = {
    "hello": "publish",
    "resume": "publish",
    "report": "publish",
    "events": "publish",
    "applied": "publish",
    "lease": "view",
    "handled": "view",
    "runs": "view",
    "fetch": "view",
    "fetch_segment": "view",
    "statistics": "view",
    "command": "command",
}
"""The role that a control message of each kind takes; events themselves take ``publish``."""

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_BURST = 100
_NAMED_REFUSALS = 10

_LOOPBACK = re.compile(r"tcp://(127(?:\.\d{1,3}){3}|localhost|\[::1\]):(\d{1,5}|\*)\Z")
_TCP = re.compile(r"tcp://(\*|[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]):(\d{1,5}|\*)\Z")


@dataclass(frozen=True)
class ServerSecurity:
    """A broker's keys, and the file of those that it admits."""

    keys: KeyPair
    allow_list: Path

    def apply(self, socket: "zmq.Socket[bytes]", domain: str) -> None:
        """Makes a socket take only connections that a :class:`Gatekeeper` of the same context admits; before ``bind``.
        ``domain`` is :data:`CONTROL` or :data:`STREAM`."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, domain)
        # Without this, ZeroMQ admits every client while no gatekeeper is there.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


@dataclass(frozen=True)
class ClientSecurity:
    """One's own keys, and the public key of the broker that one talks to."""

    keys: KeyPair
    broker_key: bytes = field(repr=False)

    def apply(self, socket: "zmq.Socket[bytes]") -> None:
        """Makes a socket prove our key and ask for the broker's; before ``connect``."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.broker_key)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret)


def client_security(
    key: str | os.PathLike[str] | None = None, broker_key: str | os.PathLike[str] | None = None
) -> ClientSecurity | None:
    """The keys of a trainer or consumer: from the files given, else from ``$OFFLOOP_KEY`` (its own secret key) and
    ``$OFFLOOP_BROKER_KEY`` (the broker's public key); ``None`` when there are none.

    Raises:
        ConfigurationError: one of the two is missing, or a file cannot be used.
    """
    own = key or os.environ.get("OFFLOOP_KEY")
    broker = broker_key or os.environ.get("OFFLOOP_BROKER_KEY")
    if own and broker:
        return ClientSecurity(load_secret_key(own), load_public_key(broker))
    if own:
        raise ConfigurationError(
            f"a key is given ({own}) and the broker's is not: name its public key file with '--broker-key' or "
            "OFFLOOP_BROKER_KEY"
        )
    if broker:
        raise ConfigurationError(
            f"the broker's key is given ({broker}) and none of your own: name your secret key file with '--key' or "
            "OFFLOOP_KEY; 'offloop server keygen NAME' makes one"
        )
    return None


def client_security_for(address: str) -> ClientSecurity | None:
    """The keys that the environment names, for an address at which keys are taken: a run's own broker, on a Unix
    socket, takes none."""
    return client_security() if address.startswith("tcp://") else None


def allow_ipv6(socket: "zmq.Socket[bytes]", address: str) -> None:
    """Lets a socket use an IPv6 address; others are left as they are, because ``*`` would stand for both kinds then."""
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)


def server_security(
    key: str | os.PathLike[str] | None, allow_list: str | os.PathLike[str] | None
) -> ServerSecurity | None:
    """A broker's keys and allow-list, both read once to see that they can be; ``None`` when neither is given. Without
    ``allow_list`` it is the file ``allowed`` beside the key.

    Raises:
        ConfigurationError: a list without a key, or a file that cannot be used.
    """
    if key is None and allow_list is None:
        return None
    if key is None:
        raise ConfigurationError(
            f"the allow-list {allow_list} takes a key of the broker's: make one with 'offloop server keygen broker' "
            "and name its "
            "secret file with '--key'"
        )
    path = Path(allow_list) if allow_list is not None else Path(key).parent / "allowed"
    security = ServerSecurity(load_secret_key(key), path)
    AllowList.read(path)
    return security


def check_listen_address(address: str, security: ServerSecurity | None) -> None:
    """Refuses a TCP address at which a broker must not listen: without keys, any that is not this machine's loopback.

    Raises:
        ConfigurationError: see above, or the address is malformed.
    """
    if address.startswith("ipc://"):
        return
    match = (_TCP if security is not None else _LOOPBACK).match(address)
    if match is not None and (match[2] == "*" or int(match[2]) <= 65535):
        return
    if security is not None:
        raise ConfigurationError(
            f"cannot listen at {address!r}: use tcp://HOST:PORT, such as tcp://*:5570, or tcp://[::1]:5570 for IPv6"
        )
    raise ConfigurationError(
        f"cannot listen at {address!r} without keys: use tcp://127.0.0.1:PORT, which other machines reach through a "
        "tunnel (ssh -L 5570:127.0.0.1:5570 -L 5571:127.0.0.1:5571 HOST), or make keys with "
        "'offloop server keygen', admit them "
        "with 'offloop server allow' and add '--key FILE'"
    )


class Gatekeeper:
    """Answers ZeroMQ's question whether a key may connect (a ZAP handler), and the broker's whether it may do a thing.

    It lives in the broker's poll loop: poll :attr:`socket`, call :meth:`handle` when something waits there. The list
    is read again when its file has changed. While it is damaged, no other client is admitted, and connected ones keep
    the roles of the last good one.

    Make it before the sockets that it guards are bound, in their context.

    Raises:
        ConfigurationError: the allow-list cannot be used.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", security: ServerSecurity) -> None:
        self._path = security.allow_list
        self._seen = self._look()
        self._list = AllowList.read(self._path)
        self._damaged = False
        self._refused = 0
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ENDPOINT)

    def handle(self) -> None:
        """Answers what waits, without waiting for more."""
        for _ in range(_BURST):
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(request)

    def may(self, user_id: str, role: str) -> bool:
        """Whether the key that a message came with (its ``User-Id``) has a role at this moment."""
        self._refresh()
        return self._list.may(user_id, role)

    def name_of(self, user_id: str) -> str:
        """What the list calls a key, with the key."""
        names = sorted({grant.name for grant in self._list.grants if grant.key == user_id and grant.name})
        return f"{', '.join(names) or 'unnamed'} (key {user_id})"

    def sum_up(self) -> None:
        """Logs how many were refused beyond those that it named; call it about twice a second."""
        if self._refused > _NAMED_REFUSALS:
            _log.warning("refused %d more connections with unknown keys", self._refused - _NAMED_REFUSALS)
        self._refused = 0

    def _answer(self, request: list[bytes]) -> None:
        # identity, delimiter, version, request id, domain, address, routing id, mechanism, credentials
        if len(request) < 4:
            return
        identity, _, version, number, *rest = request
        user_id = None
        if version == _ZAP_VERSION and len(rest) == 5 and rest[3] == b"CURVE" and len(rest[4]) == 32:
            user_id = self._admit(rest[0], rest[1], z85.encode(rest[4]).decode())
        status = b"200" if user_id is not None else b"400"
        reply = [identity, b"", _ZAP_VERSION, number, status, b"", (user_id or "").encode(), b""]
        # The client may be gone.
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart(reply, zmq.NOBLOCK)

    def _admit(self, domain: bytes, address: bytes, key: str) -> str | None:
        self._refresh()
        known = self._list.may(key, "view") if domain == STREAM.encode() else self._list.knows(key)
        if known and not self._damaged:
            return key
        self._refused += 1
        # A log that cannot be written as fast as peers connect would delay all others.
        if self._refused <= _NAMED_REFUSALS:
            _log.warning(
                "refused key %s from %s at the %s: %s",
                key,
                address.decode(errors="replace"),
                domain.decode(errors="replace"),
                "the allow-list is damaged" if self._damaged else f"{self._path} does not allow it",
            )
        return None

    def _look(self) -> tuple[int, int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode

    def _refresh(self) -> None:
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._list = AllowList.read(self._path)
        except ConfigurationError as error:
            self._damaged = True
            _log.error("no other client is admitted: %s", error)
        else:
            self._damaged = False
            _log.warning("the allow-list %s was read again: %d lines", self._path, len(self._list.grants))
