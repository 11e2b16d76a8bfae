"""The commands are parts of one, and Ctrl-C ends each of them whenever it comes."""

import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from offloop import commands
from offloop.bus.cli.main import bus
from offloop.consumers.cli.main import consumer
from offloop.trainer.cli.main import trainer

INTERRUPTED = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    sum(range(10_000))
except BaseException:
    "Some modules catch everything while they are imported."
raise SystemExit("went on")
"""


def test_the_programs_are_parts_of_one_command() -> None:
    context = click.Context(bus)
    assert bus.get_command(context, "train") is trainer
    assert bus.get_command(context, "consume") is consumer
    assert bus.get_command(context, "run") is not None
    assert commands.bus is commands.offloop


def start(command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    code = f"import sys; sys.path.insert(0, sys.argv.pop()); from offloop.commands import {command}; {command}()"
    return subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["offloop", "trainer"])
def test_ctrl_c_while_a_command_is_imported_ends_it_at_once(command: str, tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text(INTERRUPTED)
    done = start(command, tmp_path)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_command_that_is_to_ignore_ctrl_c_does(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text(INTERRUPTED)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = start("bus", tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stderr) == (1, "went on\n")


FORGETTING = """
import signal, sys, threading, time
import click
from offloop.bus.terminal import run_command

class Busy(threading.Timer):
    started = 0

    def start(self):
        super().start()
        Busy.started += 1
        if Busy.started == 1:
            time.sleep(1)

if sys.argv[1:] == ["busy"]:
    threading.Timer = Busy
    sys.argv.pop()

class Forgotten:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

@click.command()
def command():
    Forgotten()
    time.sleep(600)
    print("went on")

run_command(command)
"""


@pytest.mark.parametrize("machine", [[], ["busy"]], ids=["idle", "busy"])
def test_ctrl_c_where_nothing_can_be_raised_ends_a_command(machine: list[str]) -> None:
    # As in the callbacks of the import system, in which one in some forty came.
    command = [sys.executable, "-c", FORGETTING, *machine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert "interrupted" in done.stderr
    assert "ignored" not in done.stderr
