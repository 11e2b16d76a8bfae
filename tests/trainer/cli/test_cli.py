"""The command ``trainer``: what it says, what it refuses, and that it needs torch only to train."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import Run
from gold import GoldMLP
from paths import ROOT
from trainer_command import SMALL, command_in, without_torch

from offloop.bus.recording.recording import Recording
from offloop.bus.runs.directory import list_runs

QUIETLY = ("--device=cpu", "--no-publish", "--no-progress")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, runs_dir: Path) -> Run:
    return command_in(tmp_path, monkeypatch, capsys)


def test_the_list_names_the_tasks(run: Run) -> None:
    listed = run("--list-tasks")
    assert listed.code == 0
    assert re.search(r"^chars +Train a small GPT on the characters of Python's own standard .*$", listed.out, re.M)
    assert re.search(
        r"^digits +Train a small convolutional network on scikit-learn's handwritten digits\.$", listed.out, re.M
    )


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_the_command_explains_itself(run: Run, arguments: tuple[str, ...]) -> None:
    shown = run(*arguments)
    assert shown.code == 0
    for text in ("TASK [OPTIONS]", "--list-tasks", "digits", "chars", "module:function"):
        assert text in shown.out


def test_a_task_shows_its_options_with_their_defaults(run: Run) -> None:
    shown = run("digits", "--help")
    assert shown.code == 0
    assert re.search(r"--batch-size INTEGER +images in a batch, over all ranks\. +\[default: 32\]", shown.out)
    assert re.search(r"--lr FLOAT .*\[default:\s+0\.003\]", shown.out, re.S)
    for option in (
        "--max-duration",
        "--eval-interval",
        "--run-name",
        "--runs-dir",
        "--seed",
        "--device",
        "--no-publish",
    ):
        assert option in shown.out
    assert "batch_size:" not in shown.out


def test_a_task_of_one_s_own_is_trained_recorded_and_announced(run: Run, runs_dir: Path) -> None:
    done = run(*SMALL, "-d", "5ba", "--seed", "7")
    assert done.code == 0, done.err
    [info] = list_runs(runs_dir)
    assert info.name.startswith("small-")
    recording = str(info.recording)
    assert done.out.splitlines() == [
        "seed 7",
        f"run {info.name}: recording to {recording}; watch it with: consumer --callbacks speed,lr",
        f"recording: {recording}",
    ]
    assert done.err.splitlines()[-1].startswith("done: 1 ep, 5 ba, 30 sp")
    assert info.status == "finished"
    assert info.last.info["seed"] == 7
    assert info.last.info["config"]["task"] == "fruit:small"
    assert info.last.info["config"]["slope"] == 0.5
    assert len(list(Recording(info.path))) > 5


def test_a_file_s_own_task_and_every_common_option(run: Run, tmp_path: Path) -> None:
    own = tmp_path / "elsewhere"
    arguments = ["--batch-size=6", "--slope=0.5", "--gentle", "--max-duration=1ep", "--eval-interval=0", "--device=cpu"]
    arguments += ["--record=all", "--no-progress", f"--runs-dir={own}", "--run-name=mine"]
    done = run(f"{tmp_path}/fruit.py:small", *arguments)
    assert done.code == 0, done.err
    assert done.err == ""
    assert f"consumer --callbacks speed,lr --runs-dir {own}" in done.out
    events = {state.event.value for state in Recording(own / "mine")}
    assert "after_loss" in events


def test_without_a_stream_there_is_nothing_to_watch(run: Run, runs_dir: Path) -> None:
    done = run(*SMALL, "--no-publish", "-d1ba")
    assert done.code == 0
    assert "no stream, so there is nothing to watch or record" in done.out
    assert list_runs(runs_dir) == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["digitz"], 2, "no task 'digitz': did you mean 'digits'; your own is module:function"),
        (["digits", "--max-duration", "5"], 2, "invalid duration '5'"),
        (["digits", "--batch-sise", "5"], 2, "Did you mean one of: '--batch-size'"),
        (["digits", "--device", "tpu"], 2, "'tpu' is not one of 'auto', 'cpu', 'gpu'"),
        (["digits", "--run-name", "a/b"], 2, "'a/b' cannot be a run name"),
        (["chars", "--width", "30"], 2, "width 30 is not allowed: use a multiple of 4"),
        (["no_such_module:f"], 2, "no module 'no_such_module' was found"),
        (["no/such/file.py:f"], 2, "no file 'no/such/file.py'"),
        (["fruit:bananas"], 2, "fruit has no function 'bananas'"),
        (["fruit:small"], 2, "Missing option '--batch-size'"),
        (["fruit:wrong"], 2, "task 'fruit:wrong' returned 'modle', which Trainer does not take: did you mean 'model'?"),
        (["fruit:nothing"], 2, "task 'fruit:nothing' returned a NoneType: return a dict"),
        (["fruit:needs_sklearn"], 2, "needs scikit-learn; install it with: pip install 'offloop[demo]'"),
    ],
)
def test_errors_are_one_line_that_says_what_was_meant(
    run: Run, runs_dir: Path, arguments: list[str], code: int, message: str
) -> None:
    refused = run(*arguments)
    [line] = refused.err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert refused.code == code
    assert refused.out == ""
    assert list_runs(runs_dir) == []


def test_an_interrupted_run_says_where_its_recording_is(
    run: Run, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(GoldMLP, "forward", interrupt)
    ended = run(*SMALL)
    [info] = list_runs(runs_dir)
    assert ended.code == 130
    assert ended.err.split("\n") == [f"run {info.name} was stopped: signal SIGINT", "", "interrupted", ""]
    assert f"recording: {info.recording}" in ended.out
    assert info.status == "stopped"


def test_without_torch_the_command_says_how_to_install_it() -> None:
    code = "import sys; sys.argv = ['trainer', 'digits']; from offloop.trainer.cli.main import main; main()"
    done = without_torch(code)
    assert done.returncode == 2
    assert done.stderr == "error: the trainer needs torch; install it with: pip install 'offloop[trainer]'\n"


def test_without_torch_the_package_imports_and_names_what_is_missing_when_it_is_used() -> None:
    code = """
from offloop import trainer
assert "Trainer" in dir(trainer)
try:
    trainer.Trainer
except ImportError as error:
    print(error)
try:
    trainer.Trainr
except AttributeError as error:
    print(error)
import sys; sys.argv = ['trainer', '--list-tasks']; from offloop.trainer.cli.main import main; main()
"""
    done = without_torch(code)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "the trainer needs torch; install it with: pip install 'offloop[trainer]'"
    assert lines[1] == "module 'offloop.trainer' has no attribute 'Trainr'"
    assert lines[2].startswith("chars")


def test_python_m_trainer_is_the_command() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "offloop.trainer", "--list-tasks"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0
    assert "digits" in done.stdout


def test_checkpoints_that_are_in_the_way_can_be_written_over(run: Run) -> None:
    arguments = [*SMALL, *QUIETLY, "--save-folder=saved"]
    assert run(*arguments, "-d5ba").code == 0
    assert run(*arguments, "-d2ba").code == 2
    assert run(*arguments, "-d2ba", "--save-overwrite").code == 0


def test_weights_that_lack_some_of_the_models_can_be_taken(run: Run, tmp_path: Path) -> None:
    weights = GoldMLP().state_dict()
    weights.popitem()
    torch.save(weights, tmp_path / "some.pt")
    arguments = [*SMALL, *QUIETLY, "-d1ba", "--load-path=some.pt", "--load-weights-only"]
    refused = run(*arguments)
    [line] = refused.err.splitlines()
    assert "load_strict_model_weights=False (--load-what-fits)" in line
    assert refused.code == 2
    assert run(*arguments, "--load-what-fits").code == 0


WITHOUT_ANOTHER = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "zstandard":
            raise ModuleNotFoundError("No module named 'zstandard'", name=name)
sys.meta_path.insert(0, Absent())
from offloop.trainer import Trainer
"""


def test_a_missing_module_that_the_extra_does_not_install_is_not_blamed_on_it() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_ANOTHER], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'zstandard'"
