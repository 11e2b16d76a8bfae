"""What is below the charts, in panels: all of them, and those of events, images and hyperparameters."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from offloop.bus.printing import one_line
from offloop.bus.types.hyperparameters import chosen_first, value_text
from offloop.consumers.dashboard.view.images import OF_ONE_STEP
from offloop.consumers.dashboard.view.log import LogEntry
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.web.comparison import look_of
from offloop.consumers.dashboard.web.content import address_of
from offloop.consumers.dashboard.web.folder_panels import (
    AboutPanel,
    AlertsPanel,
    CheckpointsPanel,
    FilesPanel,
    note_alerts,
)
from offloop.consumers.dashboard.web.frames import element_of
from offloop.consumers.dashboard.web.panel import Panel, PanelData, table
from offloop.consumers.dashboard.web.run_folder import look_into
from offloop.consumers.dashboard.web.run_ranks import RanksPanel

LOG_LINES = 500
"""So many lines of the log are on a page; the view behind it keeps more."""

_LONGEST_CELL = 300
_LOOK_SECONDS = 0.5
_REST_SECONDS = 3.0
_RESTS = 10
"""Looking into directories takes no more than one part in so many of a processor."""


class Panels:
    """The panels of one browser. Those that are closed are not kept up to date."""

    def __init__(self, compares: bool = False) -> None:
        from nicegui import ui

        # Who compares runs asks first what was different about them.
        self._panels: list[Panel] = [
            *(AlertsPanel(), AboutPanel(), LogPanel(), CheckpointsPanel(), ImagesPanel(), RanksPanel()),
            *(HyperparametersPanel(is_open=compares), FilesPanel()),
        ]
        self.shown = PanelData()
        self._looks_at = 0.0
        self._looking = False
        ui.timer(_LOOK_SECONDS, self._look)

    @property
    def opened(self) -> tuple[bool, ...]:
        """Which of them are open."""
        return tuple(panel.is_open for panel in self._panels)

    def update(self, runs: list[RunView], labels: list[str], baseline: int | None = None) -> None:
        """Brings those that are open up to date."""
        self.shown = self.shown._replace(runs=runs, labels=labels, baseline=baseline)
        for panel in self._panels:
            panel.update(self.shown)

    async def _look(self) -> None:
        runs = self.shown.runs
        if self._looking or not runs or time.monotonic() < self._looks_at:
            return
        self._looking = True
        try:
            began = time.monotonic()
            paths = {run.run_dir for run in runs if run.run_dir is not None}
            folders = await asyncio.to_thread(lambda: {path: look_into(path) for path in paths})
            note_alerts(runs, folders)
            self.shown = self.shown._replace(folders=folders)
            self._looks_at = time.monotonic() + max(_REST_SECONDS, _RESTS * (time.monotonic() - began))
            for panel in self._panels:
                panel.update(self.shown)
        finally:
            self._looking = False


class LogPanel(Panel):
    """Events and commands, as they happen."""

    def __init__(self) -> None:
        from nicegui import ui

        super().__init__("Events and commands", "list_alt", is_open=True)
        self.show(True)
        self._logged: dict[int, int] = {}
        with self.box:
            self._log = ui.log(max_lines=LOG_LINES).classes("log")
            self._log.props('role="log" tabindex="0" aria-label="Events and commands"')

    def update(self, shown: PanelData) -> None:
        runs, labels = shown.runs, shown.labels
        new: list[tuple[LogEntry, str]] = []
        for number, run in enumerate(runs):
            entries = run.log(self._logged.get(number, 0))
            if entries:
                self._logged[number] = entries[-1].number
                new += [(entry, labels[number] if len(runs) > 1 else "") for entry in entries]
        for entry, label in sorted(new, key=lambda one: one[0].time)[-LOG_LINES:]:
            at = time.strftime("%H:%M:%S", time.localtime(entry.time))
            rank = f" rank {entry.rank}" if entry.rank else ""
            kind = "" if entry.kind in ("event", "begin", "text") else f"{entry.kind}: "
            self._log.push(f"{at}  {label}{rank}{'  ' if label else ''}{kind}{entry.text}", classes=entry.kind)


class ImagesPanel(Panel):
    """The images of runs: of each name a slider over the steps, with all runs side by side."""

    def __init__(self) -> None:
        super().__init__("Images", "image", is_open=True)
        with self.box:
            self._element = element_of("images")
        self._shown: list[dict[str, Any]] = []

    def update(self, shown: PanelData) -> None:
        found = galleries_of(shown.runs, shown.labels)
        self.show(bool(found))
        if self.is_open and found != self._shown:
            self._shown = found
            self._element.props["galleries"] = found
            self._element.update()


def galleries_of(runs: Sequence[RunView], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Of each name of images, the runs that have some, with their steps and how many images were logged there."""
    galleries: dict[str, dict[str, Any]] = {}
    for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
        for name, steps in run.images.steps().items():
            gallery = galleries.setdefault(
                name, {"name": name, "title": one_line(name), "most": OF_ONE_STEP, "runs": []}
            )
            gallery["runs"].append(
                {
                    "label": one_line(label),
                    "color": look_of(number, len(runs))[0],
                    "address": address_of(run, "image"),
                    "steps": [step for step, _ in steps],
                    "counts": [count for _, count in steps],
                }
            )
    return list(galleries.values())


class HyperparametersPanel(Panel):
    """What describes each run, with a box to search in it; of several runs first only what differs."""

    def __init__(self, is_open: bool) -> None:
        from nicegui import ui

        super().__init__("Hyperparameters", "tune", is_open)
        self._rows: list[dict[str, str]] = []
        self._columns: list[tuple[str, str]] = []
        with self.box:
            self._find = ui.input(placeholder="find by name or value", on_change=self._show)
            self._find.props('dense outlined clearable aria-label="Find hyperparameters"').classes("panel-find")
            self._all = ui.switch("also what is the same", on_change=self._show)
            self._table = table("Hyperparameters", "name", "wrap-cells")

    def update(self, shown: PanelData) -> None:
        told = [run.hyperparameters for run in shown.runs]
        self.show(any(told))
        if self.is_open:
            self._rows = hyperparameter_rows(told, shown.baseline)
            self._columns = [("name", "name"), *((str(number), label) for number, label in enumerate(shown.labels))]
            self._all.set_visibility(len(told) > 1)
            if len(told) > 1:
                self._columns.insert(1, ("differs", "differs"))
            self._show()

    def _show(self) -> None:
        words = str(self._find.value or "").lower().split()
        rows = self._rows
        if not words and not self._all.value:
            rows = [row for row in rows if row["differs"]] or rows
        self.fill(self._table, self._columns, [row for row in rows if _has_words(row, words)])


def _has_words(row: Mapping[str, str], words: Sequence[str]) -> bool:
    text = "\n".join(row.values()).lower()
    return all(word in text for word in words)


def hyperparameter_rows(told: Sequence[Mapping[str, Any]], baseline: int | None = None) -> list[dict[str, str]]:
    """A row for each name that one of the runs has, with the value of each; of several runs those that differ first,
    with a mark. Each value that is another one than the baseline's has a mark of its own."""
    rows = []
    for name in chosen_first({name: None for values in told for name in values}):
        texts = [value_text(values[name]) if name in values else "" for values in told]
        rows.append(
            {
                "name": name,
                "differs": "≠" if len(set(texts)) > 1 else "",
                **{str(number): _compared(text, texts, baseline) for number, text in enumerate(texts)},
            }
        )
    return sorted(rows, key=lambda row: not row["differs"])


def _compared(text: str, texts: Sequence[str], baseline: int | None) -> str:
    if baseline is None or text == texts[baseline]:
        return text[:_LONGEST_CELL]
    return f"≠ {text[:_LONGEST_CELL] or 'nothing'}"
