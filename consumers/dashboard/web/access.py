"""The address of a dashboard, and the tokens of its viewers and commanders."""

import contextlib
import hmac
import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from offloop.bus.errors import ConfigurationError, require
from offloop.bus.files import read_private

FIRST_PORT = 8420  # the port of a dashboard, unless it is taken or another one is given

_TOKEN_BYTES = 32
_MIN_TOKEN = 16
_TOKEN = re.compile(rf"[A-Za-z0-9._~-]{{{_MIN_TOKEN},}}")


class Role(Enum):
    VIEW = "view"
    COMMAND = "command"  # see everything, and send commands


class Opening(NamedTuple):
    role: Role
    view_link: str  # the address of the same page for viewers; empty without tokens
    asked: Sequence[tuple[str, str]]  # names and values in the address


@dataclass(frozen=True)
class Tokens:
    command: str
    view: str

    @classmethod
    def load(cls, path: Path) -> "Tokens":
        """Read the file, or create one that only its owner can read.

        Raises ConfigurationError when it cannot be read or written, others can read it, or it lacks a token."""
        if not path.exists():
            return cls._make(path)
        lines = read_private(path, "the token file").splitlines()
        found = dict(line.split(maxsplit=1) for line in lines if len(line.split()) == 2 and line[0] != "#")
        found = {role: token.strip() for role, token in found.items()}
        if set(found) != {role.value for role in Role} or not all(map(_TOKEN.fullmatch, found.values())):
            raise ConfigurationError(
                f"the token file {path} is damaged: it has a line 'command TOKEN' and a line 'view TOKEN', of at least "
                f"{_MIN_TOKEN} letters, digits, '.', '_', '~' or '-' each; delete it to have a new one made"
            )
        if found["command"] == found["view"]:
            raise ConfigurationError(f"the token file {path} has the same token twice: viewers could command")
        return cls(found["command"], found["view"])

    @classmethod
    def _make(cls, path: Path) -> "Tokens":
        tokens = cls(secrets.token_urlsafe(_TOKEN_BYTES), secrets.token_urlsafe(_TOKEN_BYTES))
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(f"command {tokens.command}\nview {tokens.view}\n")
        except OSError as error:
            raise ConfigurationError(f"the token file {path} cannot be written: {_why(error)}") from None
        return tokens

    def role_of(self, token: str) -> Role | None:
        """Return the role of a token, in a time independent of its correct part; ``None`` for an unknown one."""
        given = token.encode()
        may_command = hmac.compare_digest(given, self.command.encode())
        may_view = hmac.compare_digest(given, self.view.encode())
        return Role.COMMAND if may_command else Role.VIEW if may_view else None


@dataclass(frozen=True)
class Listening:
    host: str = "127.0.0.1"
    port: int | None = None  # None for the first free one from 8420 on
    tokens: Path | None = None
    certificate: Path | None = None
    certificate_key: Path | None = None
    open_browser: bool = False
    as_flags: bool = False  # messages write --port 8420 instead of port=8420

    def option(self, name: str, value: str) -> str:
        return f"--{name.replace('_', '-')} {value}" if self.as_flags else f"{name}={value}"

    def check(self) -> None:
        require("the dashboard", "dashboard", "nicegui", "numpy", "PIL")
        if self.port is not None and not 0 <= self.port < 1 << 16:
            raise ConfigurationError(f"{self.port} is not a port: use a number from 0 (any) to 65535")
        if (self.certificate is None) != (self.certificate_key is None):
            raise ConfigurationError(
                f"a certificate needs its key: give {self.option('certificate', 'cert.pem')} and "
                f"{self.option('certificate_key', 'key.pem')}, or neither"
            )
        if not is_loopback(self.host) and (self.tokens is None or self.certificate is None):
            raise ConfigurationError(
                f"{self.host} can be reached from other machines, which requires tokens and TLS: add "
                f"{self.option('tokens', 'tokens.txt')} {self.option('certificate', 'cert.pem')} "
                f"{self.option('certificate_key', 'key.pem')} (the token file is made if it does not exist; 'openssl "
                "req -x509 -newkey rsa:2048 -nodes -days 365 -subj /CN=HOST -keyout key.pem -out cert.pem' makes the "
                "others), or keep 127.0.0.1 and use 'ssh -L 8420:127.0.0.1:8420 HOST'"
            )
        if self.certificate is not None:
            self._check_certificate()

    def _check_certificate(self) -> None:
        assert self.certificate is not None
        import ssl

        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate, self.certificate_key)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"the certificate {self.certificate} with the key {self.certificate_key} cannot be used: {_why(error)}"
            ) from None

    def url(self, port: int) -> str:
        scheme = "http" if self.certificate is None else "https"
        address = _address(self.host)
        is_wildcard = not self.host or (address is not None and address.is_unspecified)
        host = "localhost" if is_wildcard else f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{port}/"


def is_loopback(host: str) -> bool:
    """Return True for an address that only this machine can reach."""
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host)
    return None


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
