"""The gate in front of every request to a dashboard, and of every message on a socket."""

import contextlib
import functools
import html
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import SplitResult, quote, urlencode, urlsplit

import uvicorn
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from offloop.bus.printing import escape_records
from offloop.consumers.dashboard.web.access import Listening, Role, Tokens, is_loopback

ROLE = "offloop.role"  # key of the Role in a request's scope

_TO_PAGES = ("event", "javascript_response", "ack")
_TO_OPEN = ("connect", "handshake")
# No data leaves the page for other sites. NiceGUI needs inline and generated scripts.
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
_HOW_TO_ENTER = (
    "Open the whole link that you received; it ends in ?token=... The owner of the dashboard finds the tokens in the "
    "token file: one to command, one to view."
)


class Gate:
    """Admits every request and WebSocket with a role, or refuses it.

    On loopback everyone may command; then the ``Host`` header has to name this machine, so that no other web page gets
    here by a name that resolves to 127.0.0.1. With tokens, one in the address becomes a cookie; programs send theirs as
    ``Authorization: Bearer``. A request from a page of another site, by its ``Origin``, is always refused."""

    def __init__(self, app: ASGIApp, tokens: Tokens | None, host: str, cookie: str, secure: bool) -> None:
        self._app = app
        self._tokens = tokens
        self._hosts = {"127.0.0.1", "localhost", "::1", host} if is_loopback(host) else None
        self._cookie = cookie
        self._secure = secure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request of ASGI (https://asgi.readthedocs.io/en/latest/specs/www.html)."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        answer = self._answer(HTTPConnection(scope))
        if answer is not None and scope["type"] == "websocket":
            # Closing before accepting is answered with HTTP status 403.
            await send({"type": "websocket.close", "code": 1008})
        else:
            await (answer or self._app)(scope, receive, _with_headers(send))

    def _answer(self, request: HTTPConnection) -> Response | None:
        headers = request.headers
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._hosts is not None and _parts(f"//{host}").hostname not in self._hosts:
            return _refusal(403, f"This dashboard does not answer to the name {host[:100]!r}: use 127.0.0.1.")
        is_embedded = headers.get("sec-fetch-dest", "document") != "document" and (
            headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        )
        if (origin is not None and _parts(origin).netloc != host) or is_embedded:
            return _refusal(403, "A page of another site asked for this.")
        role: Role | None = Role.COMMAND
        if self._tokens is not None:
            if request.scope["type"] == "http" and (token := request.query_params.get("token")):
                return self._admission(request, self._tokens, token)
            kind, _, bearer = headers.get("authorization", "").partition(" ")
            token = bearer if kind.lower() == "bearer" else request.cookies.get(self._cookie, "")
            role = self._tokens.role_of(token)
        if role is None:
            return _refusal(401, _HOW_TO_ENTER)
        request.scope[ROLE] = role
        return None

    def _admission(self, request: HTTPConnection, tokens: Tokens, token: str) -> Response:
        if tokens.role_of(token) is None:
            return _refusal(401, f"That token is not one of this dashboard's. {_HOW_TO_ENTER}")
        # Never to another host, which a path of two slashes would name.
        location = "/" + quote(request.scope["path"].lstrip("/\\"))
        asked = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
        location += f"?{urlencode(asked)}" if asked else ""
        response = RedirectResponse(location, 303, {"cache-control": "no-store"})
        response.set_cookie(self._cookie, token, secure=self._secure, httponly=True, samesite="lax")
        return response


def guarded_server(app: ASGIApp, listening: Listening, tokens: Tokens | None, port: int) -> uvicorn.Server:
    """Return a server of an application behind the gate."""
    gate = Gate(app, tokens, listening.host, f"offloop_dashboard_{port}", listening.certificate is not None)
    config = uvicorn.Config(
        gate,
        lifespan="on",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
        ssl_certfile=listening.certificate,
        ssl_keyfile=listening.certificate_key,
    )
    # They print addresses and messages of any client.
    escape_records("nicegui", "uvicorn.error", "asyncio")
    return uvicorn.Server(config)


def _parts(address: str) -> SplitResult:
    try:
        return urlsplit(address)
    except ValueError:
        return urlsplit("")


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *_HEADERS]
        await send(message)

    return send_with_headers


def _refusal(status: int, text: str) -> Response:
    title = "Not admitted" if status == 401 else "Refused"
    body = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>:root{{color-scheme:light dark}}body{{font:1rem/1.5 system-ui;max-width:40rem;"
        f"margin:4rem auto;padding:0 1rem}}</style><h1>{title}</h1><p>{html.escape(text, quote=False)}</p></html>"
    )
    return HTMLResponse(body, status, {"cache-control": "no-store"})


@functools.cache
def guard_sockets() -> None:
    """Let every socket act only for its own page, in the role in which the page was fetched.

    NiceGUI reads the page of a message from the message itself, so that anyone who learns the id of a page could press
    its buttons. Other and malformed messages are ignored, and so are browsers' messages for the server's log, which
    would bring foreign text to a terminal."""
    from nicegui import core

    handlers = core.sio.handlers["/"]
    for name in _TO_PAGES:
        handlers[name] = _for_own_page(handlers[name])
    for name in _TO_OPEN:
        handlers[name] = _opening(name, handlers[name])
    handlers.pop("log", None)


def _opening(name: str, handle: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    from nicegui import core

    async def handle_valid(socket_id: str, message: Any, *more: Any) -> Any:
        # A page may send both names as messages. Only the server has the request of a new socket.
        if name == "connect" and message is not core.sio.get_environ(socket_id):
            return None
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            return await handle(socket_id, message, *more)
        return False

    return handle_valid


def _for_own_page(handle: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    from nicegui import Client, core

    def handle_own(socket_id: str, message: Any) -> None:
        # Other errors of NiceGUI's script cannot be answered.
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            client = Client.instances[message["client_id"]]
            role = core.sio.get_environ(socket_id)["asgi.scope"][ROLE]
            if client.id in core.sio.rooms(socket_id) and role is client.request.scope[ROLE]:
                handle(socket_id, message)

    return handle_own
