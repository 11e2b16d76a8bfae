"""The menu of saved views: what a browser asks of it, and what it is sent."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offloop.bus.errors import OffloopError
from offloop.bus.index.saved_views import delete_view, read_views, save_view
from offloop.bus.printing import one_line

if TYPE_CHECKING:
    from nicegui.element import Element
    from nicegui.events import GenericEventArguments


class SavedViews:
    """The views that are saved beside the runs of a folder, for one page.

    Args:
        folder: of the runs.
        element: that has the menu: it asks by the events ``views``, ``saveview`` and ``dropview``, and is sent them by
            its method ``savedViews``.
        may_change: whether this page may save and delete.
        do: changes something, says why if that fails, and returns whether it could.
    """

    def __init__(
        self,
        folder: Path,
        element: "Element",
        may_change: bool,
        do: Callable[[Callable[[], object]], Awaitable[bool]],
    ) -> None:
        self._folder, self._element, self._may_change, self._do = folder, element, may_change, do
        element.on("views", self._send)
        element.on("saveview", self._on_save)
        element.on("dropview", self._on_drop)

    async def _send(self) -> None:
        views: dict[str, str] = {}
        problem = None
        try:
            views = await asyncio.to_thread(read_views, self._folder)
        except OffloopError as error:
            problem = one_line(str(error))
        sent = [{"name": name, "address": views[name]} for name in sorted(views, key=str.lower)]
        self._element.run_method("savedViews", {"list": sent, "problem": problem})

    async def _on_save(self, event: "GenericEventArguments") -> None:
        told: Any = event.args
        if not self._may_change or not isinstance(told, dict):
            return
        name, address = told.get("name"), told.get("address")
        if isinstance(name, str) and isinstance(address, str):
            await self._do(lambda: save_view(self._folder, name, address))
            await self._send()

    async def _on_drop(self, event: "GenericEventArguments") -> None:
        name: Any = event.args
        if self._may_change and isinstance(name, str):
            await self._do(lambda: delete_view(self._folder, name))
            await self._send()
