"""What browsers send through their sockets, tied to the page that the socket was opened for."""

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
    somebody's page could press its buttons. A socket that tries, or sends what no browser sends, is closed. What
    browsers want written to the server's log is left out: it would bring the text of others to a terminal.
    """
    from nicegui import core

    handlers = core.sio.handlers["/"]
    for name in _TO_PAGES:
        handlers[name] = _for_own_page(handlers[name])
    handlers.pop("log", None)


def _for_own_page(handle: Callable[[str, Any], None]) -> Callable[[str, Any], Any]:
    from nicegui import Client, core

    async def handle_own(socket_id: str, message: Any) -> None:
        try:
            client = Client.instances.get(message["client_id"])
            if client is None:
                return
            role = core.sio.get_environ(socket_id)["asgi.scope"][ROLE]
            if client.id in core.sio.rooms(socket_id) and role is client.request.scope[ROLE]:
                handle(socket_id, message)
                return
        except (AttributeError, KeyError, TypeError, ValueError):
            pass
        await core.sio.disconnect(socket_id)

    return handle_own
