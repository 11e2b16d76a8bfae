"""Addresses of NATS servers. Needs nothing of NATS."""

import os
from urllib.parse import urlsplit

from offloop.bus.errors import ConfigurationError, RunNotFoundError

STREAM_VARIABLE = "OFFLOOP_STREAM"  # environment variable with the servers to which runs are copied

_SCHEMES = ("nats", "tls")


def no_such_run(address: str, run: str | None) -> RunNotFoundError:
    what = "has no runs yet" if run is None else f"has no run {run!r}"
    return RunNotFoundError(f"NATS at {address} {what}: 'offloop runs --stream {address}' lists them", run=run)


def split_addresses(text: str) -> tuple[str, ...]:
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    for address in addresses:
        try:
            parts = urlsplit(address)
            fits = parts.scheme in _SCHEMES and parts.hostname and (parts.port or 1) and not parts.path.strip("/")
        except ValueError:
            fits = False
        if not fits or "@" in text:
            # A password may have commas too.
            _, at, host = text.rpartition("@")
            shown = f"...@{host}" if at else address
            raise ConfigurationError(
                f"{shown[:100]!r} is not the address of a NATS server: write nats://HOST:4222, or "
                "tls://HOST:4222; a key goes into a file for '--nkey'",
                value=shown,
            )
    if not addresses:
        raise ConfigurationError("no NATS server is named: write nats://HOST:4222", value=text)
    return addresses


def find_servers(given: str | None) -> str | None:
    """Return the servers to which a run is copied: ``given``, else ``$OFFLOOP_STREAM``, else ``None``."""
    servers = given if given is not None else os.environ.get(STREAM_VARIABLE) or None
    return None if servers is None else ",".join(split_addresses(servers))
