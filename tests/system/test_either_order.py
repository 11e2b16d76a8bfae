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
    with contextlib.ExitStack() as started:

        def start(*arguments: str, cwd: Path | None = None) -> Command:
            one = Command(*arguments, cwd=cwd)
            started.enter_context(one.process)
            started.callback(one.process.kill)
            return one

        yield start


@pytest.fixture
def old(runs_dir: Path) -> Path:
    return record_run(runs_dir, "old", snapshots_of_training())


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


def test_a_consumer_started_first_waits_for_the_training(
    runs_dir: Path, old: Path, tmp_path: Path, command: Start
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    consumer = command("consumer", "--callbacks", "speed,lr")
    assert consumer.says().startswith(f"waiting for a run in the folder {runs_dir}")
    first = command("trainer", "slow.py:task", cwd=tmp_path)
    wait_for((tmp_path / "loading").exists, "the task")
    first.process.send_signal(signal.SIGINT)
    assert first.ends() == (130, ["interrupted before the training began"])
    assert [path.name for path in runs_dir.iterdir()] == ["old"]

    (tmp_path / "train.py").write_text(IMPORTING)
    (tmp_path / "there").touch()
    assert command("python", "train.py", "there", "new", cwd=tmp_path).ends() == (0, [])
    code, lines = consumer.ends()
    assert (code, lines[-1].partition(":")[0]) == (0, "run new finished")
