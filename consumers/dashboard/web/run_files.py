"""The panel of the files in a run's directory."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from offloop.bus.printing import escape, one_line
from offloop.bus.types.units import number_text, scale_of, when
from offloop.consumers.dashboard.view.tap import MonitoredRun
from offloop.consumers.dashboard.web.content import IMAGE_ENDINGS, address_of
from offloop.consumers.dashboard.web.panel import Panel, runs_by_folder, table
from offloop.consumers.dashboard.web.run_folder import MOST_FILES, RunFolder, open_in

if TYPE_CHECKING:
    from nicegui.events import GenericEventArguments

SHOWN_BYTES = 256 << 10
"""So much of a text is shown; the rest is for a download."""

_SHOWN_IMAGE_BYTES = 8 << 20
_TEXT_ENDINGS = (".csv", ".json", ".jsonl", ".log", ".md", ".txt", ".yaml", ".yml", ".tsv", ".toml")
_ACTIONS = """
<q-td :props="props">
  <a :href="props.row.address" download class="file-link" :aria-label="'Download ' + props.row.path">download</a>
  <button v-if="props.row.shown" type="button" class="file-link" :aria-label="'Show ' + props.row.path"
          @click="$parent.$emit('show', props.row.key)">show</button>
</q-td>"""


class FilesPanel(Panel):
    """What lies in the directories of runs."""

    def __init__(self) -> None:
        from nicegui import ui

        super().__init__("Files", "folder_open", is_open=False)
        self._found: dict[str, tuple[MonitoredRun, Path, str]] = {}
        with self.box:
            self._note = ui.label().classes("soft")
            self._table = table("Files", "key")
            self._table.add_slot("body-cell-do", _ACTIONS)
            self._table.on("show", self._on_show)
            self._dialogs = ui.element("div")

    def update_folders(
        self, runs: Sequence[MonitoredRun], labels: Sequence[str], folders: Mapping[Path, RunFolder]
    ) -> None:
        """Shows what is there."""
        if not self.is_open:
            return
        chosen = runs_by_folder(runs, labels)
        rows: list[dict[str, Any]] = []
        self._found.clear()
        notes = [f"The files of {label} are on another machine." for label, run in _elsewhere(runs, labels)]
        for number, (path, (run, label)) in enumerate(chosen.items()):
            folder = folders.get(path)
            if folder is None:
                continue
            if folder.is_cut:
                notes.append(f"The first {MOST_FILES:,} files of {label} are listed.")
            for file in folder.files:
                key = f"{number}/{file.path}"
                self._found[key] = run, path, file.path
                rows.append(
                    {
                        "key": key,
                        "run": label,
                        "path": one_line(file.path),
                        "size": number_text(file.size, scale_of("size_bytes", {})),
                        "time": when(file.time),
                        "address": f"{address_of(run, 'file')}?path={quote(file.path)}",
                        "shown": _kind(file.path, file.size) is not None,
                    }
                )
        self._note.set_text(" ".join(notes))
        self._note.set_visibility(bool(notes))
        columns = [("path", "file"), ("size", "size"), ("time", "written"), ("do", "")]
        self.fill(self._table, [*([("run", "run")] if len(chosen) > 1 else []), *columns], rows)

    async def _on_show(self, event: "GenericEventArguments") -> None:
        from nicegui import ui

        found = self._found.get(event.args) if isinstance(event.args, str) else None
        if found is None:
            return
        run, root, path = found
        text = None
        if not path.lower().endswith(IMAGE_ENDINGS):
            text = await asyncio.to_thread(read_text, root, path)
        with self._dialogs, ui.dialog() as dialog, ui.card().classes("file-card"):
            ui.label(one_line(path)).classes("file-title").props('role="heading" aria-level="2"')
            if text is None:
                image = ui.element("img").classes("file-image")
                image.props["src"] = f"{address_of(run, 'file')}?path={quote(path)}"
                image.props["alt"] = one_line(path)
            else:
                ui.label(text).classes("file-text").props('tabindex="0" role="region" aria-label="Text"')
            ui.button("Close", on_click=dialog.close).props("flat no-caps autofocus")
        dialog.on("hide", dialog.delete)
        dialog.open()


def read_text(root: Path, path: str) -> str:
    """The beginning of a text file in a run's directory, or why it cannot be read. What is no text for people, such as
    codes for terminals, is written in plain letters."""
    try:
        with open(open_in(root, path), "rb") as file:
            content = file.read(SHOWN_BYTES + 1)
    except OSError as error:
        return f"It cannot be read: {error.strerror or error}"
    text = content[:SHOWN_BYTES].decode("utf-8", "backslashreplace")
    shown = "\n".join(escape(line.expandtabs(4)) for line in text.splitlines())
    return shown + (
        f"\n... (the first {SHOWN_BYTES >> 10} KiB; download it to see the rest)" * (len(content) > SHOWN_BYTES)
    )


def _kind(path: str, size: int) -> str | None:
    name = path.lower()
    if name.endswith(IMAGE_ENDINGS):
        return "image" if size <= _SHOWN_IMAGE_BYTES else None
    return "text" if name.endswith(_TEXT_ENDINGS) else None


def _elsewhere(runs: Sequence[MonitoredRun], labels: Sequence[str]) -> list[tuple[str, MonitoredRun]]:
    return [
        (label, run)
        for run, label in zip(runs, labels, strict=True)
        if run.run_dir is None and run.view.status != "waiting"
    ]
