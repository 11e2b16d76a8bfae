"""Sends a recording to wandb or MLflow, as a consumer that keeps its progress, in a process that a test starts:
``python logger_job.py RECORDING LOGGER TARGET BATCH``. It kills itself at ``BATCH``."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from helpers import wait_for

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.recording import Recording
from offloop.consumers import Callback, Logger
from offloop.consumers.api.logger import LoggerDestination, Row
from offloop.consumers.delivery.spool import wrap_in_spool
from offloop.consumers.loggers.mlflow import MLFlowLogger
from offloop.consumers.loggers.wandb import WandBLogger
from offloop.consumers.runner.runner import Runner
from offloop.consumers.runner.state_file import StateFile

COMMIT_EVERY = 5


class Losses(Callback):
    """Logs every loss, and kills the process when the destination has taken most of what it may be given."""

    def __init__(self, taken: list[Row], last: int) -> None:
        self._taken = taken
        self._last = last

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        batch = state.timestamp.values[2]
        logger.log_metrics({"loss": state.loss})
        if batch == self._last:
            wait_for(lambda: len(self._taken) > batch - 2 * COMMIT_EVERY, "rows at the destination")
            os.kill(os.getpid(), signal.SIGKILL)


def destination_of(logger: str, target: str) -> LoggerDestination:
    if logger == "mlflow":
        return MLFlowLogger(tracking_uri=target)
    return WandBLogger(mode="offline", dir=Path(target))


def send(path: str, logger: str, target: str, last: str = "0") -> None:
    """Sends a recording, and kills its own process at batch ``last``."""
    recording = Recording(Path(path))
    destination = destination_of(logger, target)
    taken: list[Row] = []
    log_rows = destination.log_rows

    def log_and_count(rows: Sequence[Row], state: Snapshot) -> None:
        log_rows(rows, state)
        taken.extend(rows)

    destination.log_rows = log_and_count  # type: ignore[method-assign]
    callback = Losses(taken, int(last))
    place = recording.path.parent / "consumers"
    with StateFile(place, "sender", recording.run_name, recording.attempt) as progress:
        Runner(recording, [callback], [wrap_in_spool(destination)], progress=progress, commit_every=COMMIT_EVERY).run()


def send_with_a_kill(recording: Path, logger: str, target: str) -> None:
    """Sends in a process that kills itself when two thirds are sent, and goes on in this one."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, __file__, str(recording), logger, target, "40"]
    assert subprocess.run(command, env=environment).returncode == -signal.SIGKILL
    send(str(recording), logger, target)


if __name__ == "__main__":
    send(*sys.argv[1:])
