"""What is below the charts, in panels: all of them, and those of events, ranks, hyperparameters and latest values."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offloop.bus.types.hyperparameters import chosen_first, value_text
from offloop.bus.types.metrics import MetricNames
from offloop.bus.types.units import number_text, scale_of
from offloop.consumers.dashboard.view.log import LogEntry
from offloop.consumers.dashboard.view.tap import MonitoredRun
from offloop.consumers.dashboard.web.access import Role
from offloop.consumers.dashboard.web.panel import Panel, table
from offloop.consumers.dashboard.web.run_about import AboutPanel
from offloop.consumers.dashboard.web.run_alerts import AlertsPanel, note_alerts
from offloop.consumers.dashboard.web.run_checkpoints import CheckpointsPanel
from offloop.consumers.dashboard.web.run_files import FilesPanel
from offloop.consumers.dashboard.web.run_folder import RunFolder, look_into
from offloop.consumers.dashboard.web.run_images import ImagesPanel
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

    def __init__(self, role: Role, compares: bool = False) -> None:
        from nicegui import ui

        alerts, about = AlertsPanel(), AboutPanel(role, self._look_again)
        log, checkpoints, images = LogPanel(), CheckpointsPanel(), ImagesPanel()
        self._hyperparameters = HyperparametersPanel(is_open=compares)
        self._of_streams = (log, images, RanksPanel(), self._hyperparameters, ValuesPanel())
        self._of_folders = (alerts, about, checkpoints, FilesPanel())
        self._runs: Sequence[MonitoredRun] = ()
        self._labels: Sequence[str] = ()
        self.folders: dict[Path, RunFolder] = {}
        """What was found in the directories of runs when they were looked into."""
        self._looks_at = 0.0
        self._looking = False
        ui.timer(_LOOK_SECONDS, self._look)

    @property
    def opened(self) -> tuple[bool, ...]:
        """Which of them are open."""
        return tuple(panel.is_open for panel in (*self._of_streams, *self._of_folders))

    def update(self, runs: list[MonitoredRun], labels: list[str], baseline: int | None = None) -> None:
        """Brings those that are open up to date."""
        is_first = not self._runs
        self._runs, self._labels = runs, labels
        self._hyperparameters.baseline = baseline
        for panel in self._of_streams:
            panel.update(runs, labels)
        self._update_folders()
        if is_first:
            self._look_again()

    def _update_folders(self) -> None:
        for panel in self._of_folders:
            panel.update_folders(self._runs, self._labels, self.folders)

    def _look_again(self) -> None:
        self._looks_at = 0.0

    async def _look(self) -> None:
        if self._looking or not self._runs or time.monotonic() < self._looks_at:
            return
        self._looking = True
        try:
            began = time.monotonic()
            folders = await asyncio.to_thread(
                _look_into, {run.run_dir for run in self._runs if run.run_dir is not None}
            )
            note_alerts(self._runs, folders)
            self.folders = folders
            self._looks_at = time.monotonic() + max(_REST_SECONDS, _RESTS * (time.monotonic() - began))
            self._update_folders()
        finally:
            self._looking = False


def _look_into(paths: Iterable[Path]) -> dict[Path, RunFolder]:
    return {path: look_into(path) for path in paths}


class LogPanel(Panel):
    """Events and commands, as they happen."""

    def __init__(self) -> None:
        from nicegui import ui

        super().__init__("Events and commands", "list_alt", is_open=True)
        self._logged: dict[int, int] = {}
        with self.box:
            self._log = ui.log(max_lines=LOG_LINES).classes("log")
            self._log.props('role="log" tabindex="0" aria-label="Events and commands"')

    def update(self, runs: Sequence[MonitoredRun], labels: Sequence[str]) -> None:
        """Adds the lines that are new."""
        new: list[tuple[LogEntry, str]] = []
        for number, run in enumerate(runs):
            entries = run.view.log(self._logged.get(number, 0))
            if entries:
                self._logged[number] = entries[-1].number
                new += [(entry, labels[number] if len(runs) > 1 else "") for entry in entries]
        for entry, label in sorted(new, key=lambda one: one[0].time)[-LOG_LINES:]:
            at = time.strftime("%H:%M:%S", time.localtime(entry.time))
            rank = f" rank {entry.rank}" if entry.rank else ""
            kind = "" if entry.kind in ("event", "begin", "text") else f"{entry.kind}: "
            self._log.push(f"{at}  {label}{rank}{'  ' if label else ''}{kind}{entry.text}", classes=entry.kind)


class HyperparametersPanel(Panel):
    """What describes each run, with a box to search in it; of several runs first only what differs."""

    def __init__(self, is_open: bool) -> None:
        from nicegui import ui

        super().__init__("Hyperparameters", "tune", is_open)
        self.baseline: int | None = None
        """The number of the run from which the others' differences are marked."""
        self._rows: list[dict[str, str]] = []
        self._columns: list[tuple[str, str]] = []
        with self.box:
            self._find = ui.input(placeholder="find by name or value", on_change=self._show)
            self._find.props('dense outlined clearable aria-label="Find hyperparameters"').classes("panel-find")
            self._all = ui.switch("also what is the same", on_change=self._show)
            self._table = table("Hyperparameters", "name", "wrap-cells")

    def update(self, runs: Sequence[MonitoredRun], labels: Sequence[str]) -> None:
        """Shows what is known of each run."""
        told = [run.view.hyperparameters for run in runs]
        self.show(any(told))
        if self.is_open:
            self._rows = hyperparameter_rows(told, self.baseline)
            self._columns = [("name", "name"), *((str(number), label) for number, label in enumerate(labels))]
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


class ValuesPanel(Panel):
    """The newest value of every metric."""

    def __init__(self) -> None:
        super().__init__("Latest values", "table_rows", is_open=False)
        with self.box:
            self._table = table("Latest values", "metric")

    def update(self, runs: Sequence[MonitoredRun], labels: Sequence[str]) -> None:
        """Shows them."""
        if not self.is_open:
            return
        names = sorted({name for run in runs for name in run.view.names()})
        short = MetricNames(names).short
        hyperparameters = [run.view.hyperparameters for run in runs]
        rows: list[dict[str, Any]] = []
        for name in names:
            row = {"metric": short(name)}
            for number, run in enumerate(runs):
                try:
                    scale = scale_of(name, hyperparameters[number])
                    row[str(number)] = number_text(run.view.series(name).last, scale)
                except KeyError:
                    row[str(number)] = ""
            rows.append(row)
        self.fill(self._table, [("metric", "metric"), *((str(n), label) for n, label in enumerate(labels))], rows)


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
