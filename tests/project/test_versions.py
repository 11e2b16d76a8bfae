"""Files of each released version: later ones read them, and do not overwrite what they cannot read."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from make_fixtures import BATCHES, Line
from packaging.version import Version
from paths import TESTS

import offloop
from offloop.bus import Event, Recording
from offloop.bus.errors import RecordingError
from offloop.bus.recording.writer import RecordingWriter
from offloop.consumers.callbacks import TrainerMetrics
from offloop.consumers.testing import replay
from offloop.trainer import Trainer

PACKAGES = {
    "Python": "python",
    "torch": "torch",
    "Lightning": "lightning",
    "Transformers": "transformers",
    "TRL": "trl",
    "Accelerate": "accelerate",
    "Keras": "keras",
    "Ignite": "pytorch-ignite",
}
VERSIONS = sorted((TESTS / "data" / "versions").iterdir())


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a version's files, as the present folder; its runs are the folder's runs."""
    shutil.copytree(request.param, tmp_path, dirs_exist_ok=True)
    shutil.copytree(request.param / "run", tmp_path / "runs" / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OFFLOOP_RUNS_DIR", raising=False)
    return tmp_path


def test_a_run_is_read(files: Path) -> None:
    recording = Recording(files / "runs" / "run")
    assert [int(one.timestamp.batch) for one in recording if one.event is Event.BATCH_END] == [*range(1, BATCHES + 1)]
    rows = replay(TrainerMetrics(), recording).rows
    assert [row.step for row in rows if "loss/train/total" in row.metrics] == [*range(BATCHES)]
    run = offloop.runs()["run"]
    assert (run.status, run.config["lr"]) == ("finished", 0.01)
    table = run.table("samples", to="dict")
    assert (table["prompt"], table["score"]) == (["2 + 2 ="] * BATCHES, [4.0] * BATCHES)
    assert run.image(table["image"][0]) is not None
    assert len(list(run.events("@rollout_end"))) == len(list(run.events("@generate"))) == BATCHES


def test_a_checkpoint_is_resumed(files: Path) -> None:
    data = [[torch.ones(4, 2), torch.ones(4, 1)] for _ in range(BATCHES)]
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    arguments = {"max_duration": "2ep", "load_path": "checkpoint.safetensors", "publish": False}
    with Trainer(model, data, optimizers=optimizer, **arguments) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == 2 * BATCHES


def test_a_recording_of_another_version_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "a.mcap"
    RecordingWriter(path, "run", 1, about={"protocol_version": "9"}).close()
    content = path.read_bytes()
    with pytest.raises(RecordingError, match="is of protocol version 9, this offloop writes 1: continue"):
        RecordingWriter(path, "run", 1, resume=True)
    assert path.read_bytes() == content


def test_the_documented_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())
    groups = [*project["project"]["optional-dependencies"].values(), project["dependency-groups"]["frameworks"]]
    lowest = dict(one.split(">=") for group in groups for one in group if ">=" in one)
    lowest["python"] = project["project"]["requires-python"].removeprefix(">=")
    pinned = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (TESTS.parent / "constraints.txt").read_text(), re.MULTILINE))
    pinned["python"] = lowest["python"]  # what .ci/run begins with
    page = (TESTS.parent / "docs" / "compatibility.md").read_text()
    documented = {
        name: (low, tested) for name, low, tested in re.findall(r"^\| (\w+) \| ([\d.]+) \| (.*) \|$", page, re.M)
    }
    for name, package in PACKAGES.items():
        low, tested = documented[name]
        assert Version(low) == Version(lowest[package]), name
        assert ".".join(pinned[package].split(".")[:2]) in tested, name
