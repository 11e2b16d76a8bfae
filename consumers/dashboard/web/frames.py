"""The elements of a page that scripts draw, and their frames, sent one after the other."""

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
    try:
        return msgspec.convert(message, kind)
    except (msgspec.ValidationError, RecursionError):
        return kind()


def element_of(script: str) -> "Element":
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
        pass

    return Scripted


class Frames:
    """Sends a browser the next frame when it has drawn the one before; ``send`` sends new parts by :meth:`draw`."""

    def __init__(self, send: Callable[[], Awaitable[None]]) -> None:
        self._send = send
        self._drawing = False
        self._again = False
        self._number = 0
        self.shown: dict[str, Any] = {}  # what the browser has

    def news(self, whole: Mapping[str, Any], part: str = "") -> dict[str, Any]:
        """Return what the browser lacks, which counts as sent. A ``part`` has separate names."""
        shown = self.shown.setdefault(part, {}) if part else self.shown
        changed = {name: value for name, value in whole.items() if name not in shown or shown[name] != value}
        shown.update(changed)
        return changed

    async def refresh(self) -> None:
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
        """Pass a frame to the element's method ``frame``; return whether it is drawn, and in how many seconds.

        After a failure the browser's state is unknown, and everything is sent again."""
        self._number += 1
        try:
            drawn = await element.run_method("frame", {**frame, "number": self._number}, timeout=_DRAWN_SECONDS)
            number, seconds = drawn
        except (TimeoutError, TypeError, ValueError):
            number = seconds = None
        if number != self._number:
            self.shown.clear()
        return number == self._number, seconds
