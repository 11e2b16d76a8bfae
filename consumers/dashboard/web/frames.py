"""Frames: what a browser is sent of what has changed, one after the other."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nicegui.element import Element

_DRAWN_SECONDS = 20.0


class Frames:
    """Sends a browser the next frame when it has drawn the one before. What is asked for meanwhile comes with the next.

    Args:
        send: sends what is new at that moment, by :meth:`draw`, or nothing.
    """

    def __init__(self, send: Callable[[], Awaitable[None]]) -> None:
        self._send = send
        self._drawing = False
        self._again = False
        self._number = 0

    async def refresh(self) -> None:
        """Sends what has changed, and waits until it is drawn."""
        self._again = True
        if self._drawing:
            return
        self._drawing = True
        try:
            while self._again:
                self._again = False
                await self._send()
        finally:
            self._drawing = False

    async def draw(self, element: "Element", frame: dict[str, Any]) -> tuple[bool, object]:
        """Hands an element of the page a frame, by its method ``frame``. Returns whether it is drawn, and what the
        browser says of how many seconds that took; if it is not, nobody knows what the browser has."""
        self._number += 1
        try:
            told = await element.run_method("frame", {**frame, "number": self._number}, timeout=_DRAWN_SECONDS)
            number, seconds = told
        except (TimeoutError, TypeError, ValueError):
            return False, None
        return number == self._number, seconds
