"""The panels below the charts."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from offloop.bus.cli.describe import describe_start, start_lines
from offloop.bus.index.checkpoints import Checkpoint
from offloop.bus.index.entry import GOING_ON
from offloop.bus.printing import one_line
from offloop.bus.runs.alerts import FIRING, firing
from offloop.bus.runs.directory import RunInfo
from offloop.bus.types.event import CUSTOM, TABLE
from offloop.bus.types.hyperparameters import chosen_first, value_text
from offloop.bus.types.metrics import MetricNames, is_of_evaluation, shown_step
from offloop.bus.types.units import BYTES, lasted, number_text, scale_of, when
from offloop.consumers.api.optional import ui
from offloop.consumers.dashboard.view.images import OF_ONE_STEP
from offloop.consumers.dashboard.view.log import LogEntry
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.web.comparison import look_of
from offloop.consumers.dashboard.web.console import ConsolePanel
from offloop.consumers.dashboard.web.content import address_of
from offloop.consumers.dashboard.web.frames import element_of
from offloop.consumers.dashboard.web.panel import Panel, PanelData, table
from offloop.consumers.dashboard.web.run_folder import RunFolder, look_into
from offloop.consumers.dashboard.web.run_ranks import RanksPanel
from offloop.consumers.dashboard.web.tables import OwnPanel

LOG_LINES = 500  # lines of the log on a page; the view keeps more

_LONGEST_CELL = 300
_LOOK_SECONDS = 0.5
_REST_SECONDS = 3.0
_RESTS = 10  # reading directories takes at most one part in this number of a processor


class Panels:
    def __init__(self, runs: Sequence[RunView], compares: bool = False) -> None:
        # For a comparison, the differences of hyperparameters come first.
        self._panels: list[Panel] = [
            *(AlertsPanel(), FilesPanel(), OwnPanel("Tables", "table_chart", TABLE, runs), AboutPanel()),
            *(ConsolePanel(), LogPanel()),
            *(OwnPanel("Spans", "segment", CUSTOM, runs), CheckpointsPanel(), ImagesPanel(), RanksPanel()),
            HyperparametersPanel(is_open=compares),
        ]
        self.shown: PanelData = PanelData()
        self._looks_at = 0.0
        self._looking = False
        ui.timer(_LOOK_SECONDS, self._look)

    @property
    def opened(self) -> tuple[bool, ...]:
        return tuple(panel.is_open for panel in self._panels)

    def update(self, runs: list[RunView], labels: list[str], baseline: int | None = None) -> None:
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
            folders = await asyncio.to_thread(_look, runs, paths)
            note_alerts(runs, folders)
            self.shown = self.shown._replace(folders=folders)
            self._looks_at = time.monotonic() + max(_REST_SECONDS, _RESTS * (time.monotonic() - began))
            for panel in self._panels:
                panel.update(self.shown)
        finally:
            self._looking = False


def _look(runs: Sequence[RunView], paths: Iterable[Path]) -> dict[Path, RunFolder]:
    for run in runs:
        run.count_own()
        run.look_at_console()
    return {path: look_into(path) for path in paths}


class LogPanel(Panel):
    def __init__(self) -> None:
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
    def __init__(self, is_open: bool) -> None:
        super().__init__("Hyperparameters", "tune", is_open)
        self._rows: list[dict[str, str]] = []
        self._columns: list[tuple[str, str]] = []
        with self.box:
            self._find = ui.input(placeholder="find by name or value", on_change=self._show)
            self._find.props('dense outlined clearable aria-label="Find hyperparameters"').classes("panel-find")
            self._all = ui.switch("also equal values", on_change=self._show)
            self._table = table("Hyperparameters", "name", "wrap-cells")

    def update(self, shown: PanelData) -> None:
        by_run = [run.hyperparameters for run in shown.runs]
        self.show(any(by_run))
        if self.is_open:
            self._rows = hyperparameter_rows(by_run, shown.baseline)
            self._columns = [("name", "name"), *((str(number), label) for number, label in enumerate(shown.labels))]
            self._all.set_visibility(len(by_run) > 1)
            if len(by_run) > 1:
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


def hyperparameter_rows(by_run: Sequence[Mapping[str, Any]], baseline: int | None = None) -> list[dict[str, str]]:
    """Return a row for each name with the value of each run: differing ones first, with marks.

    Each value that differs from the baseline's has a mark too."""
    rows = []
    for name in chosen_first({name: None for values in by_run for name in values}):
        texts = [value_text(values[name]) if name in values else "" for values in by_run]
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


_MOST_ROWS = 200  # limit of alerts, and of checkpoints of a run, the newest

_LONGEST = 2000
_SHOWN_METRICS = 4
_COMPARED_METRICS = 256
_STATUS = """
<q-td :props="props">
  <span class="pill mark" :class="props.row.status">{{ props.row.status }}</span>
</q-td>"""
_FILE = """
<q-td :props="props">
  <a class="link" :href="props.row.address" target="_blank" rel="noopener">{{ props.value }}</a>
</q-td>"""
_VERDICT = """
<q-td :props="props">{{ props.value }}<a v-if="!props.value" class="link"
  href="https://ui.perfetto.dev" target="_blank" rel="noopener noreferrer">drop it into Perfetto</a></q-td>"""
_CHECKPOINT = """
<q-td :props="props">
  <span class="checkpoint-name">{{ props.row.name }}</span>
  <span v-for="mark in props.row.marks" :key="mark" class="pill mark" :class="mark">{{ mark }}</span>
</q-td>"""


class AboutPanel(Panel):
    def __init__(self) -> None:
        super().__init__("About the run", "info", is_open=False)
        with self.box:
            self._facts = table("About the run", "name", "wrap-cells hide-header").classes("facts")
            self._attempts = table("Attempts", "key", "wrap-cells")

    def update(self, shown: PanelData) -> None:
        chosen = [(label, folder, folder.run) for _, label, folder in shown.found() if folder.run is not None]
        self.show(bool(chosen))
        if not self.is_open:
            return
        facts = [facts_of(run, folder) for _, folder, run in chosen]
        names = dict.fromkeys(name for one in facts for name in one)
        rows = [{"name": name, **{str(n): one.get(name, "") for n, one in enumerate(facts)}} for name in names]
        heads = [("name", ""), *((str(number), label) for number, (label, _, _) in enumerate(chosen))]
        self.fill(self._facts, heads, rows)
        keys = ("run", "attempt", "status", "began", "ended", "lasted", "reached", "why")
        attempts = [row for label, _, run in chosen for row in _attempts_of(label, run)]
        self.fill(self._attempts, [(key, key) for key in keys], attempts)


def facts_of(run: RunInfo, folder: RunFolder) -> dict[str, str]:
    said = folder.annotations
    facts = {"tags": ", ".join(said.tags), "note": said.note, **dict(start_lines(describe_start(run)))}
    facts["directory"] = str(run.path.absolute())
    return {name: one_line(text)[:_LONGEST] for name, text in facts.items() if text}


def _attempts_of(label: str, run: RunInfo) -> list[dict[str, Any]]:
    rows = []
    for attempt in run.attempts:
        status = run.status if attempt is run.last else attempt.status
        rows.append(
            {
                "key": f"{label}/{attempt.number}",
                "run": label,
                "attempt": str(attempt.number),
                "status": one_line(status),
                "began": when(attempt.started),
                "ended": "" if attempt.ended is None else when(attempt.ended),
                "lasted": "" if status in GOING_ON else lasted(attempt.started, attempt.ended, live=False),
                "reached": "" if attempt.reached is None else one_line(str(attempt.reached)),
                "why": one_line(str(attempt.error or attempt.reason or "")),
            }
        )
    return rows


class AlertsPanel(Panel):
    def __init__(self) -> None:
        super().__init__("Alerts", "notifications", is_open=True)
        with self.box:
            self._table = table("Alerts", "key", "wrap-cells")
            self._table.add_slot("body-cell-status", _STATUS)

    def update(self, shown: PanelData) -> None:
        rows: list[tuple[float, dict[str, Any]]] = []
        for _, label, folder in shown.found():
            holding = {alert.id for alert in firing(folder.alerts)}
            for alert in folder.alerts:
                status = "resolved" if alert.status != FIRING else "firing" if alert.id in holding else "fired"
                row = {
                    "key": f"{folder.path}/{alert.id}",
                    "run": label,
                    "time": when(alert.time),
                    "status": status,
                    "batch": f"{alert.batch:,}",
                    "text": one_line(alert.text),
                }
                rows.append((alert.time, row))
        self.show(bool(rows))
        rows.sort(key=lambda one: one[0], reverse=True)
        columns = [("time", "time"), ("run", "run"), ("status", "status"), ("batch", "batch"), ("text", "what")]
        if self.is_open:
            self.fill(self._table, columns, [row for _, row in rows[:_MOST_ROWS]])


class FilesPanel(Panel):
    def __init__(self) -> None:
        super().__init__("Stacks and profiles", "troubleshoot", is_open=True)
        with self.box:
            self._table = table("Stacks and profiles", "key", "wrap-cells")
            self._table.add_slot("body-cell-file", _FILE)
            self._table.add_slot("body-cell-what", _VERDICT)

    def update(self, shown: PanelData) -> None:
        rows: list[tuple[float, dict[str, Any]]] = []
        for run, label, folder in shown.found():
            for name, time_, verdict in folder.files:
                row = {"key": f"{folder.path}/{name}", "run": label, "time": when(time_), "file": name}
                row |= {"address": address_of(run, f"file/{name}"), "what": one_line(verdict)}
                rows.append((time_, row))
        self.show(bool(rows))
        rows.sort(key=lambda one: one[0], reverse=True)
        columns = [("time", "time"), ("run", "run"), ("file", "file"), ("what", "what")]
        if self.is_open:
            self.fill(self._table, columns, [row for _, row in rows[:_MOST_ROWS]])


def alerts_text(run: RunView, folders: Mapping[Path, RunFolder]) -> tuple[str, bool]:
    folder = None if run.run_dir is None else folders.get(run.run_dir)
    alerts = [] if folder is None else [alert for alert in folder.alerts if alert.attempt == run.attempt]
    count = sum(alert.status == FIRING for alert in alerts)
    return f"{count:,} alert{'s' * (count != 1)}" if count else "", bool(firing(alerts))


def note_alerts(runs: Sequence[RunView], folders: Mapping[Path, RunFolder]) -> None:
    for run in runs:
        folder = None if run.run_dir is None else folders.get(run.run_dir)
        if folder is not None:
            for alert in folder.alerts:
                if alert.attempt == run.attempt:
                    run.take_alert(
                        alert.id, alert.time, alert.text if alert.status == FIRING else f"resolved: {alert.text}"
                    )


class CheckpointsPanel(Panel):
    def __init__(self) -> None:
        super().__init__("Checkpoints", "save", is_open=True)
        with self.box:
            self._table = table("Checkpoints", "key")
            self._table.add_slot("body-cell-name", _CHECKPOINT)

    def update(self, shown: PanelData) -> None:
        chosen = [one for one in shown.found() if one[2].checkpoints]
        self.show(bool(chosen))
        if not self.is_open:
            return
        metrics: dict[str, None] = {}
        rows: list[dict[str, Any]] = []
        for run, label, folder in chosen:
            attempts = [one for one in shown.runs if one.run_dir == run.run_dir]
            for place, checkpoint in enumerate(reversed(folder.checkpoints[-_MOST_ROWS:])):
                values = metrics_at(attempts, checkpoint)
                metrics.update(dict.fromkeys(values))
                rows.append({"key": f"{folder.path}/{place}", "run": label, **_checkpoint_row(checkpoint, values)})
        names = MetricNames(metrics)
        of_metrics = [(f"metric/{name}", one_line(names.short(name))) for name in list(metrics)[:_SHOWN_METRICS]]
        columns = [("run", "run"), ("name", "checkpoint"), ("epoch", "epoch"), ("batch", "batch"), *of_metrics]
        self.fill(self._table, [*columns, ("size", "size"), ("time", "written")], rows)


def metrics_at(attempts: Sequence[RunView], checkpoint: Checkpoint) -> dict[str, float]:
    values = {} if checkpoint.metric is None or checkpoint.value is None else {checkpoint.metric: checkpoint.value}
    if checkpoint.batch is None:
        return values
    for run in attempts:
        for name in islice(filter(is_of_evaluation, run.names()), _COMPARED_METRICS):
            value = run.series(name).at(shown_step(name, checkpoint.batch))
            if value is not None:
                values.setdefault(name, value)
    return values


def _checkpoint_row(checkpoint: Checkpoint, values: Mapping[str, float]) -> dict[str, Any]:
    return {
        "name": one_line(checkpoint.path),
        "marks": [word for word, is_it in (("best", checkpoint.is_best), ("latest", checkpoint.is_latest)) if is_it],
        "epoch": "" if checkpoint.epoch is None else f"{checkpoint.epoch:,}",
        "batch": "" if checkpoint.batch is None else f"{checkpoint.batch:,}",
        "size": number_text(checkpoint.size, BYTES) if checkpoint.exists else "deleted",
        "time": "" if checkpoint.time is None else when(checkpoint.time),
        **{f"metric/{name}": number_text(value, scale_of(name, {})) for name, value in values.items()},
    }
