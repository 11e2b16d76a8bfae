"""The top of each page, with dialogs and messages."""

from collections.abc import Sequence

from offloop.bus.printing import one_line
from offloop.consumers.api.optional import ui
from offloop.consumers.dashboard.web.access import Role

PRIMARY, NEGATIVE = "#1a67c4", "#c93a2b"

_LONGEST_SETTINGS = 10_000
_ABOUT_LINK = "This link shows everything, and cannot command the training:"
_READING_MS = 10_000


class PageTop:
    """The header of a page, with the link for viewers and the list of keys.

    Scripts add the link to all runs and the choice of a theme."""

    def __init__(self, role: Role, view_link: str, keys: Sequence[tuple[str, str]]) -> None:
        self.view_link = view_link  # the address of the same page for viewers; empty without tokens
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
        self._help.open()

    async def _show_link(self) -> None:
        settings = await ui.run_javascript("location.hash")
        link = self.view_link + (settings[:_LONGEST_SETTINGS] if isinstance(settings, str) else "")
        show_text(_ABOUT_LINK, "Link for viewers", link)


def _icon_button(icon: str, label: str) -> "ui.button":
    return ui.button(icon=icon, color=None).classes("flat-ink").props(f'flat round dense aria-label="{label}"')


async def is_sure(question: Sequence[str], yes: str, no: str) -> bool:
    with ui.dialog().props('role="alertdialog"') as dialog, ui.card():
        dialog.props["aria-label"] = yes
        ui.label(question[0]).classes("question").props('role="heading" aria-level="2"')
        for line in question[1:]:
            ui.label(line).classes("question")
        with ui.row():
            ui.button(yes, on_click=lambda: dialog.submit(True)).props('color="negative" no-caps')
            ui.button(no, on_click=lambda: dialog.submit(False)).props("flat no-caps autofocus")
    sure = bool(await dialog)
    dialog.delete()
    return sure


def show_text(about: str, name: str, text: str) -> None:
    with ui.dialog() as dialog, ui.card().classes("file-card"):
        dialog.props["aria-label"] = name
        ui.label(about).classes("question")
        box = ui.textarea(value=text).props("readonly outlined autogrow").classes("text-to-copy")
        box.props["aria-label"] = name
        with ui.row():
            ui.button("Copy", on_click=lambda: ui.clipboard.write(text)).props("flat no-caps")
            ui.button("Close", on_click=dialog.close).props("flat no-caps autofocus")
    dialog.on("hide", dialog.delete)
    dialog.open()


def show_error(text: str) -> None:
    ui.notify(one_line(text), type="negative", close_button="Close", timeout=_READING_MS)
