"""The bridges of a broker's runs: processes that copy them into NATS JetStream."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bus.files import open_file
from bus.processes import python_path
from bus.runs.bridged import read_bridge

_AGAIN_SECONDS = 2.0


class _Begun(NamedTuple):
    """A bridge that was started, for which attempt, and when by ``time.monotonic``."""

    attempt: int
    at: float
    process: "subprocess.Popen[bytes]"


class Bridges:
    """Starts a bridge for each run, in a session of its own, so that it copies the rest when the broker has ended; and
    again when it was killed, or ended before the run. One that failed has written down why, and is left so until the
    next attempt."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._begun: dict[Path, _Begun] = {}

    def look(self, live: Mapping[Path, int]) -> None:
        """Starts the bridges that are missing, and reaps those that have ended.

        Args:
            live: the attempts of the live runs, by the runs' directories.
        """
        now = time.monotonic()
        for path, begun in list(self._begun.items()):
            code = begun.process.poll()
            has_failed = code is not None and code > 0 and live.get(path) == begun.attempt
            if code is not None and not has_failed and now >= begun.at + _AGAIN_SECONDS:
                del self._begun[path]
        for path, attempt in live.items():
            if path in self._begun or ((known := read_bridge(path)) is not None and known.is_running):
                continue
            with suppress(OSError):  # again at the next look
                self._begun[path] = _Begun(attempt, now, self._start(path))

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
        for begun in self._begun.values():
            # A return code keeps Popen from warning about it.
            begun.process.returncode = begun.process.poll() or 0
        self._begun.clear()
