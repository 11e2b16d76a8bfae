"""What the panels below the charts have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.web.run_folder import RunFolder


class PanelData(NamedTuple):
    """What panels show at one moment."""

    runs: Sequence[RunView] = ()
    labels: Sequence[str] = ()
    baseline: int | None = None
    """The number of the run from which the others' differences are marked."""
    folders: dict[Path, RunFolder] = {}  # noqa: RUF012  never changed
    """What was found in the directories of runs when they were looked into."""

    def found(self) -> list[tuple[RunView, str, RunFolder]]:
        """The runs whose directories were found: of each its newest attempt, and what the run is called."""
        newest = {
            run.run_dir: (run, label.removesuffix(f" #{run.attempt}"), self.folders[run.run_dir])
            for run, label in zip(self.runs, self.labels, strict=True)
            if run.run_dir in self.folders
        }
        return list(newest.values())


class Panel(ABC):
    """A part of the page that can be opened and closed. One that is closed is not kept up to date."""

    def __init__(self, title: str, icon: str, is_open: bool) -> None:
        from nicegui import ui

        self.box: Any = ui.expansion(title, icon=icon, value=is_open).classes("panel").props("dense")
        # Hidden until it has something to show: the server ignores a click on what it has just hidden.
        self.show(False)
        self._filled: dict[int, Any] = {}

    @property
    def is_open(self) -> bool:
        """Whether somebody has it open."""
        return bool(self.box.value)

    def show(self, is_shown: bool) -> None:
        """Whether it is there at all."""
        self.box.set_visibility(is_shown)

    @abstractmethod
    def update(self, shown: PanelData) -> None:
        """Brings it up to date, if it is open."""

    def fill(self, table: Any, columns: list[tuple[str, str]], rows: list[dict[str, Any]]) -> None:
        """Brings a table of its own up to date, by the keys of the rows and the columns' heads. The column ``run`` is
        there where there are several."""
        if len({row.get("run") for row in rows}) < 2:
            columns = [column for column in columns if column[0] != "run"]
        if self._filled.get(table.id) == (columns, rows):
            return
        self._filled[table.id] = columns, rows
        table.columns = [{"name": key, "label": label, "field": key, "align": "left"} for key, label in columns]
        table.rows = rows


def table(name: str, row_key: str, more: str = "") -> Any:
    """A table of a panel, with that name for those who cannot see it."""
    from nicegui import ui

    return ui.table(rows=[], columns=[], row_key=row_key).props(f'dense flat {more} aria-label="{name}"')
