"""Trainers that are killed, fail, fork or end without a word: the record is whole, and all are told. How soon,
``benchmarks/faults.py`` measures."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults import Follower, Training, assert_complete, numbers_in, read_recording
from helpers import wait_for

from offloop.bus import Recording, Subscriber, find_run

TOLD_SECONDS = 50.0
"""Without a watch on processes it would take a minute, whatever the machine is busy with."""
DIED = "lost: the trainer's process died"


def run_script(script: str, *arguments: object, timeout: float = 100) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 21))])
def test_a_killed_trainer_is_recorded_and_reported_to_consumers(runs_dir: Path, seed: int) -> None:
    with Training(runs_dir) as training, Follower(runs_dir) as follower:
        training.await_recorded(100)
        # The moment is the fault itself: nothing is waited for with it.
        time.sleep(random.Random(seed).uniform(0, 0.5))
        training.kill()
        told = follower.result(TOLD_SECONDS)
    # The last one may have been sent and not noted yet.
    assert training.acknowledged <= len(told["numbers"]) <= training.published + 1
    assert_complete(told, len(told["numbers"]), DIED)
    wait_for(lambda: not find_run("r").live, "the broker to end")
    read_recording(runs_dir / "r", len(told["numbers"]), DIED)
    assert find_run("r").status == "lost"


def test_a_trainer_killed_together_with_its_broker_is_lost(runs_dir: Path) -> None:
    with Training(runs_dir) as training, Follower(runs_dir) as follower:
        training.await_recorded(500)
        # One that stands still starts no other broker.
        training.signal(signal.SIGSTOP)
        os.kill(training.broker_pid, signal.SIGKILL)
        training.kill()
        told = follower.result(TOLD_SECONDS)
    assert str(told["ending"]) == "lost: the broker ended before the run did"
    assert told["gaps"] == []
    kept = list(numbers_in(iter(Recording(runs_dir / "r"))))
    assert kept == list(range(1, len(kept) + 1))
    assert training.acknowledged <= len(kept) <= len(told["numbers"]) <= training.published + 1
    assert find_run("r").status == "lost"


def test_a_surviving_fork_does_not_keep_a_killed_run_live(runs_dir: Path) -> None:
    script = """
import os, time
from offloop.bus import Event, Publisher
publisher = Publisher("r")
publisher.publish(Event.EPOCH_START, note="parent")
while publisher.statistics().acknowledged < 1:
    publisher.poll()
child = os.fork()
if child == 0:
    os.close(1)
    try:
        publisher.publish(Event.EPOCH_END, note="child")
    finally:
        time.sleep(60)
        os._exit(0)
print(child, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        with Subscriber("r") as follower:
            parent.kill()
            assert [snapshot.note for snapshot in follower] == ["parent"]
            assert str(follower.ending) == DIED
        wait_for(lambda: not find_run("r").live, "the broker to give the run back")
        assert find_run("r").status == "lost"
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        parent.communicate()


LOADS_FOR_LONG = """
import pathlib, time
pathlib.Path("loading").touch()
try:
    time.sleep(600)
except BaseException as error:
    raise ImportError("cannot load module more than once per process") from error
"""
"""Of what is raised then it makes another error, as numpy does."""


def test_a_training_interrupted_while_its_task_loads_leaves_no_run(runs_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(LOADS_FOR_LONG)
    command = [sys.executable, "-m", "offloop.trainer", "slow.py:task"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as trainer:
        wait_for((tmp_path / "loading").exists, "the task")
        trainer.send_signal(signal.SIGINT)
        _, errors = trainer.communicate(timeout=100)
    assert (trainer.returncode, errors) == (130, "interrupted before the training began\n")
    assert not list(runs_dir.iterdir())


CLOSED_ANYWHERE = """
import itertools, json, os, signal, sys
from offloop import bus
from offloop.bus import ClosedError, Event, Publisher

def close_at_line(number):
    publisher = Publisher(f"r{number}")
    signal.signal(signal.SIGUSR1, lambda *_: publisher.close())
    for batch in range(1, 4):
        publisher.publish(Event.EPOCH_END, batch=batch)
    lines = 0
    raised = None

    def trace(frame, event, argument):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(os.path.dirname(bus.__file__)):
            return None
        if event == "line":
            lines += 1
            if lines == number:
                signal.raise_signal(signal.SIGUSR1)
        return trace

    sys.settrace(trace)
    try:
        publisher.publish(Event.EPOCH_END, batch=4)
    except Exception as error:
        raised = type(error).__name__
    finally:
        sys.settrace(None)
    publisher.close()
    return lines >= number, raised

raised = {}
for number in itertools.count(1, int(sys.argv[1])):
    reached, raised[f"r{number}"] = close_at_line(number)
    if not reached:
        break
print(json.dumps(raised))
"""


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.soak)])
def test_a_signal_handler_may_close_at_any_line_of_publish(runs_dir: Path, every: int) -> None:
    done = run_script(CLOSED_ANYWHERE, every, timeout=300)
    assert done.returncode == 0, done.stderr
    raised = json.loads(done.stdout)
    assert len(raised) > 30 / every
    wrong = {}
    for name, error in raised.items():
        recording = Recording(runs_dir / name)
        batches = [int(snapshot.timestamp.batch) for snapshot in recording]
        came = batches, str(recording.ending), recording.gaps
        if (
            error not in (None, "ClosedError")
            or batches not in ([1, 2, 3], [1, 2, 3, 4])
            or came[1:] != ("finished", ())
        ):
            wrong[name] = (error, *came)
    assert wrong == {}
    assert done.stderr == ""
