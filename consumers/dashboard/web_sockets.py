"""What browsers send through their sockets, tied to the page that the socket was opened for."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from consumers.dashboard.access import ROLE

__all__ = ["guard_sockets"]

_TO_PAGES = ("event", "javascript_response", "ack")


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
