"""The command ``trainer``: what it says, what it refuses, and that it needs torch only to train."""

import re
from pathlib import Path

import pytest
from commands import Run
from gold import GoldMLP
from safetensors.torch import save_file
from trainer_command import SMALL, command_in, without_torch

from offloop.bus.recording.recording import Recording
from offloop.bus.runs.directory import list_runs
from offloop.trainer.arguments import explain_missing

QUIETLY = ("--device=cpu", "--no-publish", "--no-progress")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, runs_dir: Path) -> Run:
    return command_in(tmp_path, monkeypatch, capsys)


def test_the_command_lists_its_tasks_and_explains_itself(run: Run) -> None:
    for arguments in ((), ("--help",)):
        shown = run(*arguments)
        assert shown.code == 0
        for text in ("TASK [OPTIONS]", "--list-options", "module:function"):
            assert text in shown.out
        for name in ("chars", "digits"):
            assert re.search(rf"^ +{name} +Train a small ", shown.out, re.M)


def test_a_task_shows_its_options_with_their_defaults(run: Run) -> None:
    shown = run("digits", "--help").out
    assert re.search(r"--batch-size INTEGER +images in a batch, over all ranks\. +\[default: 32\]", shown)
    assert re.search(r"--lr FLOAT .*\[default:\s+0\.003\]", shown, re.S)
    for option in ("--max-duration", "--eval-interval", "--run-name", "--runs-dir", "--device", "--no-publish"):
        assert option in shown
    assert "batch_size:" not in shown


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


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["digitz"], "'digits'"),
        (["digits", "--max-duration", "5"], "'5'"),
        (["chars", "--width", "30"], "30"),
        (["no_such_module:f"], "'no_such_module'"),
        (["fruit:bananas"], "'bananas'"),
        (["fruit:small"], "'--batch-size'"),
        (["fruit:wrong"], "'model'"),
        (["fruit:needs_sklearn"], "pip install 'offloop[demo]'"),
        ([*SMALL, "--max-duration", "0ep"], "'--max-duration'"),
        ([*SMALL, "--max-duration", "3iter"], "iteration_length='1ep'"),
        ([*SMALL, "--save-folder", "ck", "--save-interval", "5"], "'--save-interval'"),
        ([*SMALL, "--save-folder", "{rum_name}"], "{rum_name}"),
        ([*SMALL, "--save-interval", "5ba"], "--save-folder"),
    ],
)
def test_a_mistake_is_one_line_and_starts_no_run(run: Run, runs_dir: Path, arguments: list[str], word: str) -> None:
    refused = run(*arguments)
    [line] = refused.err.splitlines()
    assert line.startswith("error: ")
    assert word in line
    assert (refused.code, list_runs(runs_dir)) == (2, [])
    assert re.fullmatch(r"(seed \d+\n)?", refused.out)


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


def test_without_torch_the_package_imports_and_reports_what_is_missing_when_it_is_used() -> None:
    code = """
import sys
from offloop import trainer
from offloop.trainer import algorithms
from offloop.trainer.cli.main import main
assert "Trainer" in dir(trainer)
for package, name in ((trainer, "Trainer"), (algorithms, "EMA"), (trainer, "Trainr")):
    try:
        getattr(package, name)
    except (ImportError, AttributeError) as error:
        print(error)
for argument in ("--help", "--list-algorithms", "digits"):
    sys.argv = ["trainer", argument]
    try:
        main()
    except SystemExit as ended:
        print(ended.code)
"""
    done = without_torch(code)
    missing = "the trainer needs torch; install it with: pip install 'offloop[trainer]'"
    first, second, unknown, usage, *_, refused, trained = done.stdout.splitlines()
    assert first == second == missing
    assert "Trainr" in unknown
    assert usage.startswith("Usage")
    assert (refused, trained) == ("2", "2")
    assert done.stderr.splitlines() == [f"error: {missing}"] * 2


def test_a_missing_module_that_the_extra_does_not_install_is_not_blamed_on_it() -> None:
    assert explain_missing("zstandard") is None
    assert explain_missing("torch") is not None


def test_older_checkpoints_are_overwritten_on_request(run: Run) -> None:
    arguments = [*SMALL, *QUIETLY, "--save-folder=saved"]
    assert run(*arguments, "-d5ba").code == 0
    assert run(*arguments, "-d2ba").code == 2
    assert run(*arguments, "-d2ba", "--save-overwrite").code == 0


def test_incomplete_weights_are_loaded_on_request(run: Run, tmp_path: Path) -> None:
    weights = GoldMLP().state_dict()
    weights.popitem()
    save_file(weights, tmp_path / "some.safetensors")
    arguments = [*SMALL, *QUIETLY, "-d1ba", "--load-path=some.safetensors", "--load-weights-only"]
    refused = run(*arguments)
    assert "--load-what-fits" in refused.err
    assert refused.code == 2
    assert run(*arguments, "--load-what-fits").code == 0
