"""The example of a sweep: Optuna proposes and prunes, and its trials are runs."""

import re
import subprocess
import sys
from pathlib import Path

from paths import ROOT

from offloop.bus import Event, Recording, list_runs


def test_a_sweep_stops_the_runs_that_optuna_prunes_and_reports_the_best(runs_dir: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "optuna_sweep.py"), "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    best, pruned = sorted(list_runs(runs_dir), key=lambda run: run.last.started)
    assert (best.status, pruned.status) == ("finished", "stopped")
    of_best, of_pruned = (accuracies(run.recording) for run in (best, pruned))
    # Exactly there: no batch is trained after the evaluation at which it was decided.
    assert (len(of_best), len(of_pruned)) == (4, 1)
    assert f"pruned by Optuna: accuracy {of_pruned[0]:.4f} in trial 1" in (pruned.last.reason or "")
    assert f"best: {best.name} with lr 0.003, accuracy {of_best[-1]:.4f}\n" == done.stdout
    assert re.search(r"Trial 1 pruned\. .*pruned by Optuna", done.stderr)
    assert "Traceback" not in done.stderr


def accuracies(recording: Path) -> list[float]:
    """What each evaluation of a run has found."""
    ends = Recording(recording).snapshots([Event.EVAL_END])
    return [state.eval_metrics["eval"]["MulticlassAccuracy"] for state in ends]
