"""Questions and messages in front of a page."""

from collections.abc import Sequence

from offloop.bus.printing import one_line

_READING_MS = 10_000


async def is_sure(question: Sequence[str], yes: str, no: str) -> bool:
    """Asks before something that cannot be undone: a heading, and lines below it."""
    from nicegui import ui

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
    """Shows a text to be copied, with what it is for and a name for those who cannot see it."""
    from nicegui import ui

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
    """Shows what went wrong."""
    from nicegui import ui

    ui.notify(one_line(text), type="negative", close_button="Close", timeout=_READING_MS)
