"""The panel of a run's checkpoints: with what they are compared by, and how to resume from each."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offloop.bus.index.checkpoints import Checkpoint
from offloop.bus.printing import one_line
from offloop.bus.types.metrics import MetricNames, is_of_evaluation, shown_step
from offloop.bus.types.units import number_text, scale_of, when
from offloop.consumers.dashboard.view.tap import MonitoredRun
from offloop.consumers.dashboard.web.dialogs import show_text
from offloop.consumers.dashboard.web.panel import Panel, runs_by_folder, table
from offloop.consumers.dashboard.web.run_folder import RunFolder

if TYPE_CHECKING:
    from nicegui.events import GenericEventArguments

SHOWN = 200
"""So many checkpoints of a run are shown, the newest."""

_SHOWN_METRICS = 4
_WITH_VALUE = ("--load-path", "--seed")
_FLAGS = ("--autoresume", "--from-scratch", "--load-weights-only")
_NAME = """
<q-td :props="props">
  <span class="checkpoint-name" :title="props.row.path">{{ props.row.name }}</span>
  <span v-for="mark in props.row.marks" :key="mark" class="pill mark" :class="mark">{{ mark }}</span>
</q-td>"""
_ACTIONS = """
<q-td :props="props">
  <button v-if="props.row.exists" type="button" class="file-link" :aria-label="'Resume from ' + props.row.name"
          @click="$parent.$emit('resume', props.row.key)">resume ...</button>
</q-td>"""


class CheckpointsPanel(Panel):
    """The checkpoints of runs, the newest first."""

    def __init__(self) -> None:
        from nicegui import ui

        super().__init__("Checkpoints", "save", is_open=True)
        self.show(False)
        self._found: dict[str, tuple[RunFolder, Checkpoint]] = {}
        with self.box:
            self._table = table("Checkpoints", "key")
            self._table.add_slot("body-cell-name", _NAME)
            self._table.add_slot("body-cell-do", _ACTIONS)
            self._table.on("resume", self._on_resume)
            self._dialogs = ui.element("div")

    def update_folders(
        self, runs: Sequence[MonitoredRun], labels: Sequence[str], folders: Mapping[Path, RunFolder]
    ) -> None:
        """Shows those that there are."""
        chosen = [
            (run, label, folders[path])
            for path, (run, label) in runs_by_folder(runs, labels).items()
            if path in folders and folders[path].checkpoints
        ]
        self.show(bool(chosen))
        if not self.is_open:
            return
        self._found.clear()
        metrics: dict[str, None] = {}
        rows: list[dict[str, Any]] = []
        for number, (run, label, folder) in enumerate(chosen):
            attempts = [one for one in runs if one.run_dir == run.run_dir]
            for place, checkpoint in enumerate(reversed(folder.checkpoints[-SHOWN:])):
                key = f"{number}/{place}"
                self._found[key] = folder, checkpoint
                values = metrics_at(attempts, checkpoint)
                metrics.update(dict.fromkeys(values))
                rows.append(_row(key, label, checkpoint, values))
        shown = list(metrics)[:_SHOWN_METRICS]
        several = len(chosen) > 1
        columns = [("run", "run")] if several else []
        columns += [("name", "checkpoint"), ("epoch", "epoch"), ("batch", "batch")]
        names = MetricNames(metrics)
        columns += [(f"metric/{name}", one_line(names.short(name))) for name in shown]
        columns += [("size", "size"), ("time", "written"), ("do", "")]
        self.fill(self._table, columns, rows)

    def _on_resume(self, event: "GenericEventArguments") -> None:
        found = self._found.get(event.args) if isinstance(event.args, str) else None
        if found is None:
            return
        folder, checkpoint = found
        command, how = resume_from(folder, checkpoint)
        with self._dialogs:
            show_text(how, "Command", command)


def metrics_at(attempts: Sequence[MonitoredRun], checkpoint: Checkpoint) -> dict[str, float]:
    """What a checkpoint is compared by, and what evaluations of the training gave at its batch."""
    values = {} if checkpoint.metric is None or checkpoint.value is None else {checkpoint.metric: checkpoint.value}
    if checkpoint.batch is None:
        return values
    for run in attempts:
        for name in filter(is_of_evaluation, run.view.names()):
            value = run.view.series(name).at(shown_step(name, checkpoint.batch))
            if value is not None:
                values.setdefault(name, value)
    return values


def resume_from(folder: RunFolder, checkpoint: Checkpoint) -> tuple[str, str]:
    """What to write to resume from a checkpoint, and where."""
    path = checkpoint.path if os.path.isabs(checkpoint.path) else str(folder.path.absolute() / checkpoint.path)
    info = {} if folder.run is None else folder.run.last.info
    words = [str(word) for word in info.get("command") or ()]
    if not words or os.path.basename(words[0]) != "trainer":
        return f"Trainer(..., load_path={path!r})", "In the script of the training:"
    kept = [*_without(words[1:]), "--load-path", path]
    if isinstance(info.get("seed"), int):
        kept += ["--seed", str(info["seed"])]
    where = f"cd {shlex.quote(str(info['cwd']))} && " if isinstance(info.get("cwd"), str) else ""
    how = "On the machine of the training"
    how += ", with a longer --max-duration:" if checkpoint.is_latest else ":"
    return one_line(f"{where}{shlex.join(['trainer', *kept])}"), how


def _without(words: Sequence[str]) -> list[str]:
    kept, skips = [], False
    for word in words:
        if skips:
            skips = False
        elif word in _WITH_VALUE:
            skips = True
        elif word not in _FLAGS and not word.startswith(tuple(f"{name}=" for name in _WITH_VALUE)):
            kept.append(word)
    return kept


def _row(key: str, label: str, checkpoint: Checkpoint, values: Mapping[str, float]) -> dict[str, Any]:
    marks = [word for word, holds in (("best", checkpoint.is_best), ("latest", checkpoint.is_latest)) if holds]
    size = number_text(checkpoint.size, scale_of("size_bytes", {}))
    return {
        "key": key,
        "run": label,
        "name": one_line(os.path.basename(checkpoint.path)),
        "path": one_line(checkpoint.path),
        "marks": marks,
        "exists": checkpoint.exists,
        "epoch": "" if checkpoint.epoch is None else f"{checkpoint.epoch:,}",
        "batch": "" if checkpoint.batch is None else f"{checkpoint.batch:,}",
        "size": size if checkpoint.exists else "deleted",
        "time": "" if checkpoint.time is None else when(checkpoint.time),
        **{f"metric/{name}": number_text(value, scale_of(name, {})) for name, value in values.items()},
    }
