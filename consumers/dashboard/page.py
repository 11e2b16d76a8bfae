"""The page of the web dashboard, for one browser: what is on it, and what is sent to it."""

import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from consumers.dashboard.access import Role
from consumers.dashboard.page_lines import Chart, LineCache, Lines, Look, charts_of, plain_number
from consumers.dashboard.page_panels import Panels
from consumers.dashboard.page_runs import RunCards
from consumers.dashboard.run_view import Axis
from consumers.dashboard.web_runs import WatchedRun, WatchedRuns, labels_of

if TYPE_CHECKING:
    from nicegui.element import Element
    from nicegui.elements.button import Button
    from nicegui.events import GenericEventArguments, KeyEventArguments

__all__ = ["FRAME_SECONDS", "Page", "rest_after"]

FRAME_SECONDS = 0.5
"""How often a page is brought up to date at most, however many events come."""

_DRAWING_SHARE = 0.03
"""A page takes no more than this of its browser's time for drawing what is new: it may be on the machine that trains,
or draw without a GPU."""
_SLOWEST_SECONDS = 4.0
_DRAWN_SECONDS = 20.0
_HERE = Path(__file__).parent
_STYLE = _HERE / "page.css"
_SMOOTHING_STEP = 0.1
_THEMES: tuple[tuple[bool | None, str, str], ...] = (
    (None, "brightness_auto", "as the system has it"),
    (True, "dark_mode", "dark"),
    (False, "light_mode", "light"),
)
_PRIMARY, _NEGATIVE = "#1a67c4", "#c93a2b"
_LINK_WITH_TOKEN = "Whoever opens this link sees everything and cannot command the training:"
_LINK_WITHOUT_TOKEN = (
    "This page has no buttons. Whoever can reach this address can command all the same: start the dashboard with "
    "tokens to prevent that. 127.0.0.1 means this machine only."
)
_KEYS = (
    ("x", "next x axis: batch, sample, epoch, time"),
    ("l", "log scale on and off"),
    ("s / a", "more / less smoothing"),
    ("0", "reset the zoom (also: double click)"),
    ("/", "find charts by name"),
    ("d", "dark, light, or as the system has it"),
    ("?", "this list"),
    ("+ / -", "on a chart: zoom in / out (also: draw over it, or Ctrl and the wheel)"),
    ("← / →", "on a chart that is zoomed: move"),
    ("Tab", "next button, chart or table"),
)


@functools.cache
def _board_class() -> "type[Element]":
    from nicegui.element import Element
    from nicegui.elements.echart import EChart

    # ECharts comes with the class of single charts.
    assert EChart.component is not None

    class Board(Element, component=str(_HERE / "page_board.js")):
        """All charts of a page."""

    return Board


def rest_after(drawing_seconds: object) -> float:
    """Seconds from one frame to the next, for a browser that says it took so many seconds to draw the one. What is no
    such number counts as nothing: a browser may say anything."""
    if isinstance(drawing_seconds, bool) or not isinstance(drawing_seconds, int | float) or not drawing_seconds > 0:
        return FRAME_SECONDS
    # Bounded first too: a number that is too large for a float cannot be divided.
    wanted = min(drawing_seconds, _SLOWEST_SECONDS) / _DRAWING_SHARE
    return min(max(wanted, FRAME_SECONDS), _SLOWEST_SECONDS)


class Page:
    """What one browser sees. It is sent a frame when it has drawn the one before, and has then had time for other
    things: a slow browser gets fewer, and one that is gone or hidden gets none. What somebody does on the page is
    answered at once."""

    def __init__(self, runs: WatchedRuns, cache: LineCache, role: Role, view_link: str, guarded: bool) -> None:
        self._runs = runs
        self._role = role
        self._view_link = view_link
        self._guarded = guarded
        self._lines = Lines(cache)
        self._look = Look()
        self._smoothing = 0.0
        self._log_scale = False
        self._filter = ""
        self._whole = False
        self._theme = 0
        self._shown: dict[str, Any] = {}
        """What the browser has of everything but the lines."""
        self._seen: object = None
        self._number = 0
        self._drawing = False
        self._again = False
        self._rests_until = 0.0

    def build(self) -> None:
        """Puts everything on the page that is being made."""
        from nicegui import ui

        ui.add_css(_STYLE)
        ui.html('<a class="skip" href="#charts">Skip to the charts</a>', sanitize=False)
        ui.colors(primary=_PRIMARY, negative=_NEGATIVE)
        self._dark = ui.dark_mode(None)
        self._build_top()
        self._cards = RunCards(self._runs, self._role, self.refresh)
        self._build_controls()
        ui.html('<span id="charts" tabindex="-1"></span>', sanitize=False)
        self._board = _board_class()().props('empty="Waiting for the first values"')
        self._board.on("look", self._on_look)
        self._panels = Panels()
        ui.keyboard(on_key=self._on_key, ignore=["input", "select", "textarea"])
        ui.timer(FRAME_SECONDS, self._refresh_in_time)

    def _build_top(self) -> None:
        from nicegui import ui

        with ui.element("header").classes("top"):
            ui.html('<h1 class="brand">offloop <small>training, as it happens</small></h1>', sanitize=False)
            ui.element("div").classes("spread")
            if self._role is Role.VIEW:
                ui.label("view only").classes("pill")
            else:
                _icon_button("share", "Link for viewers").on_click(self._show_link)
            self._theme_button = _icon_button(_THEMES[0][1], f"Theme: {_THEMES[0][2]}").on_click(self._next_theme)
            help_button = _icon_button("keyboard", "Keyboard shortcuts")
        with ui.dialog() as self._help, ui.card():
            rows = "".join(f"<tr><td><kbd>{key}</kbd></td><td>{does}</td></tr>" for key, does in _KEYS)
            ui.html(f'<h2>Keyboard</h2><table class="keys">{rows}</table>', sanitize=False)
            ui.button("Close", on_click=self._help.close).props("flat")
        help_button.on_click(self._help.open)

    def _build_controls(self) -> None:
        from nicegui import ui

        with ui.element("div").classes("controls").props('role="toolbar" aria-label="How charts are drawn"'):
            with ui.element("div").classes("named").props('role="group" aria-label="X axis"'):
                ui.label("x axis")
                self._x_choice = ui.toggle(list(get_args(Axis)), value="batch", on_change=self._on_control)
                self._x_choice.props("dense no-caps unelevated")
            with ui.element("div").classes("named"):
                ui.label("smoothing")
                self._smoothing_choice = ui.slider(min=0, max=0.99, step=0.01, value=0, on_change=self._on_control)
                self._smoothing_choice.props('aria-label="Smoothing" label')
            self._log_choice = ui.switch("log scale", on_change=self._on_control)
            self._filter_choice = ui.input(placeholder="find charts", on_change=self._on_control)
            self._filter_choice.props('dense outlined clearable aria-label="Find charts by name" debounce=150')
            whole_button = ui.button("Reset zoom", on_click=self._show_everything, color=None)
            whole_button.props("flat dense no-caps").classes("link")

    async def _refresh_in_time(self) -> None:
        if time.monotonic() >= self._rests_until:
            await self.refresh()

    async def refresh(self) -> None:
        """Sends what has changed, and waits until it is drawn."""
        if self._drawing:
            self._again = True
            return
        self._drawing = True
        try:
            self._again = True
            while self._again:
                self._again = False
                await self._send_frame()
        finally:
            self._drawing = False

    async def _send_frame(self) -> None:
        runs = self._runs.all()
        seen = (
            # Who does not look is told of what changes the page's title, and no more.
            *((self._look.hidden or run.view.version, run.view.status, run.problem) for run in runs),
            *(self._look.x, self._look.range, tuple(self._look.visible.items()), self._panels.opened),
            *(self._smoothing, self._log_scale, self._filter, self._whole),
            *(self._look.hidden, self._cards.hidden_version),
        )
        if seen == self._seen:
            return
        labels = labels_of(runs)
        groups = charts_of(runs, labels)
        charts = {chart.id: chart for _, members in groups for chart in members}
        frame = self._changes(
            {
                "runs": [{"id": number, "label": label, "color": number} for number, label in enumerate(labels)],
                "groups": [
                    {"title": title, "charts": [chart._asdict() for chart in members]} for title, members in groups
                ],
                "hidden": {str(number): True for number in self._cards.hidden},
                "look": {"x": self._look.x, "smoothing": self._smoothing, "log": self._log_scale},
                "filter": self._filter,
            }
        )
        lines = self._lines.news(charts, runs, self._look)
        latest = self._latest(charts, runs)
        self._cards.update(runs, labels)
        self._panels.update(runs, labels)
        whole, self._whole = self._whole, False
        if not (frame or lines or latest or whole):
            self._seen = seen
            return
        self._number += 1
        frame |= {"lines": lines, "latest": latest, "number": self._number}
        if whole:
            frame["whole"] = True
        began = time.monotonic()
        try:
            number, seconds = await self._board.run_method("frame", frame, timeout=_DRAWN_SECONDS) or (None, None)
        except (TimeoutError, TypeError, ValueError):
            number = seconds = None
        # A little less, because the timer's ticks are not exact.
        self._rests_until = began + rest_after(seconds) - FRAME_SECONDS / 2
        if number == self._number:
            self._seen = seen if not whole else None
        else:
            # Nobody knows what it has: it gets everything once more.
            self._lines.forget()
            self._shown.clear()
            self._seen = None

    def _changes(self, whole: dict[str, Any]) -> dict[str, Any]:
        changed = {name: value for name, value in whole.items() if self._shown.get(name) != value}
        self._shown.update(changed)
        return changed

    def _latest(self, charts: dict[str, Chart], runs: list[WatchedRun]) -> dict[str, dict[int, str]]:
        """The newest value of each run in the charts that can be seen, where it has changed."""
        latest: dict[str, dict[int, str]] = {}
        for name in self._look.visible:
            if name not in charts or charts[name].kind != "metric":
                continue
            values = {}
            for number, run in enumerate(runs):
                try:
                    values[number] = plain_number(run.view.series(name).last)
                except KeyError:
                    continue
            latest[name] = values
        shown = self._shown.setdefault("latest", {})
        changed = {name: values for name, values in latest.items() if shown.get(name) != values}
        shown.update(changed)
        return changed

    async def _on_look(self, event: "GenericEventArguments") -> None:
        if isinstance(event.args, dict) and event.args.get("x") == self._look.x:
            self._look = Look.from_browser(event.args, self._look.x)
            await self.refresh()

    async def _on_control(self) -> None:
        x: Axis = self._x_choice.value or "batch"
        if x != self._look.x:
            self._look = Look(x, None, self._look.visible)
            # The browser lets go of every line when the axis changes.
            self._lines.forget()
        self._smoothing = float(self._smoothing_choice.value or 0)
        self._log_scale = bool(self._log_choice.value)
        self._filter = str(self._filter_choice.value or "")
        await self.refresh()

    async def _show_everything(self) -> None:
        self._whole = True
        await self.refresh()

    async def _on_key(self, event: "KeyEventArguments") -> None:
        modifiers = event.modifiers
        if not event.action.keydown or modifiers.ctrl or modifiers.alt or modifiers.meta:
            return
        key = str(event.key)
        if key == "x":
            axes = list(get_args(Axis))
            self._x_choice.value = axes[(axes.index(self._look.x) + 1) % len(axes)]
        elif key == "l":
            self._log_choice.value = not self._log_choice.value
        elif key in ("s", "a"):
            step = _SMOOTHING_STEP if key == "s" else -_SMOOTHING_STEP
            self._smoothing_choice.value = min(max(round(self._smoothing + step, 2), 0.0), 0.99)
        elif key == "d":
            self._next_theme()
        elif key == "0":
            await self._show_everything()
        elif key == "/":
            self._filter_choice.run_method("focus")
        elif key == "?":
            self._help.open()

    def _next_theme(self) -> None:
        self._theme = (self._theme + 1) % len(_THEMES)
        value, icon, words = _THEMES[self._theme]
        self._dark.value = value
        self._theme_button.props(f'icon={icon} aria-label="Theme: {words}"')

    def _show_link(self) -> None:
        from nicegui import ui

        with ui.dialog() as dialog, ui.card():
            ui.label(_LINK_WITH_TOKEN if self._guarded else _LINK_WITHOUT_TOKEN).style("max-width: min(70vw, 520px)")
            ui.input(value=self._view_link).props('readonly outlined dense aria-label="Link for viewers"').style(
                "width: min(70vw, 520px)"
            )
            with ui.row():
                ui.button("Copy", on_click=lambda: ui.clipboard.write(self._view_link)).props("flat")
                ui.button("Close", on_click=dialog.close).props("flat")
        dialog.on("hide", dialog.delete)
        dialog.open()


def _icon_button(icon: str, label: str) -> "Button":
    from nicegui import ui

    return ui.button(icon=icon, color=None).classes("flat-ink").props(f'flat round dense aria-label="{label}"')
