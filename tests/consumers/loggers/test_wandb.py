"""Weights & Biases, offline, read back by its own ``wandb leet inspect``."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import logger_job
import numpy as np
import pytest
import wandb
from consumers_stream import batch_end, record_run, snapshots_of_training
from logged import Everything

from offloop.bus.errors import ConfigurationError
from offloop.consumers.api.logger import Row, RunContext, Upload
from offloop.consumers.delivery.spool import wrap_in_spool
from offloop.consumers.loggers.wandb import WandBLogger
from offloop.consumers.runner.runner import Runner


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Keeps wandb's own folders in the test's, and wandb off the network."""
    for kind in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{kind}_DIR", str(tmp_path / kind.lower()))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    yield
    # Ends wandb's own process.
    wandb.teardown()


def records(directory: Path) -> list[dict[str, Any]]:
    """Every record of every run that wandb wrote there."""
    found: list[dict[str, Any]] = []
    for file in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout
        found += map(json.loads, printed.splitlines())
    return found


def history(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows = [record["history"]["item"] for record in found if record["type"] == "history"]
    # It is by wandb's clock, and about the sending.
    return [{name: value for name, value in row.items() if name != "_runtime"} for row in rows]


@pytest.mark.slow
def test_everything_is_read_back(tmp_path: Path) -> None:
    snapshots = snapshots_of_training(4)
    file = tmp_path / "model.pt"
    file.write_bytes(b"weights")
    logger = WandBLogger(project="tests", tags=("a", "b"), mode="offline", dir=tmp_path)
    assert Runner(snapshots, [Everything(file)], [wrap_in_spool(logger)]).run().problems == []
    found = records(tmp_path)
    (run,) = [record["run"] for record in found if record["type"] == "run"]
    assert (run["run_id"], run["display_name"], run["project"]) == ("run-1", "run", "tests")
    assert (run["run_group"], run["tags"]) == ("run", ["a", "b"])
    config = {name: value for r in found if r["type"] == "config" for name, value in r["config"]["update"].items()}
    assert {"seed": 17, "model": {"depth": 2}}.items() <= config.items()
    assert [r["metric"]["step_metric"] for r in found if r["type"] == "metric"] == ["step"]

    rows = history(found)
    assert [row["_step"] for row in rows] == [*range(len(rows))]
    ends = [state for state in snapshots if state.event.value == "batch_end"]
    assert [(row["step"], row["_timestamp"], row["loss"], row["note"]) for row in rows if "loss" in row] == [
        (state.timestamp.values[2], state.time, state.loss, f"batch {number}") for number, state in enumerate(ends, 1)
    ]
    others = [row for row in rows if "loss" not in row]
    assert {(row["step"], row["_timestamp"]) for row in others} == {(2, ends[1].time)}
    names = {name for row in others for name in row}
    assert {"seen._type", "seen.all_masks", "tabled Table._type", "numbers.nrows", "spread.bins", "note at 2"} <= names
    (image,) = tmp_path.glob("wandb/offline-run-*/files/media/images/seen_*.png")
    from PIL import Image

    with Image.open(image) as opened:
        assert np.asarray(opened.convert("RGB")).tolist() == [[[80, 80, 80]] * 2] * 2
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/numbers_*.table.json")
    assert json.loads(table.read_text()) == {"columns": ["a", "b"], "data": [[1, "x"], [None, 0.5]]}
    artifacts = {r["artifact"]["name"]: r["artifact"] for r in found if r["type"] == "artifact"}
    model = artifacts["checkpoints.model.pt"]
    assert (model["type"], sorted(model["aliases"])) == ("pt", ["ep0-ba2", "latest"])
    assert [(one["path"], one["size"]) for one in model["manifest"]["contents"]] == [("model.pt", "7")]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_after_a_kill_no_step_is_missing_or_twice(tmp_path: Path) -> None:
    recording = record_run(tmp_path, "demo", snapshots_of_training(60)) / "recording-1.mcap"
    logger_job.send_with_a_kill(recording, "wandb", str(tmp_path / "sent"))
    rows = history(records(tmp_path / "sent"))
    assert [row["step"] for row in rows] == [*range(1, 61)]
    assert [row["_step"] for row in rows] == [*range(60)]


class OnlineRun:
    """What wandb gives for a run that has rows already."""

    dir = ""
    url = "https://wandb.example/team/project/runs/r-1"

    def __init__(self, rows: int, last_step: int) -> None:
        self.starting_step = rows
        self.summary = {"step": last_step}
        self.rows: list[tuple[int, int]] = []

    def define_metric(self, name: str, step_metric: str) -> None: ...

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self.rows.append((step, values["step"]))

    def finish(self) -> None: ...


def send_online(monkeypatch: pytest.MonkeyPatch, logger: WandBLogger, run: OnlineRun, steps: Sequence[int]) -> None:
    def init(**options: Any) -> OnlineRun:
        # Runs of that name in other folders are others.
        assert (options["id"], options["name"], options["group"]) == ("0123456789-1", "demo", "demo-012345")
        return run

    monkeypatch.setattr("wandb.init", init)
    logger.open(RunContext("demo", 1, None, run_id="0123456789"))
    state = batch_end(1)
    logger.log_rows([Row(step, state.time, {"loss": 0.5}) for step in steps], state)
    logger.close()


def test_steps_that_the_server_has_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    # A consumer of which the server had taken three entries when it was killed is given everything again.
    own = OnlineRun(rows=3, last_step=2)
    killed = WandBLogger(mode="online")
    killed.load_state_dict({"logged": 0, "left_out_to": None, "unfinished": None})
    send_online(monkeypatch, killed, own, [1, 2, 2, 2, 3])
    assert own.rows == [(3, 2), (4, 3)]
    # Another consumer begins at the end of what is there.
    other = OnlineRun(rows=3, last_step=2)
    logger = WandBLogger(mode="online")
    send_online(monkeypatch, logger, other, [1, 2, 3, 4])
    assert other.rows == [(3, 3), (4, 4)]
    # And when that one is opened again, it goes on from there.
    state = logger.state_dict()
    again = WandBLogger(mode="online")
    again.load_state_dict(state)
    later = OnlineRun(rows=5, last_step=4)
    send_online(monkeypatch, again, later, [5])
    assert later.rows == [(5, 5)]


def test_an_error_of_wandb_is_a_configuration_error(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    file.touch()
    logger = WandBLogger(dir=tmp_path)
    logger.open(RunContext("demo", 1, tmp_path))
    with pytest.raises(ConfigurationError):
        logger.upload_file(Upload("x" * 129, file, False), batch_end(1))
    logger.close()


def test_a_missing_account_is_reported_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.touch()
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(ConfigurationError, match=r"-o wandb\.mode=offline"):
        WandBLogger(mode="online").check()
    netrc.write_text(f"machine 127.0.0.1 login user password {'0' * 40}")
    WandBLogger(mode="online").check()
    WandBLogger(mode="offline").check()
