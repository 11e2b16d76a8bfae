"""The bridges of a broker's runs: processes that copy them into NATS JetStream."""

import os
import subprocess
import sys
import time
from pathlib import Path

from bus.files import open_file
from bus.processes import python_path
from bus.runs.bridged import read_bridge

_AGAIN_SECONDS = 2.0


class Bridges:
    """Starts a bridge for each run, in a session of its own, so that it copies the rest when the broker has ended; and
    again when it was killed. One that ended by itself has written down why."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._begun: dict[Path, tuple[float, subprocess.Popen[bytes]]] = {}

    def look(self, path: Path) -> None:
        """Starts the bridge of the run in a directory, unless there is one."""
        now = time.monotonic()
        began, process = self._begun.get(path, (0.0, None))
        if process is not None and ((code := process.poll()) is None or code >= 0 or now < began + _AGAIN_SECONDS):
            return
        known = read_bridge(path)
        if known is None or not known.is_running:
            try:
                self._begun[path] = now, self._start(path)
            except OSError:
                return  # at the next look

    def _start(self, path: Path) -> "subprocess.Popen[bytes]":
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with open(open_file(path / "bridge.log", flags), "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "bus", "bridge", str(path), "--stream", self._stream],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": python_path()},
            )

    def leave(self) -> None:
        """Lets them copy the rest by themselves."""
        for _, process in self._begun.values():
            # A return code keeps Popen from warning about it.
            process.returncode = process.poll() or 0
        self._begun.clear()
