"""The process that measures a broker's host."""

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from offloop.bus.files import open_file
from offloop.bus.processes import let_go, start_module

_AGAIN_SECONDS = 10.0


class HealthProcess:
    """Starts the process that measures this host while a consumer requests it. It ends with the demand or the run."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._process: subprocess.Popen[bytes] | None = None
        self._again_at = 0.0

    def tend(self, is_requested: bool) -> None:
        """Start the process if it is requested and does not run; after a failure only some seconds later."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._process = None
            self._again_at = time.monotonic() + _AGAIN_SECONDS if code else 0.0
        if is_requested and self._process is None and time.monotonic() >= self._again_at:
            with suppress(OSError):  # again the next time
                log = open_file(self._run / "broker.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                with open(log, "ab") as errors:
                    arguments = ("offloop.bus.hosts.health", str(self._run))
                    self._process = start_module(*arguments, stdout=subprocess.DEVNULL, stderr=errors)

    def leave(self) -> None:
        """Leave the process: it ends when the broker's has."""
        if self._process is not None:
            let_go(self._process)
