"""The command ``offloop run``: run a script and attach offloop to its trainings."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import click

from offloop import startup
from offloop.automatic import ATTACHED, VARIABLE
from offloop.bus.cli.options import run_name_option, runs_dir_option
from offloop.bus.errors import ConfigurationError
from offloop.bus.printing import say
from offloop.bus.protocol.frames import check_run_name
from offloop.bus.terminal import CliCommand, handle_signals
from offloop.bus.types.disabled import VARIABLE as DISABLED
from offloop.bus.types.disabled import is_disabled
from offloop.consumers.cli.main import callbacks_option, loggers_option, settings_option
from offloop.consumers.cli.registry import create_selected

_OTHER_LOOPS = "'Attach' in the documentation shows the line for other loops"


@click.command(
    cls=CliCommand,
    short_help="Run a script as a run, without changing it.",
    context_settings={"allow_interspersed_args": False},
    frequent=("--run-name", "--callbacks", "--log", "-o"),
)
@run_name_option
@callbacks_option
@loggers_option
@settings_option
@runs_dir_option
@click.option("--no-console", is_flag=True, help="Do not keep what the trainings print.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND [ARGUMENT]...")
def run(
    command: tuple[str, ...],
    run_name: str | None,
    callbacks: list[str],
    loggers: list[str],
    options: tuple[str, ...],
    runs_dir: str | None,
    no_console: bool,
) -> int:
    """Run COMMAND, such as 'python train.py --lr 0.1', and publish each training in it as a run.

    The script stays unchanged. Works for the trainers of Lightning, Transformers and TRL, also under torchrun and
    accelerate launch. Callbacks run in their own process, as if given to the trainer. A script that attaches offloop
    itself is attached once.

    Exit code: the command's."""
    if run_name is not None:
        check_run_name(run_name)
    if is_disabled():
        say(f"offloop attaches to nothing: {DISABLED} is set", err=True)
        return _run(command, dict(os.environ))
    loggers = loggers if callbacks else []
    # Report mistakes before anything is started.
    made, destinations = create_selected(callbacks, loggers, options)
    for callback in made:
        if callback.owns_terminal:
            raise ConfigurationError(
                f"{type(callback).__name__} draws on the whole terminal, where the script writes: attach it with "
                "'consumer' in a second terminal"
            )
        callback.check()
    for destination in destinations:
        destination.check()
    # A script may change its folder.
    attach = {
        "run_name": run_name,
        "runs_dir": None if runs_dir is None else os.path.abspath(runs_dir),
        "capture_console": not no_console,
    }
    with tempfile.TemporaryDirectory(prefix="offloop-run-") as folder:
        shutil.copy(startup.__file__, Path(folder, "sitecustomize.py"))
        given = {"folder": folder, "callbacks": callbacks, "loggers": loggers, "settings": options, "options": attach}
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        code = _run(command, {**os.environ, VARIABLE: json.dumps(given), "PYTHONPATH": path})
        notes = Path(folder, startup.NOTES)
        reason = _why_nothing(notes.read_text().splitlines() if notes.exists() else [])
    if reason is not None:
        say(f"offloop attached to nothing: {reason}", err=True)
    return code


def _run(command: tuple[str, ...], environment: dict[str, str]) -> int:
    """Run the command, forward signals to it, and return its exit code.

    The terminal itself sends Ctrl-C to a foreground job."""
    is_in_foreground = _is_in_foreground()
    running: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def pass_on(number: int, _frame: Any) -> None:
        if number == signal.SIGINT and is_in_foreground:
            return
        if running:
            running[0].send_signal(number)
        else:
            early.append(number)

    try:
        # The command inherits ignored signals.
        with handle_signals(pass_on, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            running.append(subprocess.Popen(command, env=environment))
            for one in early:
                pass_on(one, None)
            code = running[0].wait()
    except FileNotFoundError:
        raise ConfigurationError(f"no command {command[0]!r}: {_how(command)}") from None
    except PermissionError:
        raise ConfigurationError(f"{command[0]} cannot be executed: {_how(command)}") from None
    return 128 - code if code < 0 else code


def _how(command: tuple[str, ...]) -> str:
    words = command if command[0].endswith(".py") else ["train.py"]
    return f"write 'offloop run -- python {shlex.join(words)}' for a script"


def _is_in_foreground() -> bool:
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _why_nothing(notes: list[str]) -> str | None:
    missing = {line.removeprefix("missing ") for line in notes if line.startswith("missing ")}
    loaded = sorted(set(notes) & set(startup.FRAMEWORKS.values()))
    if ATTACHED in notes:
        return None
    if missing:
        return f"it is not installed for {' and '.join(sorted(missing))}"
    if loaded:
        return f"{' and '.join(loaded)} was loaded, but no training has begun"
    if notes:
        return f"the command has used neither Lightning's Trainer nor Transformers'; {_OTHER_LOOPS}"
    return "the command has started no Python that reads PYTHONPATH ('python -I' and '-E' do not)"
