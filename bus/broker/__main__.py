"""Broker process of a publisher: ``python -m offloop.bus.broker new|begin|resume RUNS_DIR RUN_NAME [VALUE]``.

It locks the run's directory, listens there, prints one line of JSON, and serves until the run has ended. ``begin``
serves the run of that name; VALUE is the identity of a new one. ``new`` serves a new run, with a number after the name
if that is taken; VALUE is the launch that is repeated. ``resume`` continues the newest attempt, whose broker has died.
Later messages go into ``broker.log`` in the run's directory."""

import contextlib
import json
import logging
import os
import signal
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from offloop.bus.broker.broker import Broker
from offloop.bus.errors import BrokerError, OffloopError
from offloop.bus.files import open_file
from offloop.bus.net.nats_addresses import STREAM_VARIABLE
from offloop.bus.processes import wait_for_free_core
from offloop.bus.runs.directory import RUN_FILE
from offloop.bus.runs.writing import RunDirectory


def main() -> None:
    os.umask(0o077)
    wait_for_free_core()
    what, root, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    resumes = what == "resume"
    taken: dict[str, Any] = {}
    directory = None
    try:
        if resumes and not (root / name / RUN_FILE).exists():
            raise BrokerError(f"the directory of run {name!r} in {root} is gone")
        if what == "new":
            directory = RunDirectory.take_free(root, name, *sys.argv[4:5])
            taken = {"run": directory.name}
        else:
            directory = RunDirectory(root, name, *sys.argv[4:5])
        broker = Broker(directory, bridge_to=os.environ.get(STREAM_VARIABLE))
        log = _LogFile(directory.path / "broker.log", delay=True)
        log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger("offloop").addHandler(log)
        if resumes:
            broker.resume()
    except OffloopError as error:
        if directory is not None:
            directory.release()
        _say({"error": type(error).__name__, "message": str(error)})
        sys.exit(1)
    signal.signal(signal.SIGTERM, lambda *_: broker.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _say({"ready": broker.addresses[0], **taken})
    broker.serve()


class _LogFile(logging.FileHandler):
    """Log file whose write errors do not end the broker."""

    def _open(self) -> TextIOWrapper:
        return open(open_file(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a")

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: standard error is a pipe without a reader."""


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)
    # A process that reads our output to its end must not have to wait.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    if "ready" in answer:
        os.dup2(nowhere, sys.stderr.fileno())


if __name__ == "__main__":
    main()
