"""A sweep with Optuna: each trial is a run, our metric is the objective, and our command `stop` prunes.

    pip install 'offloop[demo]' optuna
    python examples/optuna_sweep.py 12          # trials
    offloop runs --where "status == finished" --sort -MulticlassAccuracy --columns lr,MulticlassAccuracy

Any program that publishes a run can replace `trainer digits`. `--wait-for` makes pruning exact: without it, and with
other frameworks, a pruned run trains some more batches.
"""

import subprocess
import sys

import optuna

from offloop import Event, Subscriber
from offloop.bus import new_run_name

TRAINING = [
    sys.executable,
    "-m",
    "offloop.trainer",
    "digits",
    "--max-duration",
    "4ep",
    "--no-progress",
    "--wait-for",
    "optuna",
]


def objective(trial: optuna.Trial) -> float:
    """Train with a learning rate, and return the accuracy on held-out images."""
    lr, name = trial.suggest_float("lr", 1e-5, 0.1, log=True), new_run_name("sweep")
    trial.set_user_attr("run", name)
    options = ["--lr", str(lr), "--seed", "17", "--run-name", name]
    with subprocess.Popen([*TRAINING, *options], stdout=subprocess.PIPE, text=True) as training:
        training.stdout.readline()  # printed once the run can be followed
        with Subscriber(name, name="optuna", events=[Event.EVAL_END], barrier_events=[Event.EVAL_END]) as run:
            for state in run:
                accuracy = state.eval_metrics["eval"]["MulticlassAccuracy"]
                trial.report(accuracy, int(state.timestamp.epoch))
                if trial.should_prune():
                    state.stop_training(f"pruned by Optuna: accuracy {accuracy:.4f} in trial {trial.number}")
        training.communicate()
    if run.ending.status == "stopped":
        raise optuna.TrialPruned(run.ending.reason)
    if run.ending.status != "finished":
        raise RuntimeError(f"run {name} is {run.ending.status}: {run.ending.error}")
    return accuracy


if __name__ == "__main__":
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner(n_startup_trials=1))
    for lr in (0.003, 0.0001):  # a first guess
        study.enqueue_trial({"lr": lr})
    study.optimize(objective, n_trials=int(sys.argv[1]) if len(sys.argv) > 1 else 12)
    best = study.best_trial
    print(f"best: {best.user_attrs['run']} with lr {best.params['lr']:.2g}, accuracy {best.value:.4f}")
