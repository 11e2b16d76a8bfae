"""A training run and, in another process, callbacks that watch it: `make demo`.

    python examples/demo.py
    python examples/demo.py --max-duration 3ep       # further options go to the trainer

Two programs run side by side, as they would in two terminals. The trainer does not know the consumer. It records
everything in any case, so the same callbacks can run over the recording afterwards.
"""

import contextlib
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

from offloop.bus.runs.directory import find_run, new_run_name

TRAINER = ["trainer", "digits", *(sys.argv[1:] or ["--max-duration", "20ep"])]
CONSUMER = ["consumer", "--callbacks", "speed,lr"]
COLOURS = {"trainer": "36", "consumer": "33"}
PATIENCE = 30.0  # seconds for a program that should exit


def main() -> int:
    """Run both programs to their end, and return the first exit code that is not 0."""
    run = new_run_name("digits")
    commands = {"trainer": [*TRAINER, "--run-name", run], "consumer": [*CONSUMER, "--run", run, "--wait"]}
    with contextlib.ExitStack() as processes:
        programs = {name: processes.enter_context(Program(name, command)) for name, command in commands.items()}
        trained = programs["trainer"].wait()
        # A trainer that failed may have left no run, so the consumer could wait forever.
        watched = programs["consumer"].wait(PATIENCE if trained == 0 else PATIENCE / 10)
    if trained == watched == 0:
        print_what_next(run)
    return trained or watched


class Program:
    """A process whose output is shown after its name; ended with the ``with`` block."""

    def __init__(self, name: str, command: list[str]) -> None:
        self._name = name
        self._show(f"$ {shlex.join(command)}")
        self._process = subprocess.Popen(
            [installed(command[0]), *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        self._reader = threading.Thread(target=self._show_lines)
        self._reader.start()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. A program that runs longer is ended, and counts as failed."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._show(f"still running after {timeout:g} s: ended by the demo")
            self._process.terminate()
            return self._process.wait() or 1

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, reason: type[BaseException] | None, *_: object) -> None:
        # Ctrl-C in a terminal reaches all three processes.
        if reason is not KeyboardInterrupt and self._process.poll() is None:
            self._process.terminate()
        self.wait(PATIENCE)
        self._reader.join()

    def _show_lines(self) -> None:
        assert self._process.stdout
        with self._process.stdout as lines:
            for line in lines:
                self._show(line.rstrip())

    def _show(self, line: str) -> None:
        prefix = f"{self._name:>8} |"
        if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
            prefix = f"\033[{COLOURS[self._name]}m{prefix}\033[0m"
        # One write for each line: two threads print.
        sys.stdout.write(f"{prefix} {line}\n")
        sys.stdout.flush()


def installed(command: str) -> str:
    """Return the command of this script's environment, activated or not."""
    return str(Path(sys.executable).with_name(command))


def print_what_next(run: str) -> None:
    info = find_run(run)
    commands, here = Path(sys.executable).parent, Path.cwd()
    where = commands.relative_to(here) if commands.is_relative_to(here) else commands
    print(
        f"\nEverything that happened is recorded in {info.recording}\n\n"
        "Try next:\n"
        f"  {where}/offloop ui {run}\n"
        f"  {where}/offloop show {run}\n"
        f"  {where}/consumer --replay {info.path} --callbacks speed,lr\n"
        f"  {where}/consumer --replay {info.path} --callbacks lr --log jsonl\n"
        f"  {where}/consumer --list"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
