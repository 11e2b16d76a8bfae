"""The panel of what consumers alert about."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offloop.bus.printing import one_line
from offloop.bus.runs.alerts import FIRING, firing
from offloop.bus.types.units import when
from offloop.consumers.dashboard.view.tap import MonitoredRun
from offloop.consumers.dashboard.web.panel import Panel, runs_by_folder, table
from offloop.consumers.dashboard.web.run_folder import RunFolder

SHOWN = 200
"""So many alerts are shown, the newest."""

_STATUS = """
<q-td :props="props">
  <span class="pill mark" :class="props.row.status">{{ props.row.status }}</span>
</q-td>"""


class AlertsPanel(Panel):
    """What consumers of runs alert about, the newest first."""

    def __init__(self) -> None:
        super().__init__("Alerts", "notifications", is_open=True)
        self.show(False)
        with self.box:
            self._table = table("Alerts", "key", "wrap-cells")
            self._table.add_slot("body-cell-status", _STATUS)

    def update_folders(
        self, runs: Sequence[MonitoredRun], labels: Sequence[str], folders: Mapping[Path, RunFolder]
    ) -> None:
        """Shows those that there are."""
        rows: list[tuple[float, dict[str, Any]]] = []
        chosen = runs_by_folder(runs, labels)
        for number, (path, (_, label)) in enumerate(chosen.items()):
            alerts = folders[path].alerts if path in folders else []
            holding = {alert.id for alert in firing(alerts)}
            for alert in alerts:
                status = "resolved" if alert.status != FIRING else "firing" if alert.id in holding else "fired"
                row = {
                    "key": f"{number}/{alert.id}",
                    "run": label,
                    "time": when(alert.time),
                    "status": status,
                    "batch": f"{alert.batch:,}",
                    "text": one_line(alert.text),
                }
                rows.append((alert.time, row))
        self.show(bool(rows))
        rows.sort(key=lambda one: one[0], reverse=True)
        columns = [("time", "time"), ("status", "status"), ("batch", "batch"), ("text", "what")]
        if len(chosen) > 1:
            columns.insert(1, ("run", "run"))
        if self.is_open:
            self.fill(self._table, columns, [row for _, row in rows[:SHOWN]])


def alerts_text(run: MonitoredRun, folders: Mapping[Path, RunFolder]) -> tuple[str, bool]:
    """How many alerts there were in an attempt of a run, in words, and whether one of them has not been resolved."""
    folder = None if run.run_dir is None else folders.get(run.run_dir)
    alerts = [] if folder is None else [alert for alert in folder.alerts if alert.attempt == run.view.attempt]
    count = sum(alert.status == FIRING for alert in alerts)
    return f"{count:,} alert{'s' * (count != 1)}" if count else "", bool(firing(alerts))


def note_alerts(runs: Sequence[MonitoredRun], folders: Mapping[Path, RunFolder]) -> None:
    """Adds what is new to the logs of runs."""
    for run in runs:
        folder = None if run.run_dir is None else folders.get(run.run_dir)
        if folder is not None:
            for alert in folder.alerts:
                if alert.attempt == run.view.attempt:
                    run.view.take_alert(
                        alert.id, alert.time, alert.text if alert.status == FIRING else f"resolved: {alert.text}"
                    )
