"""The commands: what they have in common, and that Ctrl-C ends each of them whenever it comes."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from offloop import commands
from offloop.bus.cli.main import bus
from offloop.consumers.cli.main import consumer
from offloop.trainer.cli.main import trainer
from offloop.trainer.tasks import find_task

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


def options_of(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Option]]:
    own = {one.name for one in find_task(path[-1]).options} if path[:-1] == ("train",) else set()
    for option in command.params:
        if isinstance(option, click.Option) and option.name not in own:
            yield " ".join(path), option
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from options_of(below, (*path, name))


DIFFERING = {
    # An output file, or the settings of callbacks and algorithms, as pytest has it. Convert needs a file to be named.
    "-o",
    "--output",
    # Callbacks replay as fast as they can, a recording is served as it was.
    "--rate",
    # Servers have ports of their own.
    "--listen",
    # The variable of a training on a cluster must not keep readers from the runs of their folder.
    "--stream",
    # The events of a part of a recording; a flag of compare.
    "--events",
}
"""The names of options that differ between commands."""


def test_an_option_that_several_commands_have_has_one_help_and_one_default() -> None:
    meanings: dict[str, dict[tuple[object, ...], list[str]]] = {}
    for command, option in options_of(bus):
        # Without one it is described as None, whether that was said or not.
        default = str(option.to_info_dict()["default"])
        meaning = (option.help, default, option.multiple, option.is_flag, option.envvar)
        for name in (*option.opts, *option.secondary_opts):
            meanings.setdefault(name, {}).setdefault(meaning, []).append(command)
    assert {name for name, commands in meanings.items() if len(commands) > 1} <= DIFFERING, meanings
    assert {"--run-name", "--runs-dir", "--start", "--wait"} <= meanings.keys()


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
import signal, time
import click
from offloop.bus.terminal import run_command

class Forgotten:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

@click.command()
def command():
    Forgotten()
    time.sleep(60)
    print("went on")

run_command(command)
"""


def test_ctrl_c_where_nothing_can_be_raised_ends_a_command() -> None:
    # As in the callbacks of the import system, in which one in some forty came.
    done = subprocess.run([sys.executable, "-c", FORGETTING], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert "interrupted" in done.stderr
    assert "ignored" not in done.stderr
