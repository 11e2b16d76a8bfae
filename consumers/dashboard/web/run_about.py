"""The panel that says what a run is: its start, its attempts, and what people say of it."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offloop.bus.cli.describe import describe_start, start_lines
from offloop.bus.errors import OffloopError
from offloop.bus.index.annotations import MAX_NOTE, MAX_TAG, Annotations, annotate
from offloop.bus.index.entry import GOING_ON
from offloop.bus.printing import one_line
from offloop.bus.runs.directory import RunInfo
from offloop.bus.types.units import lasted, when
from offloop.consumers.dashboard.view.tap import MonitoredRun
from offloop.consumers.dashboard.web.access import Role
from offloop.consumers.dashboard.web.dialogs import show_error
from offloop.consumers.dashboard.web.panel import Panel, runs_by_folder, table
from offloop.consumers.dashboard.web.run_folder import RunFolder, forget

if TYPE_CHECKING:
    from nicegui.elements.textarea import Textarea

_MOST_EDITED = 8
_LONGEST = 2000


class AboutPanel(Panel):
    """What runs say of themselves, and people of them."""

    def __init__(self, role: Role, changed: Callable[[], None]) -> None:
        from nicegui import ui

        super().__init__("About the run", "info", is_open=False)
        self.show(False)
        self._role = role
        self._changed = changed
        self._said: dict[Path, Said] = {}
        with self.box:
            self._people = ui.element("div").classes("said")
            self._facts = table("About the run", "name", "wrap-cells hide-header").classes("facts")
            self._attempts = table("Attempts", "key", "wrap-cells")

    def update_folders(
        self, runs: Sequence[MonitoredRun], labels: Sequence[str], folders: Mapping[Path, RunFolder]
    ) -> None:
        """Shows what is known."""
        chosen: list[tuple[str, RunFolder, RunInfo]] = []
        for path, (_, label) in runs_by_folder(runs, labels).items():
            folder = folders.get(path)
            if folder is not None and folder.run is not None:
                chosen.append((label, folder, folder.run))
        self.show(bool(chosen))
        if not self.is_open:
            return
        for label, folder, _ in chosen[:_MOST_EDITED]:
            said = self._said.get(folder.path)
            if said is None:
                with self._people:
                    said = Said(folder.path, label if len(chosen) > 1 else "", self._role, self._changed)
                self._said[folder.path] = said
            said.update(folder.annotations)
        facts = [dict(facts_of(run)) for _, _, run in chosen]
        names = dict.fromkeys(name for one in facts for name in one)
        rows = [{"name": name, **{str(n): one.get(name, "") for n, one in enumerate(facts)}} for name in names]
        heads = [("name", ""), *((str(number), label) for number, (label, _, _) in enumerate(chosen))]
        self.fill(self._facts, heads, rows)
        several = [("run", "run")] if len(chosen) > 1 else []
        columns = [*several, ("attempt", "attempt"), ("status", "status"), ("began", "began"), ("ended", "ended")]
        attempts = [row for label, _, run in chosen for row in _attempts_of(label, run)]
        self.fill(self._attempts, [*columns, ("lasted", "lasted"), ("reached", "reached"), ("why", "why")], attempts)


def facts_of(run: RunInfo) -> Iterator[tuple[str, str]]:
    """By what, where and how a run was started, for people; what is not known is left out."""
    for name, text in (*start_lines(describe_start(run)), ("directory", str(run.path.absolute()))):
        yield name, one_line(text)[:_LONGEST]


def _attempts_of(label: str, run: RunInfo) -> Iterator[dict[str, Any]]:
    for attempt in run.attempts:
        status = run.status if attempt is run.last else attempt.status
        is_live = status in GOING_ON
        yield {
            "key": f"{label}/{attempt.number}",
            "run": label,
            "attempt": str(attempt.number),
            "status": one_line(status),
            "began": when(attempt.started),
            "ended": "" if attempt.ended is None else when(attempt.ended),
            "lasted": lasted(attempt.started, attempt.ended, live=False) if not is_live else "",
            "reached": "" if attempt.reached is None else one_line(str(attempt.reached)),
            "why": one_line(str(attempt.error or attempt.reason or "")),
        }


class Said:
    """The tags and the note of one run; whoever may command changes them in place."""

    def __init__(self, path: Path, label: str, role: Role, changed: Callable[[], None]) -> None:
        from nicegui import ui

        self._path = path
        self._may_change = role is Role.COMMAND
        self._changed = changed
        self._shown: Annotations | None = None
        self._note: Textarea | None = None
        self._is_writing = False
        name = f" of {label}" if label else ""
        with ui.element("section").classes("said-run").props(f'aria-label="{_attribute(f"Tags and note{name}")}"'):
            if label:
                ui.label(label).classes("said-name")
            self._tags = ui.element("div").classes("said-tags")
            if self._may_change:
                self._note = ui.textarea(placeholder="a note: what this run is about").classes("said-note")
                self._note.props(f'outlined dense autogrow maxlength="{MAX_NOTE}"')
                self._note.props["aria-label"] = f"Note{name}"
                self._note.on("focus", partial(self._write, True))
                self._note.on("blur", partial(self._write, False))
            else:
                self._text = ui.label().classes("said-text")

    def update(self, said: Annotations) -> None:
        """Shows what is said now, but for a note that somebody writes at this moment."""
        if self._shown is None or said.tags != self._shown.tags:
            self._show_tags(said.tags)
        if self._note is None:
            self._text.set_text(said.note or ("" if said.tags else "no tags and no note"))
        elif not self._is_writing and self._note.value != said.note:
            self._note.set_value(said.note)
        self._shown = said

    def _show_tags(self, tags: Sequence[str]) -> None:
        from nicegui import ui

        self._tags.clear()
        with self._tags:
            for tag in tags:
                with ui.element("span").classes("pill said-tag"):
                    ui.label(one_line(tag))
                    if self._may_change:
                        remove = ui.element("button").classes("said-remove")
                        remove.props["aria-label"] = f"Remove tag {one_line(tag)}"
                        remove.on("click", partial(self._change, remove=[tag]))
                        with remove:
                            ui.label("\N{MULTIPLICATION SIGN}").props('aria-hidden="true"')
            if self._may_change:
                new = (
                    ui.input(placeholder="add a tag").classes("said-new").props(f'dense outlined maxlength="{MAX_TAG}"')
                )
                new.props["aria-label"] = "Add a tag"

                async def add() -> None:
                    tag, new.value = str(new.value or "").strip(), ""
                    if tag:
                        await self._change(add=[tag])

                new.on("keydown.enter", add)

    async def _write(self, begins: bool) -> None:
        self._is_writing = begins
        if not begins and self._note is not None and self._shown is not None:
            note = str(self._note.value or "")
            if note != self._shown.note:
                await self._change(note=note)

    async def _change(self, **changes: Any) -> None:
        # A browser may send what has no element on its page.
        if not self._may_change:
            return
        try:
            said = await asyncio.to_thread(annotate, self._path, **changes)
        except OffloopError as error:
            with self._tags:
                show_error(str(error))
            return
        forget(self._path)
        self.update(said)
        self._changed()


def _attribute(text: str) -> str:
    return one_line(text).replace('"', "'")
