"""The panel of the files in a run's directory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from offloop.bus.printing import one_line
from offloop.bus.types.units import number_text, scale_of, when
from offloop.consumers.dashboard.view.tap import MonitoredRun
from offloop.consumers.dashboard.web.content import IMAGE_ENDINGS, TEXT_ENDINGS, address_of
from offloop.consumers.dashboard.web.panel import Panel, runs_by_folder, table
from offloop.consumers.dashboard.web.run_folder import MOST_FILES, RunFolder

_ACTIONS = """
<q-td :props="props">
  <a :href="props.row.address" download class="file-link" :aria-label="'Download ' + props.row.path">download</a>
  <a v-if="props.row.shown" :href="props.row.address + '&show=true'" target="_blank" class="file-link"
     :aria-label="'Show ' + props.row.path">show</a>
</q-td>"""


class FilesPanel(Panel):
    """What lies in the directories of runs."""

    def __init__(self) -> None:
        from nicegui import ui

        super().__init__("Files", "folder_open", is_open=False)
        with self.box:
            self._note = ui.label().classes("soft")
            self._table = table("Files", "key")
            self._table.add_slot("body-cell-do", _ACTIONS)

    def update_folders(
        self, runs: Sequence[MonitoredRun], labels: Sequence[str], folders: Mapping[Path, RunFolder]
    ) -> None:
        """Shows what is there."""
        if not self.is_open:
            return
        chosen = runs_by_folder(runs, labels)
        rows: list[dict[str, Any]] = []
        notes = [f"The files of {label} are on another machine." for label, run in _elsewhere(runs, labels)]
        for number, (path, (run, label)) in enumerate(chosen.items()):
            folder = folders.get(path)
            if folder is None:
                continue
            if folder.is_cut:
                notes.append(f"The first {MOST_FILES:,} files of {label} are listed.")
            for file in folder.files:
                rows.append(
                    {
                        "key": f"{number}/{file.path}",
                        "run": label,
                        "path": one_line(file.path),
                        "size": number_text(file.size, scale_of("size_bytes", {})),
                        "time": when(file.time),
                        "address": f"{address_of(run, 'file')}?path={quote(file.path)}",
                        "shown": file.path.lower().endswith((*IMAGE_ENDINGS, *TEXT_ENDINGS)),
                    }
                )
        self._note.set_text(" ".join(notes))
        self._note.set_visibility(bool(notes))
        columns = [("path", "file"), ("size", "size"), ("time", "written"), ("do", "")]
        self.fill(self._table, [*([("run", "run")] if len(chosen) > 1 else []), *columns], rows)


def _elsewhere(runs: Sequence[MonitoredRun], labels: Sequence[str]) -> list[tuple[str, MonitoredRun]]:
    return [
        (label, run)
        for run, label in zip(runs, labels, strict=True)
        if run.run_dir is None and run.view.status != "waiting"
    ]
