"""The base of the panels below the charts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offloop.consumers.api.optional import ui
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.web.run_folder import RunFolder


class PanelData(NamedTuple):
    runs: Sequence[RunView] = ()
    labels: Sequence[str] = ()
    baseline: int | None = None  # the number of the run that the others are compared with
    folders: dict[Path, RunFolder] = {}  # noqa: RUF012  never changed
    """Contents of the runs' directories."""

    def found(self) -> list[tuple[RunView, str, RunFolder]]:
        newest = {
            run.run_dir: (run, label.removesuffix(f" #{run.attempt}"), self.folders[run.run_dir])
            for run, label in zip(self.runs, self.labels, strict=True)
            if run.run_dir in self.folders
        }
        return list(newest.values())


class Panel(ABC):
    """A part of the page that can be opened and closed. A closed one is not updated."""

    def __init__(self, title: str, icon: str, is_open: bool) -> None:
        self.box: Any = ui.expansion(title, icon=icon, value=is_open).classes("panel").props("dense")
        # Hidden until it has content: the server ignores a click on a just hidden one.
        self.show(False)
        self._filled: dict[int, Any] = {}

    @property
    def is_open(self) -> bool:
        return bool(self.box.value)

    def show(self, is_shown: bool) -> None:
        self.box.set_visibility(is_shown)

    @abstractmethod
    def update(self, shown: PanelData) -> None:
        """Update it, if it is open."""

    def fill(self, table: Any, columns: list[tuple[str, str]], rows: list[dict[str, Any]]) -> None:
        """Update a table by the keys of the rows and the columns' heads; ``run`` only for several runs."""
        if len({row.get("run") for row in rows}) < 2:
            columns = [column for column in columns if column[0] != "run"]
        if self._filled.get(table.id) == (columns, rows):
            return
        self._filled[table.id] = columns, rows
        table.columns = [{"name": key, "label": label, "field": key, "align": "left"} for key, label in columns]
        table.rows = rows


def table(name: str, row_key: str, more: str = "") -> Any:
    return ui.table(rows=[], columns=[], row_key=row_key).props(f'dense flat {more} aria-label="{name}"')
