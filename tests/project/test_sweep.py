"""The example of a sweep: Optuna proposes and prunes, and its trials are runs."""

import runpy
import sys
from pathlib import Path

import optuna
from paths import ROOT

from offloop.bus import Event, Recording, list_runs

TRAINING = """
import sys, time
from offloop.bus import Event, Publisher
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
name, is_bad = options["--run-name"], float(options["--lr"]) < 0.001
with Publisher(name) as publisher:
    print(name, flush=True)
    while not publisher.consumers:
        publisher.poll()
    for epoch in range(1, 5):
        metrics = {"eval": {"MulticlassAccuracy": (0.1 if is_bad else 0.5) + epoch / 100}}
        publisher.publish(Event.EVAL_END, epoch=epoch, dataloader_label="eval", eval_metrics=metrics)
        while is_bad and not publisher.stop_requested:
            publisher.poll()
            time.sleep(0.01)
        if publisher.stop_requested:
            publisher.close("stopped")
            break
"""
"""Stands in for the example's training."""


def test_a_sweep_stops_the_runs_that_optuna_prunes_and_reports_the_best(runs_dir: Path) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "optuna_sweep.py"))
    example["TRAINING"][:] = [sys.executable, "-c", TRAINING]
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner(n_startup_trials=1))
    for lr in (0.003, 0.0001):
        study.enqueue_trial({"lr": lr})
    study.optimize(example["objective"], n_trials=2)
    best, pruned = sorted(list_runs(runs_dir), key=lambda run: run.last.started)
    assert (best.status, pruned.status) == ("finished", "stopped")
    assert [len(accuracies(run.recording)) for run in (best, pruned)] == [4, 1]
    assert study.best_trial.user_attrs["run"] == best.name
    assert study.trials[1].state is optuna.trial.TrialState.PRUNED


def accuracies(recording: Path) -> list[float]:
    ends = Recording(recording).snapshots([Event.EVAL_END])
    return [state.eval_metrics["eval"]["MulticlassAccuracy"] for state in ends]
