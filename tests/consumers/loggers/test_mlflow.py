"""MLflow with a local database, read back by its own client."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from consumers_stream import batch_end, record_run, snapshots_of_training
from gold import GoldMLP
from helpers import strict_json, wait_for
from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.entities import Run as MlflowRun
from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_TIMEOUT
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from paths import SUPPORT
from training import gold_trainer

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.publisher.publisher import Publisher
from offloop.bus.recording.recording import Recording
from offloop.bus.runs.directory import find_run
from offloop.consumers import Callback, Logger, TrainerMetrics
from offloop.consumers.api.logger import Row, RunContext, Upload
from offloop.consumers.delivery.spool import wrap_in_spool
from offloop.consumers.loggers.mlflow import MLFlowLogger
from offloop.consumers.runner.runner import Runner

JOB = SUPPORT / "logger_job.py"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database of MLflow's, shared because it takes seconds to make one."""
    path = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{path / 'mlflow.db'}"
    MlflowClient(uri).create_experiment("offloop", f"file://{path / 'artifacts'}")
    return uri


def only_run(database: str, name: str) -> MlflowRun:
    client = MlflowClient(database)
    experiment = client.get_experiment_by_name("offloop")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`offloop.run` = '{name}'")
    return run


def history(database: str, run: MlflowRun, metric: str) -> list[Metric]:
    found = MlflowClient(database).get_metric_history(run.info.run_id, metric)
    return sorted(found, key=lambda one: (one.step, one.timestamp))


def artifacts(database: str, run: MlflowRun) -> dict[str, bytes]:
    folder = Path(MlflowClient(database).download_artifacts(run.info.run_id, ""))
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Everything(Callback):
    """Logs one of each kind."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def fit_start(self, state: Snapshot, logger: Logger) -> None:
        logger.log_hyperparameters({"seed": 17, "model": {"depth": 2}})

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        batch = state.timestamp.values[2]
        logger.log_metrics({"loss/train[0]": state.loss, "whole": batch, "good": True, "note": f"batch {batch}"})
        if batch == 2:
            image = np.full((2, 2, 3), 0.5)
            mask = {"truth": np.array([[0, 1], [2, 0]])}
            logger.log_images(
                [image], "seen", True, masks=mask and {"truth": [mask["truth"]]}, mask_class_labels={1: "cat"}
            )
            logger.log_table(["a", "b"], [[1, "x"], [None, math.nan]], "numbers")
            logger.log_text("all is well", "note")
            logger.upload_file("checkpoints/model.pt", self._file)


def send_all(stream: Any, database: str, file: Path) -> None:
    statistics = Runner(stream, [Everything(file)], [wrap_in_spool(MLFlowLogger(tracking_uri=database))]).run()
    assert statistics.problems == []


def test_runs_of_one_name_from_two_folders_are_two_runs_and_attempts_are_one(database: str, tmp_path: Path) -> None:
    for folder, loss in (("here", 1.0), ("there", 2.0), ("there", 3.0)):
        with Publisher("twice", runs_dir=tmp_path / folder, resume=True) as publisher:
            publisher.publish("batch_end", batch=int(loss), loss=loss)
        logger = MLFlowLogger(tracking_uri=database)
        assert Runner(Recording(publisher.recording), [TrainerMetrics()], [wrap_in_spool(logger)]).run().problems == []
    client = MlflowClient(database)
    found = {
        run.data.tags["offloop.run_id"]: [one.value for one in history(database, run, "loss/train/total")]
        for run in client.search_runs(["1"], "tags.`offloop.run` = 'twice'")
    }
    here, there = (find_run("twice", tmp_path / folder).id for folder in ("here", "there"))
    assert found == {here: [1.0], there: [2.0, 3.0]}


def test_everything_is_read_back_and_a_recording_sent_later_adds_nothing(database: str, tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    file.write_bytes(b"weights")
    snapshots = snapshots_of_training(4)
    send_all(snapshots, database, file)
    run = only_run(database, "run")
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert (run.info.start_time, run.info.end_time) == (snapshots[0].time_ns // 10**6, snapshots[-1].time_ns // 10**6)
    assert run.data.params == {"seed": "17", "model": "{'depth': 2}"}
    assert run.data.tags.items() >= {"note": "batch 4", "offloop.attempt": "1"}.items()
    losses = history(database, run, "loss/train_0_")
    ends = [state for state in snapshots if state.event.value == "batch_end"]
    assert [(one.step, one.timestamp, one.value) for one in losses] == [
        (state.timestamp.values[2], int(state.time * 1000), state.loss) for state in ends
    ]
    assert [one.value for one in history(database, run, "whole")] == [1, 2, 3, 4]
    found = artifacts(database, run)
    assert set(found) == {
        "images/seen/2-0.png",
        "images/seen/2-0-truth.png",
        "images/seen/labels.json",
        "tables/numbers/2.json",
        "texts/note/2.txt",
        "checkpoints/model.pt",
    }
    assert pixels(found["images/seen/2-0.png"]) == [[[128, 128, 128]] * 2] * 2
    assert pixels(found["images/seen/2-0-truth.png"]) == [[0, 1], [2, 0]]
    assert json.loads(found["images/seen/labels.json"]) == {"1": "cat"}
    table = strict_json(found["tables/numbers/2.json"].decode())
    assert table == {"columns": ["a", "b"], "data": [[1, "x"], [None, "NaN"]]}
    assert found["texts/note/2.txt"] == b"all is well"
    assert found["checkpoints/model.pt"] == b"weights"

    recording = Recording(record_run(tmp_path, "run", snapshots) / "recording-1.mcap")
    send_all(recording, database, file)
    assert [one.to_dictionary() for one in history(database, only_run(database, "run"), "loss/train_0_")] == [
        one.to_dictionary() for one in losses
    ]
    # And alone, it gives the same.
    other = Recording(record_run(tmp_path, "other", snapshots) / "recording-1.mcap")
    send_all(other, database, file)
    sent_later = history(database, only_run(database, "other"), "loss/train_0_")
    assert [(one.step, one.timestamp, one.value) for one in sent_later] == [
        (one.step, one.timestamp, one.value) for one in losses
    ]
    assert artifacts(database, only_run(database, "other")) == found


def pixels(png: bytes) -> Any:
    from io import BytesIO

    from PIL import Image

    with Image.open(BytesIO(png)) as image:
        return np.asarray(image).tolist()


def run_job(recording: Path, database: str, *arguments: str) -> int:
    environment = {**os.environ, "PYTHONPATH": str(JOB.parent)}
    command = [sys.executable, str(JOB), "mlflow", str(recording), database, *arguments]
    return subprocess.run(command, env=environment).returncode


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_consumer_that_is_killed_goes_on_with_no_step_twice_and_none_missing(database: str, tmp_path: Path) -> None:
    recording = record_run(tmp_path, "killed", snapshots_of_training(60)) / "recording-1.mcap"
    assert run_job(recording, database, "40") == -signal.SIGKILL
    run = only_run(database, "killed")
    assert run.info.status == "RUNNING"
    assert run_job(recording, database) == 0
    assert [one.step for one in history(database, run, "loss")] == [*range(1, 61)]
    assert only_run(database, "killed").info.status == "FINISHED"


def send(database: str, context: RunContext, metrics: Mapping[int, float]) -> None:
    logger = MLFlowLogger(tracking_uri=database)
    logger.open(context)
    state = batch_end(1)
    # Attempts differ in their times, so that the database takes equal steps for different ones.
    rows = [Row(step, state.time + context.attempt, {"loss": value}) for step, value in metrics.items()]
    logger.log_rows(rows, state)
    logger.close()


def test_a_later_attempt_logs_to_the_same_run_and_no_step_twice(database: str) -> None:
    send(database, RunContext("resumed", 1, None), {1: 0.1, 2: 0.2, 3: 0.3})
    send(database, RunContext("resumed", 2, None), {2: 0.25, 3: 0.35, 4: 0.4})
    run = only_run(database, "resumed")
    assert [(one.step, one.value) for one in history(database, run, "loss")] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert run.data.tags["offloop.attempt"] == "2"


def test_hyperparameters_that_changed_become_tags(database: str) -> None:
    many = {f"p{number}": number for number in range(150)}
    for seed in (1, 2):
        logger = MLFlowLogger(tracking_uri=database)
        logger.open(RunContext("changed", 1, None))
        logger.log_hyperparameters({"seed": seed, "same": 0} | many, batch_end(1))
        logger.close()
    run = only_run(database, "changed")
    assert len(run.data.params) == 152
    assert (run.data.params["seed"], run.data.tags["seed"]) == ("1", "2")
    assert "same" not in run.data.tags


@pytest.mark.slow
def test_a_training_s_hyperparameters_are_there_without_being_asked_for(
    database: str, runs_dir: Path, tmp_path: Path
) -> None:
    for lr in (0.1, 0.2):
        model = GoldMLP()
        with gold_trainer(
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5),
            config={"api_key": "s3cret", "long": "x" * 900},
            publish=True,
            run_name="trained",
            save_folder=str(tmp_path / f"{lr}"),
            autoresume=True,
            max_duration="1ba",
            loggers=[MLFlowLogger(tracking_uri=database)],
        ) as trainer:
            trainer.fit()
    found = only_run(database, "trained").data
    params = found.params
    assert (
        params.items()
        >= {
            "model/name": "GoldMLP",
            "optimizer/name": "SGD",
            "optimizer/lr": "0.1",
            "optimizer/momentum": "0.5",
            "global_train_batch_size": "6",
            "train_samples": "24",
            "seed": "17",
            "max_duration": "1ba",
            "config/api_key": "***",
            "config/long": "x" * 900,
            "version/torch": torch.__version__,
            "machine/host": socket.gethostname(),
        }.items()
    )
    # What the second attempt has otherwise, which params cannot be; somebody may commit in between.
    tags = {name: value for name, value in found.tags.items() if name in params and not name.startswith("git/")}
    assert tags == {"optimizer/lr": "0.2"}
    recording = find_run("trained").path / "recording-1.mcap"
    assert Runner(Recording(recording), [], [wrap_in_spool(MLFlowLogger(tracking_uri=database))]).run().problems == []
    assert only_run(database, "trained").data.params == params


def test_more_metrics_than_fit_in_a_request(database: str) -> None:
    send(database, RunContext("long", 1, None), {step: 1 / step for step in range(1, 2502)})
    assert len(history(database, only_run(database, "long"), "loss")) == 2501


def test_every_name_of_a_metric_is_taken(database: str) -> None:
    logger = MLFlowLogger(tracking_uri=database)
    logger.open(RunContext("names", 1, None))
    state = batch_end(1)
    names = ["plain", "a//b", "../up", "/root", "loss (total)", "é" * 300]
    logger.log_rows([Row(1, state.time, dict.fromkeys(names, 1.0))], state)
    found = only_run(database, "names").data.metrics
    assert sorted(found) == sorted(["plain", "a/_/b", "_/up", "_/root", "loss _total_", "é" * 250])


def test_files_stay_among_the_run_s_own_and_replace_each_other_when_told(database: str, tmp_path: Path) -> None:
    logger = MLFlowLogger(tracking_uri=database)
    logger.open(RunContext("files", 1, None))
    file = tmp_path / "model.pt"
    for content, overwrite in ((b"1", False), (b"2", False), (b"3", True)):
        file.write_bytes(content)
        logger.upload_file(Upload("../latest.pt", file, overwrite), batch_end(1))
        logger.upload_file(Upload(f"kept-{overwrite}.pt", file, overwrite), batch_end(1))
    found = artifacts(database, only_run(database, "files"))
    assert found == {"_/latest.pt": b"3", "kept-False.pt": b"1", "kept-True.pt": b"3"}


@pytest.mark.parametrize(("chosen", "seconds"), [(None, [20, 600, 20]), ("7", [7, 7, 7])])
def test_a_file_may_take_longer_than_other_requests(
    database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: str | None, seconds: list[int]
) -> None:
    allowed = []
    for name in ("log_artifact", "log_batch"):
        monkeypatch.setattr(MlflowClient, name, lambda *_, **__: allowed.append(MLFLOW_HTTP_REQUEST_TIMEOUT.get()))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", chosen or "")
    if chosen is None:
        monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT")
    file = tmp_path / "model.pt"
    file.write_bytes(b"weights")
    logger = MLFlowLogger(tracking_uri=database)
    logger.open(RunContext("large", 1, None))
    logger.log_rows([Row(1, 1.0, {"loss": 1.0})], batch_end(1))
    logger.upload_file(Upload("model.pt", file, True), batch_end(1))
    logger.log_rows([Row(2, 2.0, {"loss": 1.0})], batch_end(2))
    assert allowed == seconds


def test_what_mlflow_refuses_is_a_configuration_error(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = MLFlowLogger(tracking_uri=database)
    logger.open(RunContext("refused", 1, None))
    rows = [Row(1, 1.0, {"loss": 1.0})]

    def refuse(*_arguments: Any, **_named: Any) -> None:
        raise MlflowException("not this\nlong explanation", INVALID_PARAMETER_VALUE)

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "log_batch", refuse)
        with pytest.raises(ConfigurationError, match=r"^MLflow refuses it: not this$"):
            logger.log_rows(rows, batch_end(1))
    for _again in range(2):
        logger.log_rows(rows, batch_end(1))
    assert len(history(database, only_run(database, "refused"), "loss")) == 1


def test_a_server_that_is_away_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    spool = wrap_in_spool(MLFlowLogger(tracking_uri=f"http://127.0.0.1:{port}", drain_seconds=0.01))
    spool.open(RunContext("away", 1, None))
    spool.log_rows([Row(1, 1.0, {"loss": 1.0})], batch_end(1))
    wait_for(lambda: "logger mlflow: takes nothing, " in capsys.readouterr().err, "what is wrong")
    spool.close()
    assert "1 of 1 entries did not arrive" in capsys.readouterr().err
