"""What is below the charts: ranks, hyperparameters, latest values, images, and the log."""

import base64
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bus.types.hyperparameters import value_text
from consumers.api.images import as_bytes, as_png
from consumers.api.logger import Images
from consumers.dashboard.view.log import LogEntry
from consumers.dashboard.view.tap import MonitoredRun
from consumers.dashboard.web.units import scale_of
from consumers.dashboard.web.units import value_text as metric_text

LOG_LINES = 500
"""So many lines of the log are on a page; the view behind it keeps more."""

IMAGES_OF_A_NAME = 8

_LONGEST_CELL = 300

_RANK_COLUMNS = (
    ("rank", "rank"),
    ("batch", "batch"),
    ("seconds", "seconds a batch"),
    ("last", "arrives last"),
    ("late", "after the first"),
    ("behind", "batches behind"),
)


class Panels:
    """The panels of one browser. Those that are closed are not kept up to date."""

    def __init__(self, compares: bool = False) -> None:
        from nicegui import ui

        self._runs: list[MonitoredRun] = []
        self._logged: dict[int, int] = {}
        self._images: list[tuple[int, Images]] = []
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._labels: list[str] = []
        with self._panel("Events and commands", "list_alt", is_open=True) as self._log_panel:
            self._log = ui.log(max_lines=LOG_LINES).classes("log")
            self._log.props('role="log" tabindex="0" aria-label="Events and commands"')
        with self._panel("Ranks", "view_column", is_open=True) as self._rank_panel:
            self._ranks = ui.table(rows=[], columns=[], row_key="key").props('dense flat aria-label="Ranks"')
        with self._panel("Hyperparameters", "tune", is_open=compares) as self._hyperparameter_panel:
            self._hyperparameters = ui.table(rows=[], columns=[], row_key="name").props(
                'dense flat wrap-cells aria-label="Hyperparameters"'
            )
        with self._panel("Images", "image", is_open=True) as self._image_panel:
            self._pictures = ui.element("div").classes("pictures")
        with self._panel("Latest values", "table_rows", is_open=False) as self._value_panel:
            self._values = ui.table(rows=[], columns=[], row_key="metric").props(
                'dense flat aria-label="Latest values"'
            )

    @property
    def opened(self) -> tuple[bool, ...]:
        """Which of them are open."""
        panels = (
            *(self._log_panel, self._rank_panel, self._hyperparameter_panel),
            *(self._image_panel, self._value_panel),
        )
        return tuple(bool(panel.value) for panel in panels)

    def update(self, runs: list[MonitoredRun], labels: list[str]) -> None:
        """Brings those that are open up to date."""
        self._runs, self._labels = runs, labels
        self._update_log()
        if self._rank_panel.value:
            self._update_ranks()
        self._update_hyperparameters()
        self._update_images()
        if self._value_panel.value:
            self._update_values()

    def _panel(self, title: str, icon: str, is_open: bool) -> Any:
        from nicegui import ui

        return ui.expansion(title, icon=icon, value=is_open).classes("panel").props("dense")

    def _update_log(self) -> None:
        runs = self._runs
        new: list[tuple[LogEntry, str]] = []
        for number, run in enumerate(runs):
            entries = run.view.log(self._logged.get(number, 0))
            if entries:
                self._logged[number] = entries[-1].number
                new += [(entry, self._labels[number] if len(runs) > 1 else "") for entry in entries]
        for entry, label in sorted(new, key=lambda one: one[0].time)[-LOG_LINES:]:
            at = time.strftime("%H:%M:%S", time.localtime(entry.time))
            rank = f" rank {entry.rank}" if entry.rank else ""
            kind = "" if entry.kind in ("event", "begin", "text") else f"{entry.kind}: "
            self._log.push(f"{at}  {label}{rank}{'  ' if label else ''}{kind}{entry.text}", classes=entry.kind)

    def _update_ranks(self) -> None:
        rows = []
        runs = self._runs
        ranks = [run.view.ranks() for run in runs]
        # A rank alone has nobody to be compared with.
        self._rank_panel.set_visibility(any(len(of_run) > 1 for of_run in ranks))
        for number, of_run in enumerate(ranks):
            for view in of_run:
                told = {
                    "rank": str(view.rank),
                    "batch": f"{view.batch:,}",
                    "seconds": "" if view.seconds_per_batch is None else f"{view.seconds_per_batch:.4g}",
                    "last": "" if view.last_share is None else f"{view.last_share:.0%} of batches",
                    "late": "" if view.late is None else f"{1000 * view.late:.3g} ms",
                    "behind": str(view.behind),
                }
                rows.append({"key": f"{number}/{view.rank}", "run": self._labels[number], **told})
        columns = [*([("run", "run")] if len(runs) > 1 else []), *_RANK_COLUMNS]
        self._fill(self._ranks, "ranks", columns, rows)

    def _update_hyperparameters(self) -> None:
        told = [run.view.hyperparameters for run in self._runs]
        self._hyperparameter_panel.set_visibility(any(told))
        if self._hyperparameter_panel.value:
            rows = hyperparameter_rows(told)
            columns = [("name", "name"), *((str(number), label) for number, label in enumerate(self._labels))]
            if len(told) > 1:
                columns.insert(1, ("differs", "differs"))
            self._fill(self._hyperparameters, "hyperparameters", columns, rows)

    def _update_values(self) -> None:
        runs = self._runs
        names = sorted({name for run in runs for name in run.view.names()})
        hyperparameters = [run.view.hyperparameters for run in runs]
        rows: list[dict[str, Any]] = []
        for name in names:
            row = {"metric": name}
            for number, run in enumerate(runs):
                try:
                    scale = scale_of(name, hyperparameters[number])
                    row[str(number)] = metric_text(run.view.series(name).last, scale)
                except KeyError:
                    row[str(number)] = ""
            rows.append(row)
        columns = [("metric", "metric"), *((str(number), label) for number, label in enumerate(self._labels))]
        self._fill(self._values, "values", columns, rows)

    def _fill(self, table: Any, name: str, columns: list[tuple[str, str]], rows: list[dict[str, Any]]) -> None:
        if self._rows.get(name) == rows:
            return
        self._rows[name] = rows
        table.columns = [{"name": key, "label": label, "field": key, "align": "left"} for key, label in columns]
        table.rows = rows

    def _update_images(self) -> None:
        from nicegui import ui

        found = [(number, entry) for number, run in enumerate(self._runs) for entry in run.view.images()]
        self._image_panel.set_visibility(bool(found))
        # Not by value: arrays have no single one.
        if not self._image_panel.value or [(n, id(one)) for n, one in found] == [
            (n, id(one)) for n, one in self._images
        ]:
            return
        self._images = found
        self._pictures.clear()
        with self._pictures:
            for number, entry in found:
                run = f"{self._labels[number]}: " if len(self._labels) > 1 else ""
                title = f"{run}{entry.name}, batch {entry.step:,}"
                count = len(entry.images)
                cut = f", {IMAGES_OF_A_NAME} of {count}" if count > IMAGES_OF_A_NAME else ""
                with ui.element("figure"):
                    with ui.element("figcaption"):
                        ui.label(title + cut)
                    for place, image in enumerate(entry.images[:IMAGES_OF_A_NAME]):
                        picture = ui.element("img")
                        picture.props["src"] = (
                            "data:image/png;base64," + base64.b64encode(as_png(as_bytes(image))).decode()
                        )
                        picture.props["alt"] = f"{title}, image {place + 1} of {count}"


def hyperparameter_rows(told: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row for each name that one of the runs has, with the value of each; of several runs those that differ first,
    with a mark."""
    rows = []
    for name in {name: None for values in told for name in values}:
        texts = [value_text(values[name]) if name in values else "" for values in told]
        rows.append(
            {
                "name": name,
                "differs": "≠" if len(set(texts)) > 1 else "",
                **{str(number): text[:_LONGEST_CELL] for number, text in enumerate(texts)},
            }
        )
    return sorted(rows, key=lambda row: not row["differs"])


def _same(first: list[tuple[int, Images]], second: list[tuple[int, Images]]) -> bool:
    # Not by value: arrays have no single one.
    return len(first) == len(second) and all(
        one == other and entry is known for (one, entry), (other, known) in zip(first, second, strict=True)
    )
