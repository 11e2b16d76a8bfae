"""The top of each page: its name, and what is done with the page as a whole."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from offloop.consumers.dashboard.web.access import Role
from offloop.consumers.dashboard.web.dialogs import show_text

if TYPE_CHECKING:
    from nicegui.elements.button import Button

PRIMARY, NEGATIVE = "#1a67c4", "#c93a2b"

_LONGEST_SETTINGS = 10_000
_ABOUT_LINK = "Whoever opens this link sees everything and cannot command the training:"


class PageTop:
    """The header of a page, with the link for viewers and the list of keys. Scripts put the way to all runs and the
    choice of a theme there."""

    def __init__(self, role: Role, view_link: str, keys: Sequence[tuple[str, str]]) -> None:
        from nicegui import ui

        self.view_link = view_link
        """The address of the same page for viewers; empty without tokens."""
        with ui.element("header").classes("top"):
            ui.html('<h1 class="brand">offloop <small>training, as it happens</small></h1>', sanitize=False)
            ui.html('<span id="home"></span>', sanitize=False)
            ui.element("div").classes("spread")
            if role is Role.VIEW:
                ui.label("view only").classes("pill")
            elif view_link:
                _icon_button("share", "Link for viewers").on_click(self._show_link)
            ui.html('<span id="theme"></span>', sanitize=False)
            help_button = _icon_button("keyboard", "Keyboard shortcuts")
        with ui.dialog() as self._help, ui.card():
            rows = "".join(f"<tr><td><kbd>{key}</kbd></td><td>{does}</td></tr>" for key, does in keys)
            ui.html(f'<h2>Keyboard</h2><table class="keys">{rows}</table>', sanitize=False)
            ui.button("Close", on_click=self._help.close).props("flat")
        help_button.on_click(self._help.open)

    def show_keys(self) -> None:
        """Opens the list of keys."""
        self._help.open()

    async def _show_link(self) -> None:
        from nicegui import ui

        settings = await ui.run_javascript("location.hash")
        link = self.view_link + (settings[:_LONGEST_SETTINGS] if isinstance(settings, str) else "")
        show_text(_ABOUT_LINK, "Link for viewers", link)


def _icon_button(icon: str, label: str) -> "Button":
    from nicegui import ui

    return ui.button(icon=icon, color=None).classes("flat-ink").props(f'flat round dense aria-label="{label}"')
