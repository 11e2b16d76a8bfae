"""Who may see a dashboard, and who may command: addresses, tokens, and a gate in front of every request."""

import contextlib
import functools
import hmac
import ipaddress
import os
import re
import secrets
import shlex
import stat
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qs, quote, urlsplit

from bus.errors import ConfigurationError

_TO_PAGES = ("event", "javascript_response", "ack")


Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

FIRST_PORT = 8420
"""Where a dashboard listens, unless that port is taken or another one is asked for."""

ROLE = "offloop.role"
"""Where in a request's scope the :class:`Gate` leaves the :class:`Role` of whoever asks."""

_TOKEN_BYTES = 32
_MIN_TOKEN = 16
_TOKEN = re.compile(rf"[A-Za-z0-9._~-]{{{_MIN_TOKEN},}}")
# Whatever gets onto the page sends nothing elsewhere. NiceGUI has scripts in its pages, and makes some.
_POLICY = (
    b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
]


class Role(Enum):
    """What a person who opened the dashboard may do."""

    VIEW = "view"
    """See everything."""
    COMMAND = "command"
    """Also send the training commands."""


@dataclass(frozen=True)
class Tokens:
    """The secrets in the links that people are given: one for each role."""

    command: str
    view: str

    @classmethod
    def load(cls, path: Path) -> "Tokens":
        """Reads the file, or makes one, which only its owner can read, where there is none.

        Raises:
            ConfigurationError: it cannot be read or written, others can read it, or it lacks a token.
        """
        if not path.exists():
            return cls._make(path)
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"the token file {path} cannot be read: {_why(error)}") from None
        if mode & 0o077:
            raise ConfigurationError(
                f"the token file {path} is open to others (mode {mode:04o}): chmod 600 {shlex.quote(str(path))}, and "
                "delete it to have new tokens made if somebody may have read it"
            )
        found = dict(line.split(maxsplit=1) for line in lines if len(line.split()) == 2 and line[0] != "#")
        found = {role: token.strip() for role, token in found.items()}
        if set(found) != {role.value for role in Role} or not all(map(_TOKEN.fullmatch, found.values())):
            raise ConfigurationError(
                f"the token file {path} is damaged: it has a line 'command TOKEN' and a line 'view TOKEN', of at least "
                f"{_MIN_TOKEN} letters, digits, '.', '_', '~' or '-' each; delete it to have a new one made"
            )
        if found["command"] == found["view"]:
            raise ConfigurationError(f"the token file {path} has the same token twice: whoever may view could command")
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
        """Whose token that is, in a time that does not tell how much of it was right; ``None`` for nobody's."""
        given = token.encode()
        may_command = hmac.compare_digest(given, self.command.encode())
        may_view = hmac.compare_digest(given, self.view.encode())
        return Role.COMMAND if may_command else Role.VIEW if may_view else None


@dataclass(frozen=True)
class Listening:
    """Where a dashboard listens, and what protects it there."""

    host: str = "127.0.0.1"
    port: int | None = None
    """``None`` for the first free one from 8420 on."""
    tokens: Path | None = None
    certificate: Path | None = None
    certificate_key: Path | None = None
    open_browser: bool = False
    as_flags: bool = False
    """Whether messages call options ``--port 8420``, and not ``port=8420``."""

    def option(self, name: str, value: str) -> str:
        """How somebody writes that option."""
        return f"--{name.replace('_', '-')} {value}" if self.as_flags else f"{name}={value}"

    def check(self) -> None:
        """Raises :class:`bus.errors.ConfigurationError` for what would not work, or would let strangers in."""
        if self.port is not None and not 0 <= self.port < 1 << 16:
            raise ConfigurationError(f"{self.port} is no port: a port is a number from 0 (any) to 65535")
        if (self.certificate is None) != (self.certificate_key is None):
            raise ConfigurationError(
                f"a certificate goes with its key: give {self.option('certificate', 'cert.pem')} and "
                f"{self.option('certificate_key', 'key.pem')}, or neither"
            )
        if not is_loopback(self.host) and (self.tokens is None or self.certificate is None):
            raise ConfigurationError(
                f"{self.host} can be reached from other machines, which takes tokens and TLS: add "
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
        """The page's address on that port, as somebody on this machine can open it."""
        scheme = "http" if self.certificate is None else "https"
        host = "localhost" if _is_wildcard(self.host) else f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{port}/"


class Gate:
    """Stands before the whole application: every request and every WebSocket passes it, with a role, or is refused.

    On this machine alone whoever reaches it may command; then the ``Host`` header has to name this machine, so that no
    web page elsewhere gets here by a name of its own that leads to 127.0.0.1. With tokens, one in the address becomes a
    cookie. A request that another site's page sent, by its ``Origin``, is refused either way."""

    def __init__(self, app: App, tokens: Tokens | None, host: str, cookie: str, secure: bool) -> None:
        self._app = app
        self._tokens = tokens
        self._hosts = {"127.0.0.1", "localhost", "::1", host} if is_loopback(host) else None
        self._cookie = cookie
        self._secure = secure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request, as ASGI (https://asgi.readthedocs.io/en/latest/specs/www.html) has it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        if self._hosts is not None and _host_name(host) not in self._hosts:
            await _refuse(
                scope, send, 403, f"This dashboard does not answer to the name {host[:100]!r}: use 127.0.0.1."
            )
            return
        origin = headers.get(b"origin")
        if (origin is not None and _place(origin) != host) or _is_embedded(headers):
            await _refuse(scope, send, 403, "A page of another site asked for this.")
            return
        if self._tokens is None:
            scope[ROLE] = Role.COMMAND
        elif scope["type"] == "http" and (token := _token_in(scope)) is not None:
            await self._admit(scope, send, token)
            return
        else:
            role = self._tokens.role_of(_cookie_in(headers.get(b"cookie", ""), self._cookie))
            if role is None:
                await _refuse(scope, send, 401, _HOW_TO_ENTER)
                return
            scope[ROLE] = role
        await self._app(scope, receive, _with_headers(send))

    async def _admit(self, scope: Scope, send: Send, token: str) -> None:
        """Turns the token in an address into a cookie, and the address into one without it."""
        assert self._tokens is not None
        if self._tokens.role_of(token) is None:
            await _refuse(scope, send, 401, "That token is not one of this dashboard's. " + _HOW_TO_ENTER)
            return
        cookie = f"{self._cookie}={token}; Path=/; HttpOnly; SameSite=Lax{'; Secure' if self._secure else ''}"
        # Never to another host, which is what a path that begins with two slashes would name.
        location = "/" + quote(scope["path"].lstrip("/\\"))
        headers = [(b"location", location.encode()), (b"set-cookie", cookie.encode())]
        headers.append((b"cache-control", b"no-store"))
        await send({"type": "http.response.start", "status": 303, "headers": [*headers, *_HEADERS]})
        await send({"type": "http.response.body", "body": b""})


_HOW_TO_ENTER = (
    "Open the whole link that you were given; it ends in ?token=... Whoever runs the dashboard finds the tokens in the "
    "token file: one for those who may command, one for those who may only view."
)


def is_loopback(host: str) -> bool:
    """Whether only this machine gets to that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_wildcard(host: str) -> bool:
    """Whether it stands for all addresses of this machine, and is none that can be opened."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _place(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _is_embedded(headers: MutableMapping[bytes, str]) -> bool:
    """Whether a page of another site loads this as a part of itself, and not by a link that somebody follows. Browsers
    tell (https://www.w3.org/TR/fetch-metadata/); what only reads has no ``Origin``."""
    site, part = headers.get(b"sec-fetch-site", "none"), headers.get(b"sec-fetch-dest", "document")
    return site not in ("none", "same-origin") and part != "document"


def _token_in(scope: Scope) -> str | None:
    found = parse_qs(scope["query_string"].decode("latin-1")).get("token")
    return found[0] if found else None


def _cookie_in(header: str, name: str) -> str:
    # Cookies are shared by all ports of a host: those of others may be in any form, which http.cookies would stop at.
    for part in header.split(";"):
        given, _, value = part.strip().partition("=")
        if given == name:
            return value
    return ""


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            given: Iterable[tuple[bytes, bytes]] = message.get("headers", ())
            message["headers"] = [*given, *_HEADERS]
        await send(message)

    return send_with_headers


async def _refuse(scope: Scope, send: Send, status: int, text: str) -> None:
    if scope["type"] == "websocket":
        # Closing before accepting is answered with HTTP status 403.
        await send({"type": "websocket.close", "code": 1008})
        return
    title = "Not admitted" if status == 401 else "Refused"
    body = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>:root{{color-scheme:light dark}}body{{font:1rem/1.5 system-ui;max-width:40rem;"
        f"margin:4rem auto;padding:0 1rem}}</style><h1>{title}</h1><p>{_escaped(text)}</p></html>"
    ).encode()
    headers = [(b"content-type", b"text/html; charset=utf-8"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *_HEADERS]})
    await send({"type": "http.response.body", "body": body})


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


@functools.cache
def guard_sockets() -> None:
    """Has every socket speak for its own page alone, and for that only in the role in which the page was fetched.

    NiceGUI takes the page that a message is for from the message itself, so that whoever gets to know the id of
    somebody's page could press its buttons. Other messages, and those in no known form, are left out, and so is what
    browsers want written to the server's log: it would bring text of others to a terminal.
    """
    from nicegui import core

    handlers = core.sio.handlers["/"]
    for name in _TO_PAGES:
        handlers[name] = _for_own_page(handlers[name])
    handlers.pop("log", None)


def _for_own_page(handle: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    from nicegui import Client, core

    def handle_own(socket_id: str, message: Any) -> None:
        # Not what NiceGUI's own script sends, if it fails here: nothing in it could be answered.
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            client = Client.instances[message["client_id"]]
            role = core.sio.get_environ(socket_id)["asgi.scope"][ROLE]
            if client.id in core.sio.rooms(socket_id) and role is client.request.scope[ROLE]:
                handle(socket_id, message)

    return handle_own
