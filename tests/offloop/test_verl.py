"""verl's own logging module, which its trainings call: the trainings need Ray and GPUs."""

from pathlib import Path

import pytest
from attached_runs import snapshots_of
from forked import Program, run_forked
from paths import FOLDERS

import offloop
from offloop.bus import Event
from offloop.bus.runs.directory import RunInfo, find_run

# A package without its __init__, which imports Ray.
TRAINING = """
import os, sys, types
import numpy as np
for name in ("verl", "verl.utils"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [f"{os.environ['PYTHONPATH'].split(os.pathsep)[-1]}/{name.replace('.', '/')}"]
from importlib.metadata import entry_points
for plugin in entry_points(group="verl.plugins"):
    plugin.load()
from verl.utils.tracking import Tracking, ValidationGenerationsLogger

backends, first, exit_code = ["offloop", "file"], int(os.environ["FIRST"]), int(os.environ["EXIT_CODE"])
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all trainings of this file have left what they did."""
    folder = tmp_path_factory.mktemp("verl")
    (folder / "file").touch()

    def program(runs: str, first: int = 1, exit_code: int = 0, **more: str) -> Program:
        environment = {"OFFLOOP_RUNS_DIR": str(folder / runs), "FIRST": str(first), "EXIT_CODE": str(exit_code)}
        return Program(TRAINING, environment | more)

    programs = [
        program("runs"),
        program("resumed", 101, 1),
        program("disabled", OFFLOOP_DISABLED="1"),
        program("file/runs"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(FOLDERS["lowest"]))
        patch.chdir(folder)
        ended = run_forked("numpy", folder, programs)
    assert [one.exit_code for one in ended] == [0] * len(ended), [one.stderr for one in ended]
    return folder


def run_in(folder: Path, runs: str, monkeypatch: pytest.MonkeyPatch) -> RunInfo:
    monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(folder / runs))
    return find_run("grpo-tiny")


def test_steps_are_batches_with_their_numbers_and_generations(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "detached" not in (folder / "said-0.txt").read_text()
    run = run_in(folder, "runs", monkeypatch)
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


def test_a_resumed_training_begins_at_its_step_and_a_failed_one_is_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(folder, "resumed", monkeypatch)
    assert (run.status, run.last.error) == ("failed", "verl ended with exit code 1")
    ended = [one for one in snapshots_of(run.name) if one.event is Event.BATCH_END]
    assert [int(one.timestamp.batch) for one in ended] == [101, 102, 103]


def test_errors_are_contained_and_a_disabled_offloop_does_nothing(folder: Path) -> None:
    assert not (folder / "disabled").exists()
    shown = (folder / "said-3.txt").read_text()
    assert shown.count("offloop is detached from verl, the training continues without it") == 1
