"""Keys for a connection over TCP: CURVE (https://rfc.zeromq.org/spec/26)."""

import os
from dataclasses import dataclass, field

import zmq

from offloop.bus.errors import ConfigurationError
from offloop.bus.net.keys import KeyPair, load_public_key, load_secret_key


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
            "OFFLOOP_KEY"
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
