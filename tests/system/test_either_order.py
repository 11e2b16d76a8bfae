"""A trainer and a consumer, started in either order by people who name no run, beside runs of before."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
from consumers_stream import record_run, snapshots_of_training
from helpers import wait_for

from offloop.bus.runs.directory import find_run, list_runs
from offloop.bus.runs.restarts import find_restart

SLOW = """
import pathlib, time
pathlib.Path("loading").touch()
try:
    time.sleep(600)
except BaseException as error:
    raise ImportError("cannot load module more than once per process") from error
import torch

def task():
    return {}
"""
"""A task that takes long to load, as torch does on a busy machine, and does as numpy does with what is raised then."""


class Command:
    """A command in a process of its own, of which standard error is read."""

    def __init__(self, *arguments: str, cwd: Path | None = None) -> None:
        command = [str(Path(sys.executable).with_name(arguments[0])), *arguments[1:]]
        # What a buffer took with a line, ``communicate`` would not find.
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, cwd=cwd)

    def says(self) -> str:
        """The next line."""
        assert self.process.stderr is not None
        return self.process.stderr.readline().decode().rstrip("\n")

    def ends(self) -> tuple[int, list[str]]:
        """The exit code, and the lines that have not been read yet."""
        _, err = self.process.communicate(timeout=100)
        return self.process.returncode, err.decode().splitlines()


Start: TypeAlias = Callable[..., Command]


@pytest.fixture
def command() -> Iterator[Start]:
    """Starts commands, which are ended with the test."""
    with contextlib.ExitStack() as started:

        def start(*arguments: str, cwd: Path | None = None) -> Command:
            one = Command(*arguments, cwd=cwd)
            started.enter_context(one.process)
            started.callback(one.process.kill)
            return one

        yield start


@pytest.fixture
def old(runs_dir: Path) -> Path:
    """A run that has finished."""
    return record_run(runs_dir, "old", snapshots_of_training())


def test_a_consumer_started_first_waits_for_the_training(
    runs_dir: Path, old: Path, tmp_path: Path, command: Start
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    consumer = command("consumer", "--callbacks", "speed,lr")
    assert consumer.says() == (
        f"waiting for a run in the folder {runs_dir} ... (Ctrl-C ends); the newest there is old (finished): "
        f"this command with '--last' or '--replay {old}' reads it"
    )
    first = command("trainer", "slow.py:task", cwd=tmp_path)
    wait_for((tmp_path / "loading").exists, "the task")
    first.process.send_signal(signal.SIGINT)
    assert first.ends() == (130, ["interrupted before the training began"])
    assert [path.name for path in runs_dir.iterdir()] == ["old"]

    second = command("trainer", "digits", "--max-duration", "3ba")
    assert second.ends()[0] == 0
    code, lines = consumer.ends()
    newest = list_runs()[0].name
    assert (code, lines[-1]) == (0, f"run {newest} finished: 5 events handled")
    assert newest.startswith("digits-")


def test_ctrl_c_ends_the_wait_with_one_line(runs_dir: Path, command: Start) -> None:
    consumer = command("consumer")
    assert consumer.says() == f"waiting for a run in the folder {runs_dir} ... (Ctrl-C ends)"
    consumer.process.send_signal(signal.SIGINT)
    assert consumer.ends() == (130, ["detached before there was a run"])


@pytest.mark.parametrize("script", ["train.py", "pack/train.py", "pack/__main__.py"])
def test_a_module_that_is_executed_again_is_found(runs_dir: Path, tmp_path: Path, command: Start, script: str) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / script).write_text(IMPORTING)
    (tmp_path / "there").touch()
    module = script.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
    assert command("python", "-m", module, "there", "old", cwd=tmp_path).ends() == (0, [])
    again = command("python", "-m", module, "loaded", "old", cwd=tmp_path)
    wait_for(lambda: find_restart(find_run("old"), list_runs()) == again.process.pid, "the restart")
    (tmp_path / "loaded").touch()
    assert again.ends() == (0, [])
    assert find_restart(find_run("old"), list_runs()) is None


IMPORTING = """
import sys, time
from pathlib import Path
from offloop.bus import Event, Publisher

while not Path(sys.argv[1]).exists():
    time.sleep(0.05)
with Publisher(sys.argv[2], resume=True) as publisher:
    publisher.publish(Event.BATCH_END, batch=1, loss=1.0)
"""
"""A training that takes as long to load as the test wants."""


@pytest.mark.parametrize("begun", ["old", "other"])
def test_a_consumer_of_a_run_that_is_started_again_waits_for_its_next_attempt(
    runs_dir: Path, tmp_path: Path, command: Start, begun: str
) -> None:
    (tmp_path / "train.py").write_text(IMPORTING)
    (tmp_path / "there").touch()
    assert command("python", "train.py", "there", "old", cwd=tmp_path).ends() == (0, [])
    # Not for the same script elsewhere.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "train.py").write_text(IMPORTING)
    command("python", "train.py", "loaded", "old", cwd=tmp_path / "elsewhere")
    code, said = command("consumer", "--run", "old", "--callbacks", "metrics").ends()
    assert (code, [line for line in said if "waiting" in line]) == (0, [])

    again = command("python", "train.py", "loaded", begun, "--resume", cwd=tmp_path)
    consumer = command("consumer", "--run", "old", "--callbacks", "metrics", "--log", "jsonl")
    assert consumer.says() == (
        f"run old has ended (finished), and process {again.process.pid} starts its script again: waiting up to 60 s "
        f"for its next attempt ... (Ctrl-C ends; '--replay {runs_dir}/old' reads the attempt before)"
    )
    (tmp_path / "loaded").touch()
    assert consumer.ends()[0] == 0
    read = "metrics-2.jsonl" if begun == "old" else "metrics.jsonl"
    assert [one.name for one in (runs_dir / "old").glob("*.jsonl")] == [read]
