"""The connection to NATS servers, and their errors in our words."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bus.errors import BrokerError, ConfigurationError, require
from bus.printing import one_line

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js.client import JetStreamContext

OLDEST = (2, 9, 0)
OLDEST_BEYOND_LOOPBACK = (2, 12, 7)
"""Older servers have known holes; on this machine alone they may be used."""

API_SECONDS = 5.0
CONNECT_SECONDS = 10.0
_RECONNECT_SECONDS = 0.5
_SCHEMES = ("nats", "tls")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class NatsServers:
    """Where NATS servers are, and what is shown to them: by ``nats://HOST:PORT``, several with commas between them,
    ``tls://`` where they take TLS."""

    addresses: tuple[str, ...]
    nkey: Path | None = None
    """File with the seed of an nkey."""
    ca: Path | None = None
    """Certificate of who signed the servers' certificates, as PEM."""

    @classmethod
    def parse(cls, text: str, nkey: Path | None = None, ca: Path | None = None) -> "NatsServers":
        """Reads addresses.

        Raises:
            ConfigurationError: they are none.
        """
        addresses = tuple(part.strip() for part in text.split(",") if part.strip())
        for address in addresses:
            try:
                parts = urlsplit(address)
                fits = parts.scheme in _SCHEMES and parts.hostname and (parts.port or 1) and not parts.path.strip("/")
            except ValueError:
                fits = False
            if not fits or parts.username or parts.password:
                raise ConfigurationError(
                    f"{one_line(address[:100])!r} is not the address of a NATS server: write nats://HOST:4222, or "
                    "tls://HOST:4222; a key goes into a file for '--nkey'",
                    value=address,
                )
        if not addresses:
            raise ConfigurationError("no NATS server is named: write nats://HOST:4222", value=text)
        return cls(addresses, nkey, ca)

    def __str__(self) -> str:
        return ",".join(self.addresses)

    @property
    def are_here(self) -> bool:
        """Whether all of them are on this machine."""
        return all(urlsplit(address).hostname in _LOOPBACK for address in self.addresses)


@contextlib.asynccontextmanager
async def connected(
    servers: NatsServers, name: str, say: Callable[[str], None] | None = None
) -> "AsyncIterator[tuple[Client, JetStreamContext]]":
    """A connection, which finds the servers again by itself. With ``say`` it waits for them as long as it takes, and
    says once that they are away.

    Raises:
        BrokerError: none answers, or it is too old, has no JetStream, or refuses.
        ConfigurationError: the key or the certificate cannot be read.
    """
    require("a stream at nats://", "nats", "nats")
    from nats.aio.client import Client
    from nats.errors import Error

    client = Client()
    is_away = False

    async def note_error(error: Exception) -> None:
        nonlocal is_away
        if not is_away and not client.is_connected and say is not None:
            is_away = True
            say(f"no NATS server answers at {servers}: waiting")

    async def note_return() -> None:
        nonlocal is_away
        is_away = False

    options: dict[str, Any] = {
        "servers": list(servers.addresses),
        "name": name,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": _RECONNECT_SECONDS,
        "error_cb": note_error,
        "reconnected_cb": note_return,
        "tls": _tls(servers),
        # What cannot be sent is not kept: it is known what has arrived, and the rest is sent again.
        "pending_size": 4 << 20,
    }
    if servers.nkey is not None:
        _check_readable(servers.nkey)
        options["nkeys_seed"] = str(servers.nkey)
    try:
        async with asyncio.timeout(None if say is not None else CONNECT_SECONDS):
            await client.connect(**options)
        try:
            _check_version(client.connected_server_version, servers)
            yield client, client.jetstream(timeout=API_SECONDS)
        finally:
            await client.close()
    except TimeoutError:
        raise BrokerError(f"no NATS server answers at {servers}: see whether it runs", address=str(servers)) from None
    except (Error, OSError) as error:
        raise BrokerError(f"NATS at {servers}: {in_words(error)}", address=str(servers)) from None


def passing_errors() -> tuple[type[Exception], ...]:
    """What passes when the servers are there again."""
    from nats.errors import Error

    return Error, OSError, TimeoutError


def in_words(error: Exception) -> str:
    """What a server or the client of NATS says, in one line."""
    text = getattr(error, "description", None) or str(error) or type(error).__name__
    return one_line(str(text).removeprefix("nats: "))


def _tls(servers: NatsServers) -> ssl.SSLContext | None:
    if servers.ca is None and not any(address.startswith("tls") for address in servers.addresses):
        return None
    context = ssl.create_default_context()
    if servers.ca is not None:
        _check_readable(servers.ca)
        try:
            context.load_verify_locations(servers.ca)
        except ssl.SSLError:
            raise ConfigurationError(f"{servers.ca} is not a certificate in PEM", value=servers.ca) from None
    return context


def _check_readable(path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}", value=path) from None


def _check_version(version: object, servers: NatsServers) -> None:
    parts = tuple(getattr(version, part) for part in ("major", "minor", "patch"))
    wanted = OLDEST if servers.are_here else OLDEST_BEYOND_LOOPBACK
    if parts < wanted:
        why = "" if servers.are_here else ", because older ones have known security holes"
        raise BrokerError(
            f"the NATS server at {servers} is {'.'.join(map(str, parts))}: it must be "
            f"{'.'.join(map(str, wanted))} or newer{why}",
            address=str(servers),
        )
