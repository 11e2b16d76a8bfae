"""The elements of a page that scripts draw, and the frames that these are sent, one after the other."""

import functools
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from nicegui.element import Element

Look = TypeVar("Look", bound=msgspec.Struct)

_DRAWN_SECONDS = 20.0
_HERE = Path(__file__).parent


def look_in(message: object, kind: type[Look]) -> Look:
    """What a browser shows, by its message; the default where that is not in its form."""
    try:
        return msgspec.convert(message, kind)
    except (msgspec.ValidationError, RecursionError):
        return kind()


def element_of(script: str) -> "Element":
    """An element of the page that is being made, drawn by a script of this folder: ``home`` by ``page_home.js``."""
    return _class_of(script)()


@functools.cache
def _class_of(script: str) -> "type[Element]":
    from nicegui.element import Element
    from nicegui.elements.echart import EChart

    # ECharts comes with the class of single charts.
    assert EChart.component is not None
    parts: list[str | Path] = [path for path in sorted(_HERE.glob("page_*.js")) if path.stem != f"page_{script}"]
    parts.append(_HERE / "vendor" / "uPlot.esm.js")

    class Scripted(Element, component=str(_HERE / f"page_{script}.js"), dependencies=parts):
        """Draws what it is sent, and says what of it can be seen: the browser alone knows that."""

    return Scripted


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
        self.shown: dict[str, Any] = {}
        """What the browser has."""

    def news(self, whole: Mapping[str, Any], part: str = "") -> dict[str, Any]:
        """What the browser does not have, which counts as sent by that. Names of a ``part`` are its own."""
        shown = self.shown.setdefault(part, {}) if part else self.shown
        changed = {name: value for name, value in whole.items() if name not in shown or shown[name] != value}
        shown.update(changed)
        return changed

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
        browser says of how many seconds that took; if it is not, what the browser has is unknown, and everything is
        news again."""
        self._number += 1
        try:
            told = await element.run_method("frame", {**frame, "number": self._number}, timeout=_DRAWN_SECONDS)
            number, seconds = told
        except (TimeoutError, TypeError, ValueError):
            number = seconds = None
        if number != self._number:
            self.shown.clear()
        return number == self._number, seconds
