"""Stacks of a running process on request, whatever it does, and never at the cost of the process."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import wait_for

from offloop.bus import find_run
from offloop.bus.broker.stacks import Frame, place_of, verdict_of
from offloop.bus.runs.flight import STACKS, list_dumps, read_verdict
from offloop.bus.subscriber.commands import send_command
from offloop.bus.types.commands import Outcome

BEGIN = """
import os, signal, sys, threading, time
from offloop.bus import Publisher

def main():
"""


@pytest.fixture
def start(runs_dir: Path, tmp_path: Path) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Starts a program ``main.py`` with these lines of its ``main()``, and waits until it has printed a line."""
    started: list[subprocess.Popen[str]] = []

    def start(lines: str) -> "subprocess.Popen[str]":
        script = tmp_path / "main.py"
        script.write_text(BEGIN + "".join(f"    {line}\n" for line in lines.splitlines()) + "\nmain()\n")
        started.append(subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, process_group=0))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "begun\n"
        return started[-1]

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ask() -> Outcome:
    return send_command(find_run("r"), "stacks", reason="why")


def test_a_process_that_never_releases_the_gil_shows_its_stack_again_and_again(
    start: Callable[[str], "subprocess.Popen[str]"], runs_dir: Path
) -> None:
    process = start(
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "publisher = Publisher('r')\n"
        "if not os.fork():\n    time.sleep(1000)\n"  # a forked worker changes nothing
        "print('begun', flush=True)\nsum(range(10**12))"
    )
    wait_for(lambda: "main.py:11" in str(ask()), "the loop")
    assert str(ask()).endswith(".txt: rank 0 is in main (main.py:11)")
    second = list_dumps(runs_dir / "r", STACKS)[-1]
    assert read_verdict(second) == "rank 0 is in main (main.py:11)"
    text = second.read_text()
    assert "run r, attempt 1, " in text
    assert text.count("most recent call first") == 1, "the training's thread, and not its earlier stack"
    assert process.poll() is None


def test_a_signal_of_the_users_is_left_to_the_user(start: Callable[[str], "subprocess.Popen[str]"]) -> None:
    process = start(
        "signal.signal(signal.SIGRTMIN + 10, lambda *_: print('mine', flush=True))\n"
        "publisher = Publisher('r')\nprint('begun', flush=True)\ntime.sleep(2)\n"
        "os.kill(os.getpid(), signal.SIGRTMIN + 10)\ntime.sleep(1000)"
    )
    assert str(ask().done).startswith("stacks-1-1.txt: rank 0 is in main (main.py:")
    assert process.stdout is not None
    assert process.stdout.readline() == "mine\n"


@pytest.mark.parametrize(
    "lines",
    [
        "os.execvp('sh', ['sh', '-c', 'echo done; exec sleep 1000'])",
        "import faulthandler\nfor one in range(signal.SIGRTMIN, signal.SIGRTMAX): faulthandler.unregister(one)\n"
        "print('done', flush=True)\ntime.sleep(1000)",
    ],
)
def test_a_process_that_handles_the_signal_no_more_is_not_ended_by_it(
    lines: str, start: Callable[[str], "subprocess.Popen[str]"]
) -> None:
    process = start(f"publisher = Publisher('r')\nprint('begun', flush=True)\ntime.sleep(0.2)\n{lines}")
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    assert ask().done == "stacks-1-1.txt: rank 0 has no stacks that this broker can read"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)


SITE = "/venv/lib/python3/site-packages/torch/"
BACKWARD = [
    Frame(SITE + "autograd/graph.py", "9", "_engine_run_backward"),
    Frame(SITE + "autograd/__init__.py", "8", "backward"),
    Frame(SITE + "_tensor.py", "7", "backward"),
    Frame("/home/me/train.py", "6", "train_step"),
]
COLLECTIVE = [
    Frame("/usr/lib/selectors.py", "9", "select"),
    Frame(SITE + "distributed/distributed_c10d.py", "8", "_object_to_tensor"),
    Frame(SITE + "distributed/distributed_c10d.py", "7", "all_gather_object"),
    Frame(SITE + "distributed/c10d_logger.py", "6", "wrapper"),
    Frame("/home/me/train.py", "5", "train_step"),
]


def test_a_place_is_the_open_collective_or_what_the_users_code_called() -> None:
    assert place_of(BACKWARD) == "is in backward (train.py:6 in train_step)"
    assert place_of(COLLECTIVE[1:]) == "waits in all_gather_object (train.py:5 in train_step)"
    assert place_of(BACKWARD[:2]) == "is in _engine_run_backward (__init__.py:8 in backward)"


def test_ranks_at_one_place_are_named_together_the_most_first() -> None:
    places = dict.fromkeys(range(16), "waits in all_reduce (train.py:40 in train_step)")
    places[12] = "is in __next__ (data.py:17)"
    assert verdict_of(places) == (
        "ranks 0-11, 13-15 wait in all_reduce (train.py:40 in train_step); rank 12 is in __next__ (data.py:17)"
    )
    everywhere = verdict_of({rank: f"is in f (a.py:{rank // 2})" for rank in range(20)})
    assert everywhere.endswith("; ranks 10-11 are in f (a.py:5); 8 ranks are at 4 other places")
