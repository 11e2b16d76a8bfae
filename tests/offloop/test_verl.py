"""verl's own logging module, which its trainings call: the trainings need Ray and GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from attached_runs import snapshots_of
from paths import FOLDERS

import offloop
from offloop.bus import Event
from offloop.bus.runs.directory import find_run

# A package without its __init__, which imports Ray.
TRAINING = """
import sys, types
import numpy as np
for name in ("verl", "verl.utils"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [f"{sys.argv[1]}/{name.replace('.', '/')}"]
from importlib.metadata import entry_points
for plugin in entry_points(group="verl.plugins"):
    plugin.load()
from verl.utils.tracking import Tracking, ValidationGenerationsLogger

backends, first, exit_code = ["offloop", "file"], int(sys.argv[2]), int(sys.argv[3])
config = {"trainer": {"logger": backends}, "actor": {"lr": 1e-6, "api_key": "secret-key"}}
tracking = Tracking(project_name="p", experiment_name="grpo tiny", default_backend=backends, config=config)
generations = ValidationGenerationsLogger("p", "grpo tiny")
if first == 1:
    tracking.log(data={"val/reward": 0.25}, step=0)
for step in range(first, first + 3):
    generations.log(backends, [("2 + 2 =", f"{step}", 0.5), ("1 + 1 =", "2", 1.0)], step)
    tracking.log(data={"actor/loss": np.float32(step), "note": "text", "val/reward": step}, step=step)
tracking.finish(exit_code=exit_code)
"""

pytestmark = [pytest.mark.slow, pytest.mark.needs("lowest")]


def train(first: int = 1, exit_code: int = 0, **more: str) -> str:
    """Returns what it wrote to its standard error."""
    folder = str(FOLDERS["lowest"])
    command = [sys.executable, "-c", TRAINING, folder, str(first), str(exit_code)]
    program = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": folder} | more, capture_output=True, text=True, timeout=120
    )
    assert program.returncode == 0, program.stderr
    return program.stderr


@pytest.fixture(autouse=True)
def _fresh(runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_steps_are_batches_with_their_numbers_and_generations() -> None:
    assert "detached" not in train()
    run = find_run("grpo-tiny")
    assert run.status == "finished"
    assert run.last.info["framework"] == {"name": "verl", "version": "0.9.1"}
    assert run.last.info["config"]["actor"]["lr"] == 1e-6
    assert "secret-key" not in str(run.last.info)
    assert [int(one.timestamp.batch) for one in snapshots_of(run.name) if one.event is Event.BATCH_END] == [1, 2, 3]
    frame = offloop.runs()[run.name]
    assert frame.metrics("actor/loss", to="dict") == {"step": [0, 1, 2], "actor/loss": [1, 2, 3]}
    rows = frame.table("val_generations", to="dict")
    assert rows["step"] == [0, 0, 1, 1, 2, 2]
    assert list(zip(rows["input"], rows["output"], rows["score"], strict=True))[2:4] == [
        ("2 + 2 =", "2", 0.5),
        ("1 + 1 =", "2", 1.0),
    ]


def test_a_resumed_training_begins_at_its_step_and_a_failed_one_is_failed() -> None:
    train(first=101, exit_code=1)
    run = find_run("grpo-tiny")
    assert (run.status, run.last.error) == ("failed", "verl ended with exit code 1")
    ended = [one for one in snapshots_of(run.name) if one.event is Event.BATCH_END]
    assert [int(one.timestamp.batch) for one in ended] == [101, 102, 103]


def test_errors_are_contained_and_a_disabled_offloop_does_nothing(runs_dir: Path, tmp_path: Path) -> None:
    train(OFFLOOP_DISABLED="1")
    assert not runs_dir.exists() or not list(runs_dir.iterdir())
    (tmp_path / "file").touch()
    shown = train(OFFLOOP_RUNS_DIR=str(tmp_path / "file" / "runs"))
    assert shown.count("offloop is detached from verl, the training continues without it") == 1
