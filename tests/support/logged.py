"""What tests of destinations share: a callback that logs what its events say, and consumers that are killed."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from consumers_stream import record_run, snapshots_of_training

from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers import Callback, Logger, LoggerDestination, Runner
from offloop.consumers.runner.state_file import StateFile

KILLED = """
import os, signal
from offloop.consumers import Callback

class Losses(Callback):
    def __init__(self, last: int | None = None):
        self.last = last

    def batch_end(self, state, logger):
        batch = state.timestamp.values[2]
        logger.log_metrics({"loss": state.loss, f"since/{batch // 10 * 10}": 1.0 / batch})
        if batch == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
"""


class LogsWhatItSees(Callback):
    """Logs what a snapshot has in its fields ``rows`` (a list of step and metrics), ``hyperparameters``, and
    ``images``, ``table``, ``text`` (arguments of the logger's methods)."""

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        fields = state.fields
        for step, metrics in fields.get("rows", []):
            logger.log_metrics(metrics, step)
        if "hyperparameters" in fields:
            logger.log_hyperparameters(fields["hyperparameters"])
        if "images" in fields:
            logger.log_images(**fields["images"])
        if "table" in fields:
            logger.log_table(**fields["table"])
        if "text" in fields:
            logger.log_text(**fields["text"])


class Photographer(LoggerDestination):
    """Copies the directory whenever it is asked for anything: each copy is what ``kill -9`` at that moment leaves."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.copies: list[Path] = []
        self.open_for_copies = True

    def shoot(self) -> None:
        if self.open_for_copies:
            self.copies.append(self.directory.with_name(f"{self.directory.name}-{len(self.copies)}"))
            shutil.copytree(self.directory, self.copies[-1])

    def log_rows(self, rows: Any, state: Snapshot) -> None:
        self.shoot()

    def state_dict(self) -> dict[str, Any]:
        self.shoot()
        return {}

    def close(self) -> None:
        self.shoot()


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below the directory, by its path there."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def goes_on_after_every_kill(
    stream: Sequence[Snapshot], make: Callable[[Path], LoggerDestination], directory: Path, commit_every: int
) -> None:
    """Runs a destination that writes below the directory it is made with; kills it at every moment; and finds that each
    time the consumer that goes on leaves the same files, byte for byte."""

    def run(place: Path, photographer: Photographer) -> None:
        with StateFile(place / "state", "mine", "run", 1) as progress:
            destinations = [make(place / "logged"), photographer]
            Runner(stream, [LogsWhatItSees()], destinations, progress=progress, commit_every=commit_every).run()

    undisturbed = directory / "undisturbed"
    undisturbed.mkdir(parents=True)
    photographer = Photographer(undisturbed)
    run(undisturbed, photographer)
    photographer.open_for_copies = False
    assert len(photographer.copies) > len(stream)
    for copy in photographer.copies:
        run(copy, photographer)
        assert contents(copy / "logged") == contents(undisturbed / "logged")


def run_killed_and_again(tmp_path: Path, logger: str, *options: str, batches: int = 60) -> Path:
    """Replays a recording into a logger with the command, which is killed twice on the way and goes on. Returns
    the run's directory."""
    directory = record_run(tmp_path, "run", snapshots_of_training(batches))
    (tmp_path / "killed.py").write_text(KILLED)
    words = ["--replay", str(directory), "--name", "mine", "--commit-every", "7", "--log", logger]
    words += [
        "--callbacks",
        f"{tmp_path / 'killed.py'}:Losses",
        *(word for option in options for word in ("-o", option)),
    ]
    for last in (batches // 3, batches - 3, None):
        killed = [] if last is None else ["-o", f"Losses.last={last}"]
        done = subprocess.run(
            [sys.executable, "-m", "offloop.consumers", *words, *killed], capture_output=True, timeout=100
        )
        expected = 0 if last is None else -signal.SIGKILL
        assert done.returncode == expected, done.stderr.decode()
    return directory
