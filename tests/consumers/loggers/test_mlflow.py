"""MLflow with a local database, read back by its own client."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import logger_job
import numpy as np
import pytest
from consumers_stream import batch_end, record_run, snapshots_of_training
from logged import Everything
from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.entities import Run as MlflowRun
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from offloop.bus.errors import ConfigurationError
from offloop.bus.recording.recording import Recording
from offloop.consumers.api.logger import Row, RunContext, Upload
from offloop.consumers.delivery.spool import wrap_in_spool
from offloop.consumers.loggers.mlflow import MLFlowLogger
from offloop.consumers.runner.runner import Runner


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


def send_all(stream: Any, database: str, file: Path) -> None:
    statistics = Runner(stream, [Everything(file)], [wrap_in_spool(MLFlowLogger(tracking_uri=database))]).run()
    assert statistics.problems == []


def test_a_replay_into_the_same_run_adds_nothing(database: str, tmp_path: Path) -> None:
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
    found = artifacts(database, run)
    assert set(found) == {
        "images/seen/2-0.png",
        "images/seen/2-0-truth.png",
        "images/seen/labels.json",
        "tables/numbers/2.json",
        "texts/note_at_2/2.txt",
        "images/tabled/2-0.png",
        "checkpoints/model.pt",
    }
    assert pixels(found["images/seen/2-0.png"]) == [[[80, 80, 80]] * 2] * 2
    assert pixels(found["images/seen/2-0-truth.png"]) == [[0, 1], [2, 0]]
    assert json.loads(found["images/seen/labels.json"]) == {"1": "cat"}
    table = json.loads(found["tables/numbers/2.json"])
    assert table == {"columns": ["a", "b"], "data": [[1, "x"], [None, 0.5]]}
    assert found["texts/note_at_2/2.txt"] == b"all is well"
    assert found["checkpoints/model.pt"] == b"weights"

    recording = Recording(record_run(tmp_path, "run", snapshots) / "recording-1.mcap")
    send_all(recording, database, file)
    assert [one.to_dictionary() for one in history(database, only_run(database, "run"), "loss/train_0_")] == [
        one.to_dictionary() for one in losses
    ]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_after_a_kill_no_step_is_missing_or_twice(database: str, tmp_path: Path) -> None:
    recording = record_run(tmp_path, "killed", snapshots_of_training(60)) / "recording-1.mcap"
    logger_job.send_with_a_kill(recording, "mlflow", database)
    losses = history(database, only_run(database, "killed"), "loss")
    assert [one.step for one in losses] == [*range(1, 61)]


def pixels(png: bytes) -> Any:
    from io import BytesIO

    from PIL import Image

    with Image.open(BytesIO(png)) as image:
        return np.asarray(image).tolist()


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
    # More than fit in a request.
    send(database, RunContext("resumed", 2, None), {2: 0.25, 3: 0.35} | {step: 1 / step for step in range(4, 1502)})
    run = only_run(database, "resumed")
    found = [(one.step, one.value) for one in history(database, run, "loss")]
    assert found == [(1, 0.1), (2, 0.2), (3, 0.3), *((step, 1 / step) for step in range(4, 1502))]
    assert run.data.tags["offloop.attempt"] == "2"
    # Of that name in another folder.
    send(database, RunContext("resumed", 1, None, run_id="other"), {1: 0.9})
    client = MlflowClient(database)
    assert len(client.search_runs([run.info.experiment_id], "tags.`offloop.run` = 'resumed'")) == 2


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


def test_any_metric_name_is_accepted(database: str) -> None:
    logger = MLFlowLogger(tracking_uri=database)
    logger.open(RunContext("names", 1, None))
    state = batch_end(1)
    names = ["plain", "a//b", "../up", "/root", "loss (total)", "é" * 300]
    logger.log_rows([Row(1, state.time, dict.fromkeys(names, 1.0))], state)
    found = only_run(database, "names").data.metrics
    assert sorted(found) == sorted(["plain", "a/_/b", "_/up", "_/root", "loss _total_", "é" * 250])


def test_files_stay_within_the_run_and_are_replaced_on_request(database: str, tmp_path: Path) -> None:
    logger = MLFlowLogger(tracking_uri=database)
    logger.open(RunContext("files", 1, None))
    file = tmp_path / "model.pt"
    for content, overwrite in ((b"1", False), (b"2", False), (b"3", True)):
        file.write_bytes(content)
        logger.upload_file(Upload("../latest.pt", file, overwrite), batch_end(1))
        logger.upload_file(Upload(f"kept-{overwrite}.pt", file, overwrite), batch_end(1))
    found = artifacts(database, only_run(database, "files"))
    assert found == {"_/latest.pt": b"3", "kept-False.pt": b"1", "kept-True.pt": b"3"}


def test_an_error_of_mlflow_is_a_configuration_error(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = MLFlowLogger(tracking_uri=database)
    logger.open(RunContext("refused", 1, None))
    rows = [Row(1, 1.0, {"loss": 1.0})]

    def refuse(*_arguments: Any, **_named: Any) -> None:
        raise MlflowException("not this\nlong explanation", INVALID_PARAMETER_VALUE)

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "log_batch", refuse)
        with pytest.raises(ConfigurationError):
            logger.log_rows(rows, batch_end(1))
    for _again in range(2):
        logger.log_rows(rows, batch_end(1))
    assert len(history(database, only_run(database, "refused"), "loss")) == 1
