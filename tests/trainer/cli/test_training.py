"""The command's options for training and checkpoints, and what it says of how to go on."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import Run
from paths import SUPPORT
from trainer_command import SMALL, command_in

from offloop.bus.cli.describe import describe_run, lines
from offloop.bus.runs.directory import find_run, list_runs
from offloop.trainer.checkpoints.file import read_weights

TUNED = '''
import os
import signal
import sys

sys.path.insert(0, {tests!r})
from gold import GoldMLP, gold_loader, gold_optimizer
from offloop.bus.types.event import Event
from offloop.trainer import Algorithm

class Tell(Algorithm):
    """Prints what the training was set to."""

    def match(self, event, state):
        return event in (Event.FIT_START, Event.EVAL_END)

    def apply(self, event, state, logger):
        if event is Event.EVAL_END:
            print("evaluated", state.eval_timestamp.batch)
        else:
            print(state.run_name, state.precision, state.device_train_microbatch_size, state.iteration_length,
                  state.dataloader_len, state.max_duration, int(state.timestamp.batch))

class Signal(Algorithm):
    """Sends this process a signal in the middle of a batch."""

    def __init__(self, name: str, batch: int):
        self.number = getattr(signal, name)
        self.batch = batch

    def match(self, event, state):
        return event is Event.BEFORE_LOSS and state.timestamp.batch == self.batch

    def apply(self, event, state, logger):
        os.kill(os.getpid(), self.number)

def tuned():
    model = GoldMLP()
    return {{
        "model": model,
        "train_dataloader": gold_loader("train", 30, 6),
        "eval_dataloader": gold_loader("eval_a", 12, 3),
        "optimizers": gold_optimizer(model),
        "algorithms": Tell(),
        "max_duration": "2ep",
        "run_name": "theirs",
        "precision": "amp_bf16",
        "device_train_microbatch_size": 3,
        "publish": False,
        "iteration_length": "1ep",
        "train_subset_num_batches": 2,
        "eval_subset_num_batches": 3,
        "progress_bar": False,
        "device": "cpu",
    }}

def place(*, runs_dir: str):
    return {{}}
'''


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, runs_dir: Path) -> Run:
    (tmp_path / "tuning.py").write_text(TUNED.format(tests=str(SUPPORT)))
    return command_in(tmp_path, monkeypatch, capsys)


@pytest.fixture
def _torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name in ("deterministic", "benchmark"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    yield
    torch.use_deterministic_algorithms(False)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = read_weights(folder / "latest-rank0.safetensors")
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_arguments_of_the_task_apply_without_options(run: Run, runs_dir: Path) -> None:
    done = run("tuning:tuned")
    assert done.err == ""
    assert done.out.splitlines() == [
        "run theirs: no stream, so there is nothing to watch or record",
        "theirs amp_bf16 3 1ep 2 2ep 0",
        "evaluated 3ba",
        "evaluated 3ba",
    ]
    assert list_runs(runs_dir) == []


def test_options_replace_arguments_of_the_task(run: Run, runs_dir: Path) -> None:
    settings = ["--run-name=mine", "--precision=fp32", "--microbatch-size=2", "--iteration-length=2ep", "--publish"]
    settings += ["--train-batches=4", "--eval-batches=1", "--eval-interval=4ba", "-d", "1ep", "--progress"]
    done = run("tuning:tuned", *settings)
    assert done.code == 0, done.err
    assert done.out.splitlines()[1:3] == ["mine fp32 2 2ep 4 1ep 0", "evaluated 1ba"]
    assert "\ndone: 1 ep, 4 ba" in done.err
    assert [info.name for info in list_runs(runs_dir)] == ["mine"]
    assert "mine" in run("tuning:tuned", "--run-name=mine", "--microbatch-size=auto", "--algorithms=ema").out


@pytest.mark.usefixtures("_torch_as_it_was")
def test_compile_and_deterministic_reach_torch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, **settings: compiled.append(settings) or model)
    plain = run(*SMALL, "-d1ba")
    assert plain.code == 0
    assert "checkpoints" not in plain.out
    assert compiled == []
    assert not torch.are_deterministic_algorithms_enabled()
    assert run(*SMALL, "-d1ba", "--compile", "--deterministic").code == 0
    assert compiled == [{}]
    assert torch.are_deterministic_algorithms_enabled()
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)


def test_a_mistake_found_by_the_loop_is_one_line_too(run: Run, tmp_path: Path) -> None:
    (tmp_path / "no.safetensors").write_text("no checkpoint")
    refused = run(*SMALL, "--load-path=no.safetensors")
    assert (refused.code, len(refused.err.splitlines())) == (2, 1)
    assert "no.safetensors" in refused.err


def test_a_common_option_that_a_task_needs_is_required(run: Run) -> None:
    assert "--runs-dir" in run("tuning:place").err


def test_checkpoints_are_written_kept_and_announced(run: Run, tmp_path: Path) -> None:
    arguments = [*SMALL, "-d7ba", "--save-folder=saved/{run_name}", "--save-interval=2ba", "--keep=2", "--run-name=r"]
    done = run(*arguments)
    assert done.code == 0, done.err
    names = {path.name for path in (tmp_path / "saved" / "r").iterdir()}
    assert names == {f"{name}-rank0.safetensors" for name in ("ep1-ba6", "ep1-ba7", "latest")}
    seed = re.search(r"^seed (\d+)$", done.out, re.M)
    assert seed
    assert done.out.splitlines()[-1] == (
        f"checkpoints: saved/r; to resume, run the same command with --seed {seed[1]} --autoresume and a longer "
        "--max-duration"
    )
    longer = run(*arguments, "--seed", seed[1], "--autoresume", "-d9ba", "--no-progress")
    assert longer.out.splitlines()[-1] == (
        "checkpoints: saved/r; to resume, run the same command with a longer --max-duration"
    )
    assert (tmp_path / "saved" / "r" / "ep2-ba9-rank0.safetensors").exists()


def test_a_checkpoint_resumes_the_training_or_provides_weights_alone(run: Run, tmp_path: Path) -> None:
    run(*SMALL, "-d5ba", "--save-folder=ck", "--no-progress")
    task = ["tuning:tuned", "-d6ba", "--precision=fp32", "--eval-interval=0"]
    assert "theirs fp32 3 1ep 2 6ba 5" in run(*task, "--load-path=ck").out
    assert "theirs fp32 3 1ep 2 6ba 0" in run(*task, "--load-path=ck", "--load-weights-only").out


@pytest.mark.slow
def test_an_interrupted_training_saves_a_checkpoint_and_resumes_to_the_same_weights(run: Run, tmp_path: Path) -> None:
    def arguments(folder: str) -> list[str]:
        return [*SMALL, "-d3ep", f"--save-folder={folder}", "--save-interval=1ep", "--no-progress", "--run-name=r"]

    def interrupted(name: str, batch: int, *more: str) -> str:
        algorithm = ["--algorithms=tuning.py:Signal", "-o", f"Signal.name={name}", "-o", f"Signal.batch={batch}"]
        ended = run(*arguments("ck"), *algorithm, *more)
        assert ended.code == 130
        assert ended.err.splitlines()[0].startswith(f"{name}: stopping after this batch, with a checkpoint")
        assert ended.err.splitlines()[-1] == "interrupted"
        assert find_run("r").status == "stopped"
        assert list((tmp_path / "ck").glob(f"ep*-ba{batch + 1}-rank0.safetensors"))
        return ended.out

    said = interrupted("SIGTERM", 5).splitlines()
    how = re.fullmatch(r"checkpoints: ck; to resume, run the same command with (--seed \d+ --autoresume)", said[-1])
    assert how
    resume = how[1].split()
    seed = resume[:2]
    assert f"seed {seed[1]}" in said
    assert interrupted("SIGINT", 7, *resume).endswith("; to resume, run the same command again\n")
    assert run(*arguments("ck"), *resume).code == 0
    assert run(*arguments("whole"), *seed, "--no-publish").code == 0
    assert same(weights(tmp_path / "ck"), weights(tmp_path / "whole"))


@pytest.mark.slow
def test_an_attempt_that_trains_something_else_is_warned_about(
    run: Run, runs_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = ["-d2ba", "--run-name=r", "--eval-batches=1", "--autoresume"]
    for folder in ("a", "b"):
        run("digits", *arguments, f"--save-folder={tmp_path / folder}")
    assert "trains something else" not in caplog.text
    run("chars", *arguments, f"--save-folder={tmp_path / 'c'}")
    changed = re.search("attempt 3 of run r differs from attempt 2: (.*);", caplog.text)
    assert changed is not None
    assert re.fullmatch(r"task chars \(before: digits\), .*parameters \d+ \(before: \d+\)", changed[1])
    assert ("changed", changed[1]) in lines(describe_run(find_run("r")))
