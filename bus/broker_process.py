"""The broker that a publisher starts for itself: ``python -m bus.broker_process RUNS_DIR RUN_NAME``.

It locks the run's directory, listens inside it, says so in one line of JSON on standard output, and serves until the
run is over. It has no terminal: what it has to say later goes into ``broker.log`` in the run's directory."""

import contextlib
import json
import logging
import os
import signal
import sys
from pathlib import Path

from bus.broker import Broker
from bus.errors import OffloopError
from bus.runs import SOCKET_FILES, RunDirectory, socket_address


def main() -> None:
    """Runs the broker of one run; see the module's text."""
    root, name = Path(sys.argv[1]), sys.argv[2]
    directory = None
    try:
        directory = RunDirectory(root, name)
        door, stream = (socket_address(directory.path / name) for name in SOCKET_FILES)
        broker = Broker(door, stream, root, directory=directory, until_over=True)
    except OffloopError as error:
        if directory is not None:
            directory.release()
        _say({"error": type(error).__name__, "message": str(error)})
        sys.exit(1)
    log = _LogFile(directory.path / "broker.log", delay=True)
    log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("offloop").addHandler(log)
    signal.signal(signal.SIGTERM, lambda *_: broker.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _say({"ready": door})
    broker.serve()


class _LogFile(logging.FileHandler):
    """A log that cannot be written is no reason to end: the broker has nobody else to tell."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            super().emit(record)


def _say(answer: dict[str, str]) -> None:
    print(json.dumps(answer), flush=True)
    # Nothing may be kept waiting for the end of our output.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
