"""The connection to NATS servers, and their errors in our words."""

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from offloop.bus.errors import BrokerError, ConfigurationError, require
from offloop.bus.net.nats_addresses import split_addresses
from offloop.bus.printing import one_line

if TYPE_CHECKING:
    from offloop.bus.jetstream.client import NatsClient

OLDEST = (2, 9, 0)
OLDEST_BEYOND_LOOPBACK = (2, 12, 7)
"""Older servers have known holes; on this machine alone they may be used."""

API_SECONDS = 2.0
"""For how long an answer is waited on: servers that lose their leader give none until they have another one."""
CONNECT_SECONDS = 10.0
_LOST_SECONDS = 0.2
"""How often it is looked whether a connection was lost while an answer is waited for."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_Answer = TypeVar("_Answer")


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
        """Reads addresses. The files are by default those that OFFLOOP_NKEY and OFFLOOP_CA name.

        Raises:
            ConfigurationError: they are none.
        """
        return cls(split_addresses(text), nkey or _named_by("OFFLOOP_NKEY"), ca or _named_by("OFFLOOP_CA"))

    def __str__(self) -> str:
        return ",".join(self.addresses)

    @property
    def are_here(self) -> bool:
        """Whether all of them are on this machine."""
        return all(is_loopback(urlsplit(address).hostname or "") for address in self.addresses)


def _named_by(variable: str) -> Path | None:
    return Path(value) if (value := os.environ.get(variable)) else None


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's, for itself alone."""
    return host.strip("[]") in _LOOPBACK


@contextlib.asynccontextmanager
async def connected(
    servers: NatsServers, name: str, say: Callable[[str], None] | None = None
) -> "AsyncIterator[NatsClient]":
    """A connection, which finds the servers again by itself. With ``say`` it waits for them as long as it takes, and
    says once that they are away.

    Raises:
        BrokerError: none answers, or it is too old, has another certificate, does not know the key or lacks a role for
            it: also later, in whatever the task that began this waits for.
        ConfigurationError: the key or the certificate cannot be read.
    """
    require("a stream at nats://", "nats", "nats")
    from nats.errors import Error

    from offloop.bus.jetstream.client import NatsClient

    client = NatsClient(servers, say)
    try:
        try:
            async with asyncio.timeout(None if say is not None else CONNECT_SECONDS):
                await client.begin(name)
            yield client
        finally:
            await client.close()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if client.failure is None or task is None:
            raise
        task.uncancel()
        raise client.failure from None
    except TimeoutError:
        why = f" ({client.trouble})" if client.trouble else ""
        raise BrokerError(
            f"no NATS server answers at {servers}{why}: see whether it runs", address=str(servers)
        ) from None
    except (Error, OSError) as error:
        raise BrokerError(f"NATS at {servers}: {in_words(error)}", address=str(servers)) from None


async def answer_of(client: "NatsClient", asking: Coroutine[Any, Any, _Answer]) -> _Answer:
    """What the servers answer. Nothing is asked, and no answer waited for, without a connection.

    Raises:
        OSError: there is none, or it was lost meanwhile.
    """
    if not client.is_connected:
        asking.close()
        raise OSError("no server answers")
    connection = client.stats["reconnects"]
    task = asyncio.ensure_future(asking)
    try:
        while not (await asyncio.wait((task,), timeout=_LOST_SECONDS))[0]:
            if not client.is_connected or client.stats["reconnects"] != connection:
                raise OSError("the connection was lost")
        return task.result()
    finally:
        task.cancel()


def passing_errors() -> tuple[type[Exception], ...]:
    """What passes when the servers are there again."""
    from nats.errors import Error

    return Error, OSError, TimeoutError


def in_words(error: Exception) -> str:
    """What a server or the client of NATS says, in one line."""
    text = getattr(error, "description", None) or str(error) or type(error).__name__
    return one_line(str(text).removeprefix("nats: "))


def tls_context(servers: NatsServers) -> ssl.SSLContext | None:
    """How servers have to prove who they are; ``None`` where they do not.

    Raises:
        ConfigurationError: the certificate cannot be read.
    """
    if servers.ca is None and not any(address.startswith("tls") for address in servers.addresses):
        return None
    if servers.ca is None:
        return ssl.create_default_context()
    try:
        # Who else is trusted on this machine is not asked.
        return ssl.create_default_context(cafile=servers.ca)
    except ssl.SSLError:
        raise ConfigurationError(f"{servers.ca} is not a certificate in PEM", value=servers.ca) from None
    except OSError as error:
        raise ConfigurationError(f"{servers.ca} cannot be read: {error.strerror}", value=servers.ca) from None


def check_version(version: object, servers: NatsServers) -> None:
    """Refuses servers that are too old for where they are.

    Raises:
        BrokerError: these are.
    """
    parts = tuple(getattr(version, part) for part in ("major", "minor", "patch"))
    required = OLDEST if servers.are_here else OLDEST_BEYOND_LOOPBACK
    if parts < required:
        why = "" if servers.are_here else ", because older ones have known security holes"
        raise BrokerError(
            f"the NATS server at {servers} is {'.'.join(map(str, parts))}: it must be "
            f"{'.'.join(map(str, required))} or newer{why}",
            address=str(servers),
        )
