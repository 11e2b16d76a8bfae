"""``offloop import``: logs that other tools wrote become runs as every other."""

import json
import math
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from mlflow import MlflowClient
from mlflow.entities import Metric
from paths import DATA
from torch.utils.tensorboard import SummaryWriter
from transformers.trainer_callback import TrainerState

from offloop.bus import ConfigurationError, Event, Recording, RunDirectoryError, RunInfo, find_run
from offloop.bus.cli.main import bus
from offloop.bus.index.annotations import read_annotations
from offloop.bus.index.index import RunIndex
from offloop.bus.runs.writing import RunDirectory
from offloop.bus.tools import imports
from offloop.bus.tools.diff import diff
from offloop.bus.tools.export import export
from offloop.bus.tools.imports import import_logs
from offloop.consumers.callbacks import LRMonitor, SpeedMonitor, TrainerMetrics
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.testing import Logged, replay


def run_bus(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(bus, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def replayed(name: str) -> Logged:
    return replay([TrainerMetrics(), LRMonitor()], find_run(name).recording)


def write_csv(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def write_jsonl(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_losses(folder: Path, *losses: float, **options: Any) -> Path:
    """Write an event file of TensorBoard with a loss for each step."""
    with SummaryWriter(folder, **options) as writer:
        for step, loss in enumerate(losses, options.get("purge_step", 0)):
            writer.add_scalar("loss", loss, step)
    return folder


def same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


@pytest.fixture(scope="module")
def lightning_logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the logs of one training: by CSVLogger and by TensorBoardLogger."""
    folder = tmp_path_factory.mktemp("lightning")
    for logger in (CSVLogger(folder, "as_csv", "first"), TensorBoardLogger(folder, "as_tb", "second")):
        logger.log_hyperparams({"width": 4})
        for name, values in LOGGED.items():
            for step, value in values:
                logger.log_metrics({name: value, "epoch": step // 10}, step)
        logger.save()
        logger.finalize("success")
    return {"csv": folder / "as_csv" / "first", "tensorboard": folder / "as_tb" / "second"}


LOGGED = {
    "train_loss": [(2, 0.5), (11, 1 / 3)],
    "norm": [(2, 1.5), (11, 1.25)],
    "val_loss": [(9, 0.75), (19, 0.1)],
    "lr-SGD": [(0, 0.1), (10, 0.01)],
}
NAMES = {"train_loss": "loss/train/total", "norm": "norm", "val_loss": "metrics/val/loss", "lr-SGD": "lr-SGD"}


@pytest.mark.parametrize("source", ["csv", "tensorboard"])
def test_a_training_of_lightning(runs_dir, lightning_logs, source):
    log = lightning_logs[source]
    assert "imported" in run_bus("import", "--from", source, log).output
    logged = replayed(log.name)
    states = list(Recording(find_run(log.name).recording))
    view = RunView(log.name)
    for state in states:
        view.see(state)
    for name, values in LOGGED.items():
        found = dict(logged.metrics[NAMES[name]])
        # The floats of an event file have half of the bits.
        assert found == pytest.approx(dict(values), rel=1e-6 if source == "tensorboard" else 0), name
        points = view.series(NAMES[name]).points()
        assert dict(zip(points.xs, points.ys, strict=True)) == found, name
    assert logged.hyperparameters == ({"width": 4} if source == "tensorboard" else {})
    with RunIndex(runs_dir) as index:
        index.refresh()
        values = index.entries[log.name].metrics["metrics/val/loss"]
        assert (values.last_step, values.last) == logged.metrics["metrics/val/loss"][-1]
    assert [state.timestamp.epoch.value for state in states if state.event is Event.EVAL_END] == [0, 1]
    assert [state.event for state in states[:2]] == [Event.INIT, Event.FIT_START]
    assert (states[-1].event, states[-1].timestamp.batch) == (Event.FIT_END, 19)


def test_an_imported_run_is_a_run_for_every_command(runs_dir, lightning_logs, tmp_path):
    run_bus("import", "--from", "csv", lightning_logs["csv"], "--run-name", "one")
    run_bus("import", "--from", "tensorboard", lightning_logs["tensorboard"], "--run-name", "two")
    run, path = find_run("one"), lightning_logs["csv"] / "metrics.csv"
    assert (run.status, run.live, run.id is not None) == ("finished", False, True)
    assert run.last.reached is not None
    assert (run.last.reached.epoch, run.last.reached.batch) == (1, 19)
    assert run.last.info["imported_from"] == {"source": "csv", "path": str(path)}
    assert f"imported from  {path} (csv)" in run_bus("show", "one", "--details").output
    assert "one" in run_bus("runs").output
    found = diff(run.recording, find_run("two").recording, tolerance=1e-6)
    assert (found.differing, [one.name for one in found.first.fields]) == (1, ["logged/hp_metric"])
    assert not found.incomplete
    assert export(run.recording, tmp_path / "out.csv", "csv").ending is not None
    assert (run.path / "run.json").stat().st_mode & 0o077 == 0


def test_scalars_in_every_form_at_their_own_times(runs_dir, tmp_path):
    with SummaryWriter(tmp_path / "log") as writer:
        for step in (10, 20):
            writer.add_scalar("Loss/train", step / 7, step, walltime=1_700_000_000.5 + step)
            writer.add_scalar("Loss/test", step / 3, step, walltime=1_700_000_001 + step, new_style=True)
            writer.add_scalar("precise", step / 3, step, 1_700_000_000.5 + step, new_style=True, double_precision=True)
            writer.add_scalar("bad", math.nan if step == 10 else -math.inf, step, walltime=1_700_000_002 + step)
        writer.add_histogram("weights", torch.randn(10), 10, walltime=1_700_000_012)
        writer.add_text("note", "hello", 10, walltime=1_700_000_012)
    done = import_logs("tensorboard", tmp_path / "log")
    assert [(one.run, one.steps, one.values) for one in done] == [("log", 2, 8)]

    states = list(Recording(find_run("log").recording))
    assert [state.event.value for state in states] == [
        *("init", "fit_start", "batch_end", "eval_end", "eval_after_all"),
        *("batch_end", "eval_end", "eval_after_all", "fit_end"),
    ]
    assert [state.time for state in states] == [
        1_700_000_000 + more for more in (10.5, 10.5, 10.5, 11, 11, 20.5, 21, 21, 21)
    ]
    assert [state.timestamp.total_wct.total_seconds() for state in states] == [0, 0, 0, 0.5, 0.5, 10, 10.5, 10.5, 10.5]
    first, last = (state for state in states if state.event is Event.BATCH_END)
    assert first.loss == pytest.approx(10 / 7, rel=1e-7)
    ((step, values),) = last.fields["logged"]
    assert (step, values) == (20, {"precise": 20 / 3, "bad": -math.inf})
    assert math.isnan(first.fields["logged"][0][1]["bad"])
    evaluated = next(state for state in states if state.event is Event.EVAL_END)
    assert evaluated.eval_metrics["test"]["Loss"] == pytest.approx(10 / 3, rel=1e-7)
    run = find_run("log")
    assert (run.started, run.last.ended) == (1_700_000_010.5, 1_700_000_021)


def test_what_add_scalars_and_add_hparams_write_belongs_to_the_run(runs_dir, tmp_path):
    with SummaryWriter(tmp_path / "log") as writer:
        for step in (1, 2):
            writer.add_scalar("loss", 1 / step, step, walltime=1_700_000_000 + step)
        writer.add_scalars("acc", {"a": 0.5, "b": 0.25}, 2, walltime=1_700_000_002)
        writer.add_hparams({"lr": 0.1, "net": "mlp", "fast": True}, {"best": 0.75})
    assert [one.run for one in import_logs("tensorboard", tmp_path / "log")] == ["log"]
    logged = replayed("log")
    assert logged.metrics["loss/train/total"] == [(1, 1.0), (2, 0.5)]
    assert logged.metrics["acc_a/acc"] == [(2, 0.5)]
    assert logged.metrics["acc_b/acc"] == [(2, 0.25)]
    assert logged.metrics["best"] == [(0, 0.75)]
    assert logged.hyperparameters == {"lr": 0.1, "net": "mlp", "fast": True}
    # It is written when the training ends.
    assert Recording(find_run("log").recording).__iter__().__next__().time == 1_700_000_001


def test_each_folder_of_a_folder_is_a_run_but_train_and_validation_are_one(runs_dir, tmp_path):
    for folder in ("a/first", "second", "keras/train", "keras/validation"):
        with SummaryWriter(tmp_path / "logs" / folder) as writer:
            writer.add_scalar("epoch_loss", len(folder), 3)
    (tmp_path / "logs" / "crashed").mkdir()
    (tmp_path / "logs" / "crashed" / "events.out.tfevents.1").touch()
    first, *lines = sorted(run_bus("import", "--from", "tensorboard", tmp_path / "logs").output.splitlines())
    assert sorted(line.split()[-1] for line in lines) == ["a-first", "keras", "second"]
    assert first == f"{tmp_path / 'logs' / 'crashed'} has no numbers: no run is made from it"
    assert replayed("keras").metrics["metrics/validation/epoch_loss"] == [(3, 16.0)]
    assert replayed("keras").metrics["train/epoch_loss"] == [(3, 11.0)]
    text = run_bus("import", "--from", "tensorboard", tmp_path / "logs", code=1).exception
    assert "exists" in str(text)
    run_bus("import", "--from", "tensorboard", tmp_path / "logs", "--run-name", "again")
    assert {path.name for path in runs_dir.iterdir()} >= {"again-a-first", "again-keras", "again-second"}


def test_a_restarted_training_replaces_what_it_repeats(runs_dir, tmp_path):
    write_losses(tmp_path / "log", *range(6), filename_suffix=".1")
    # The second file comes after the first one by its name, also within one second.
    write_losses(tmp_path / "log", 30, purge_step=3, filename_suffix=".2")
    (done,) = import_logs("tensorboard", tmp_path / "log", name="purged")
    assert replayed("purged").metrics["loss/train/total"] == [(0, 0), (1, 1), (2, 2), (3, 30)]
    assert done.replaced == 0

    write_csv(tmp_path / "resumed.csv", "step,loss", "1,1", "2,2", "3,3", "2,20", "3,30", "4,40")
    (done,) = import_logs("csv", tmp_path / "resumed.csv")
    assert replayed("resumed").metrics["loss/train/total"] == [(1, 1), (2, 20), (3, 30), (4, 40)]
    assert done.replaced == 2


def test_of_a_damaged_event_file_what_is_whole_is_used(runs_dir, tmp_path):
    (path,) = write_losses(tmp_path / "log", *range(4)).iterdir()
    whole, offsets = path.read_bytes(), [0]
    while offsets[-1] < len(whole):
        offsets.append(offsets[-1] + 16 + struct.unpack_from("<Q", whole, offsets[-1])[0])
    *_, second, third, fourth, _ = offsets

    def check(content: bytes, steps: list[int], expected: str) -> None:
        path.write_bytes(content)
        shutil.rmtree(runs_dir / "log", ignore_errors=True)
        assert expected in run_bus("import", "--from", "tensorboard", path.parent, code=3).output
        assert [step for step, _ in replayed("log").metrics["loss/train/total"]] == steps

    check(whole[:-5], [0, 1, 2], f"byte {fourth}: it ends within a record")
    check(whole + b"abc", [0, 1, 2, 3], f"byte {len(whole)}: it ends within a record")
    flipped = bytearray(whole)
    flipped[third + 14] ^= 1
    check(bytes(flipped), [0, 1, 3], f"byte {third}: a damaged record is left out")
    flipped = bytearray(whole)
    flipped[second] ^= 1
    check(bytes(flipped), [0], f"byte {second}: it is damaged, the rest is left out")


def test_tensorboard_is_named_where_it_is_missing(runs_dir, tmp_path, monkeypatch):
    (tmp_path / "a.tfevents.1").write_bytes(b"")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'offloop\[tensor"):
        import_logs("tensorboard", tmp_path)
    assert not list(runs_dir.iterdir())


def test_the_state_of_a_hugging_face_trainer(runs_dir, tmp_path):
    state = TrainerState(max_steps=4, num_train_epochs=2, train_batch_size=8, logging_steps=1)
    state.log_history = [
        {"loss": 1.5, "grad_norm": 2.5, "learning_rate": 5e-5, "epoch": 0.5, "step": 1},
        {"loss": math.nan, "grad_norm": math.inf, "learning_rate": 4e-5, "epoch": 1.0, "step": 2},
        {"eval_loss": 0.75, "eval_runtime": 0.1, "epoch": 1.0, "step": 2},
        {"loss": 0.5, "learning_rate": 3e-5, "num_input_tokens_seen": 640, "epoch": 2.0, "step": 4},
        {"train_loss": 0.9, "train_runtime": 3.5, "epoch": 2.0, "step": 4},
    ]
    (tmp_path / "out").mkdir()
    state.save_to_json(str(tmp_path / "out" / "trainer_state.json"))
    run_bus("import", "--from", "hf-trainer-state", tmp_path / "out")

    logged = replayed("out")
    losses = logged.metrics["loss/train/total"]
    assert [step for step, _ in losses] == [1, 2, 4]
    assert all(same(one, other) for (_, one), other in zip(losses, (1.5, math.nan, 0.5), strict=True))
    assert logged.metrics["learning_rate"] == [(1, 5e-5), (2, 4e-5), (4, 3e-5)]
    assert logged.metrics["num_input_tokens_seen"] == [(4, 640)]
    assert logged.metrics["grad_norm"] == [(1, 2.5), (2, math.inf)]
    assert logged.metrics["metrics/eval/loss"] == [(2, 0.75)]
    assert logged.metrics["train_loss"] == [(4, 0.9)]
    assert logged.metrics["epoch"] == [(1, 0.5)]
    assert {"max_steps": 4, "num_train_epochs": 2, "train_batch_size": 8}.items() <= logged.hyperparameters.items()
    last = list(Recording(find_run("out").recording))[-1].timestamp
    assert (last.epoch.value, last.batch.value) == (2, 4)


def test_wandb_s_history(runs_dir, tmp_path):
    path = write_jsonl(
        tmp_path / "history.jsonl",
        {"_step": 0, "_timestamp": 1_700_000_000.25, "_runtime": 1.5, "train/loss": 2, "nested": {"a": True}},
        {
            "_step": 1,
            "_timestamp": 1_700_000_001.25,
            "train/loss": "NaN",
            "picture": {"_type": "image-file", "width": 8},
        },
        {"summary": "done"},
    )
    (done,) = import_logs("jsonl", path)
    assert done.notes == (
        "'picture' is left out where it is not a number, as in line 2",
        "rows without a step are left out: 1",
    )
    states = list(Recording(find_run("history").recording))
    assert [state.time for state in states] == [1_700_000_000.25] * 3 + [1_700_000_001.25] * 2
    assert states[2].loss == 2.0
    assert states[2].fields["logged"] == [[0, {"_runtime": 1.5, "nested/a": 1.0}]]
    assert states[3].loss is not None
    assert math.isnan(states[3].loss)


WANDB = """
import math, wandb
settings = wandb.Settings(console="off", x_disable_stats=True)
with wandb.init(project="digits", name="nice name", config={"lr": 0.1, "opt": {"name": "adam"}}, tags=["a"],
                notes="why", id="a", settings=settings) as run:
    for step in range(300):
        run.log({"loss": 1 / (step + 1), "val/acc": step / 4, "nested": {"x": step}, "bad": math.nan})
    run.log({"loss": 0.25, "histogram": wandb.Histogram([1, 2]), "text": "hi"}, step=500)
    run.config.update({"later": 5})
run = wandb.init(project="digits", name="nice name", id="b", settings=settings)
run.log({"loss": 3})
run.finish(exit_code=1)
with wandb.init(project="digits", name="own steps", id="c", settings=settings) as run:
    run.define_metric("*", step_metric="trainer/global_step")
    run.log({"loss": 3, "trainer/global_step": 50})
    run.log({"val/acc": 0.5})
    run.log({"loss": 2, "trainer/global_step": 100})
"""


LOGGED_ELSEWHERE = {"loss/train/total", "metrics/val/acc", "nested/x", "bad"}


def test_runs_that_wandb_wrote_offline(runs_dir, tmp_path):
    own = {f"WANDB_{kind}_DIR": str(tmp_path / kind) for kind in ("CACHE", "CONFIG", "DATA", "ARTIFACT")}
    environment = {**os.environ, **own, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}
    began = time.time()
    subprocess.run([sys.executable, "-c", WANDB], env=environment, check=True, timeout=200)
    output = run_bus("import", "--from", "wandb", tmp_path / "wandb").output
    assert "imported 1,201 values of 301 steps of run 'nice name' of" in output
    assert "'histogram' is left out" in output
    assert "'text' is left out" in output
    logged = replayed("nice-name")
    assert logged.metrics["loss/train/total"] == [*((step, 1 / (step + 1)) for step in range(300)), (500, 0.25)]
    assert logged.metrics["metrics/val/acc"] == [(step, step / 4) for step in range(300)]
    assert logged.metrics["nested/x"] == [(step, step) for step in range(300)]
    assert all(math.isnan(value) for _, value in logged.metrics["bad"])
    assert {name for name in logged.metrics if not name.startswith("time/")} == LOGGED_ELSEWHERE
    assert logged.hyperparameters == {"config/lr": 0.1, "config/opt/name": "adam", "config/later": 5}
    # Batches are the steps that the training itself counts.
    assert replayed("own-steps").metrics["loss/train/total"] == [(50, 3), (100, 2)]
    assert replayed("own-steps").metrics["metrics/val/acc"] == [(50, 0.5)]
    first, second = find_run("nice-name"), find_run("nice-name-2")
    assert (first.status, second.status) == ("finished", "failed")
    assert began < first.started <= first.last.ended < time.time() + 1
    assert annotations(first) == (("a", "digits"), "why")
    assert Recording(first.recording).damage is None

    # Each is imported once.
    again = run_bus("import", "--from", "wandb", tmp_path / "wandb", code=1)
    assert "nothing new in" in str(again.exception)
    # A run that has not ended, or a damaged file, is used up to there.
    file = min((tmp_path / "wandb").glob("offline-*/run-*.wandb"))
    whole = file.read_bytes()
    # With the first byte of a further record: the half may end with a whole one.
    file.write_bytes(whole[: len(whole) // 2] + b"\1")
    output = run_bus("import", "--from", "wandb", file, "--run-name", "half", code=3).output
    assert "it is damaged or ends here, the rest is left out" in output
    assert find_run("half").status == "lost"
    losses = replayed("half").metrics["loss/train/total"]
    assert 100 < len(losses) < 200
    assert losses == logged.metrics["loss/train/total"][: len(losses)]


def annotations(run: RunInfo) -> tuple[tuple[str, ...], str]:
    said = read_annotations(run.path)
    return said.tags, said.note


def test_the_runs_of_a_database_of_mlflow(runs_dir, tmp_path):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = MlflowClient(uri)
    experiment = client.create_experiment("digits", f"file://{tmp_path / 'artifacts'}")
    moment, identities = 1_700_000_000_000, {}
    for number, (name, status) in enumerate(
        (("one", "FINISHED"), ("one", "FAILED"), ("日本", "KILLED"), ("gone", None))
    ):
        run = client.create_run(experiment, moment + number, {"team": "vision", "mlflow.note.content": "why"}, name)
        identities[name] = run.info.run_id
        client.log_param(run.info.run_id, "lr", 0.1)
        client.log_param(run.info.run_id, "net", "<b>")
        values = [0.5, math.nan, math.inf, -math.inf]
        rows = [Metric("loss", value, moment + 1000 * step, step) for step, value in enumerate(values)]
        client.log_batch(
            run.info.run_id, [*rows, Metric("val_acc", 0.75, moment + 2500, 2), Metric("x", 1, moment, -1)]
        )
        if status:
            client.set_terminated(run.info.run_id, status, moment + 9000)
    client.delete_run(identities["gone"])
    assert len(run_bus("import", "--from", "mlflow", tmp_path).output.splitlines()) == 6
    runs = [find_run(name) for name in ("one", "one-2", identities["日本"])]
    assert [run.status for run in runs] == ["finished", "failed", "stopped"]
    assert (runs[0].started, runs[0].last.ended) == (1_700_000_000, 1_700_000_009)
    assert annotations(runs[0]) == (("digits", "team=vision"), "why")
    logged = replayed("one")
    assert all(same(one, other) for (_, one), other in zip(logged.metrics["loss/train/total"], values, strict=True))
    assert logged.metrics["metrics/val/acc"] == [(2, 0.75)]
    assert logged.hyperparameters == {"config/lr": 0.1, "config/net": "<b>"}
    # A new run joins the imported ones.
    late = client.create_run(experiment, moment + 99, run_name="late")
    client.log_metric(late.info.run_id, "loss", 1)
    output = run_bus("import", "--from", "mlflow", tmp_path / "mlflow.db").output
    assert output.count("skipped") == 3
    assert output.endswith("as run late\n")
    assert find_run("late").status == "lost"


@pytest.mark.parametrize("is_old", [False, True])
def test_the_runs_of_a_database_of_trackio(runs_dir, tmp_path, is_old):
    """The database of today, and one from when a run had no id."""
    with closing(sqlite3.connect(tmp_path / "digits.db")) as database:
        database.executescript((DATA / "trackio.sql").read_text())
        if is_old:
            database.executescript(
                "CREATE TABLE old AS SELECT run_name, config FROM configs; DROP TABLE configs;"
                "ALTER TABLE old RENAME TO configs; ALTER TABLE metrics DROP COLUMN run_id"
            )
    output = run_bus("import", "--from", "trackio", tmp_path).output
    assert "'fig' is left out where it is not a number" in output
    logged = replayed("nice-name")
    assert logged.metrics["loss/train/total"] == [(0, 1.0), (1, 0.5), (2, 1 / 3), (10, 0.25)]
    assert logged.metrics["metrics/val/acc"] == [(0, 0), (1, 0.25), (2, 0.5)]
    assert {name for name in logged.metrics if not name.startswith("time/")} == LOGGED_ELSEWHERE
    assert logged.hyperparameters == {"config/lr": 0.1, "config/opt/name": "adam", "config/opt/betas": [0.9, 0.99]}
    run = find_run("nice-name")
    assert datetime.fromtimestamp(run.started, UTC).isoformat() == "2026-11-27T17:04:20.075226+00:00"
    assert annotations(run) == (("digits",), "")
    assert len(list(runs_dir.iterdir())) == 2


def test_any_table_with_a_column_of_steps(runs_dir, tmp_path):
    path = write_csv(
        tmp_path / "table.csv",
        ",Wall time,Step,Value,lr-Adam,time,val_acc,test/acc,note",
        "0,1700000000.5,5.0,1,0.1,12.5,,,hello",
        "1,1700000001.5,5,,,,0.5,0.75,",
        "2,1700000009.5,7,2e3,,,,,",
    )
    (done,) = import_logs("csv", path)
    assert done.notes == ("'note' is left out where it is not a number, as in line 2",)
    states = list(Recording(find_run("table").recording))
    assert [state.event.value for state in states[2:-1]] == [
        *("batch_end", "eval_end", "eval_end", "eval_after_all", "batch_end")
    ]
    assert [state.time - 1_700_000_000 for state in states[2:-1]] == [0.5, 1.5, 1.5, 1.5, 9.5]
    logged = replayed("table")
    assert logged.metrics["Value"] == [(5, 1), (7, 2000.0)]
    assert logged.metrics["lr-Adam"] == [(5, 0.1)]
    assert logged.metrics["log/time"] == [(5, 12.5)]
    assert logged.metrics["metrics/val/acc"] == [(5, 0.5)]
    assert logged.metrics["metrics/test/acc"] == [(5, 0.75)]


def test_the_column_of_steps_can_be_named(runs_dir, tmp_path):
    path = write_csv(tmp_path / "keras.csv", "epoch,loss,val_loss", "0,1.5,2", "1,0.5,1")
    error = str(run_bus("import", "--from", "csv", path, code=1).exception)
    assert "has no column of steps" in error
    assert "'epoch', 'loss', 'val_loss'; name one with '--step-column'" in error
    run_bus("import", "--from", "csv", path, "--step-column", "epoch")
    assert replayed("keras").metrics["loss/train/total"] == [(0, 1.5), (1, 0.5)]
    assert "has no column 'nothing'" in str(
        run_bus("import", "--from", "csv", path, "--step-column", "nothing", "--run-name", "x", code=1).exception
    )
    run_bus("import", "--from", "tensorboard", tmp_path, "--step-column", "epoch", code=2)


def test_batches_between_the_steps_of_a_log_count_for_its_speed(runs_dir, tmp_path):
    import_logs(
        "jsonl",
        write_jsonl(
            tmp_path / "log.jsonl",
            *({"step": 50 * number, "time": 1_700_000_000 + 2 * number, "loss": 1} for number in range(150)),
        ),
    )
    logged = replay(SpeedMonitor(), find_run("log").recording)
    assert {speed for _, speed in logged.metrics["throughput/batches_per_sec"]} == {25.0}
    view = RunView("log")
    for state in Recording(find_run("log").recording):
        view.see(state)
    assert "throughput/batches_per_sec" in view.names()
    points = view.series("throughput/batches_per_sec").points()
    assert dict(zip(points.xs, points.ys, strict=True)) == dict(logged.metrics["throughput/batches_per_sec"])


def test_a_log_without_times_has_that_of_its_file_and_no_speed(runs_dir, tmp_path):
    path = write_csv(tmp_path / "log.csv", "step,loss", *(f"{step},1" for step in range(300)))
    os.utime(path, (1_700_000_000, 1_700_000_000))
    import_logs("csv", path)
    recording = find_run("log").recording
    assert {state.time for state in Recording(recording)} == {1_700_000_000}
    assert not [name for name in replay(SpeedMonitor(), recording).metrics if name.startswith("throughput")]


numbers = st.integers(-(2**63), 2**64 - 1) | st.floats()
NAMES_OF_LOGS = "loss train_loss lr epoch val_loss val/loss metrics/a/b x time"
names = st.sampled_from(NAMES_OF_LOGS.split()) | st.text(st.characters(codec="utf-8"), min_size=1, max_size=4).filter(
    lambda name: name.casefold() != "step"
)
tables = st.lists(
    st.tuples(st.integers(0, 5), st.dictionaries(names, numbers, min_size=1, max_size=4)), min_size=1, max_size=6
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tables)
def test_every_number_is_in_the_run_under_its_step_and_the_last_one_counts(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("log")
    path = write_jsonl(folder / "log.jsonl", *({"step": step, **values} for step, values in rows))
    (done,) = import_logs("jsonl", path, folder / "runs", "run")
    latest: dict[tuple[int, str], float] = {}
    for step, values in rows:
        latest |= {(step, name): value for name, value in values.items()}
    assert done.values <= len(latest)

    seen: dict[int, list[float]] = {}
    for state in Recording(find_run("run", folder / "runs").recording):
        assert state.previous_timestamp is None
        if state.event in (Event.INIT, Event.FIT_START):
            continue
        held = seen.setdefault(state.timestamp.batch.value, [])
        held += [state.timestamp.epoch.value, state.time]
        held += [value for _, values in state.fields.get("logged", ()) for value in values.values()]
        held += [value for metrics in state.eval_metrics.values() for value in metrics.values()]
        held += [] if state.loss is None else [state.loss]
    for (step, name), value in latest.items():
        is_date = name == "time" and 1e9 <= value < 1e10
        is_only_time = name == "epoch" and step not in seen
        if not (is_date or is_only_time):
            # Losses are floats.
            assert any(same(value, one) or same(float(value), one) for one in seen[step]), (step, name, value)


@pytest.mark.parametrize(
    ("source", "content", "message"),
    [
        ("csv", b"step,loss\n", "no numbers"),
        ("csv", b"step,loss\n1,2,3\n", "line 2"),
        ("csv", b"step,loss\n-1,2\n", "line 2: 'step' is -1"),
        ("csv", b"step,loss\n1,2\n2,\xff\n", "UTF-8"),
        ("csv", b'step,loss\n1,"' + b"x" * 200_000, "CSV"),
        ("jsonl", b'{"step": 1, "loss": 2}\nnot json\n', "line 2"),
        ("jsonl", b"[" * 100_000 + b"\n", "nested too deep"),
        ("jsonl", b'{"step": 1, "\\ud800": 2}\n', "UTF-8"),
        ("hf-trainer-state", b'{"log_history": [1]}', "'log_history'"),
        ("tensorboard", b"PNG" * 100, "no numbers"),
        ("wandb", b"PNG" * 100, "not a file of W&B"),
        ("wandb", b":W&B\xe1\xbe\x00", "no numbers"),
        ("mlflow", b"PNG" * 100, "as a database of MLflow: file is not a database"),
        ("trackio", b"", "as a database of Trackio: no such table"),
    ],
)
def test_another_file_is_refused_and_leaves_nothing(runs_dir, tmp_path, source, content, message):
    path = tmp_path / "log"
    path.write_bytes(content)
    result = run_bus("import", "--from", source, path, "--run-name", "x", code=1)
    assert message in str(result.exception)
    assert str(path) in str(result.exception)
    assert isinstance(result.exception, ConfigurationError)
    # Where there is no log at all.
    for place in (tmp_path / "missing", tmp_path if source != "tensorboard" else runs_dir):
        assert str(place) in str(run_bus("import", "--from", source, place, code=1).exception)
    assert not list(runs_dir.iterdir())


def test_a_line_that_a_killed_process_left_half_is_left_out(runs_dir, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 2}\n{"step": 2, "lo')
    assert "line 2: it is incomplete and left out" in run_bus("import", "--from", "jsonl", path, code=3).output
    assert replayed("log").metrics["loss/train/total"] == [(1, 2)]


def test_names_of_runs(runs_dir, tmp_path):
    path = write_csv(tmp_path / "my log (1).csv", "step,loss", "1,2")
    assert import_logs("csv", path)[0].run == "my-log-1"
    with pytest.raises(ConfigurationError, match="run 'my-log-1' exists"):
        import_logs("csv", path)
    assert len(list(runs_dir.iterdir())) == 1
    run_bus("import", "--from", "csv", path, "--run-name", "a/b", code=1)
    nameless = write_csv(tmp_path / "日本.csv", "step,loss", "1,2")
    with pytest.raises(ConfigurationError, match="--run-name"):
        import_logs("csv", nameless)
    twins = tmp_path / "logs"
    for folder in ("a/b", "a-b"):
        write_losses(twins / folder, 1)
    with pytest.raises(ConfigurationError, match=r"would be another run 'a-b'"):
        import_logs("tensorboard", twins)
    assert len(list(runs_dir.iterdir())) == 1


def test_a_run_that_begins_meanwhile_is_not_replaced(runs_dir, tmp_path, monkeypatch):
    path = write_csv(tmp_path / "log.csv", "step,loss", "1,2")
    write = imports._write

    def begin_another(*arguments: Any) -> Any:
        RunDirectory(runs_dir, "log").release()
        return write(*arguments)

    monkeypatch.setattr(imports, "_write", begin_another)
    with pytest.raises(RunDirectoryError, match=r"cannot write .*log"):
        import_logs("csv", path)
    assert [one.name for one in (runs_dir / "log").iterdir()] == ["broker.lock"]
    assert len(list(runs_dir.iterdir())) == 1
