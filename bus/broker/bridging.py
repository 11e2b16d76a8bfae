"""The bridges of a broker's runs: processes that copy them into NATS JetStream."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from offloop.bus.files import open_file
from offloop.bus.processes import python_path
from offloop.bus.runs.bridged import how_to_send, read_bridge

_AGAIN_SECONDS = 2.0
_REPORT_SECONDS = 5.0
"""How long a bridge may wait for servers before the training reports it: they need some to choose another leader."""


class _Begun(NamedTuple):
    """A bridge that was started, for which attempt, and when by ``time.monotonic``."""

    attempt: int
    at: float
    process: "subprocess.Popen[bytes]"


class _Look(NamedTuple):
    """When it is looked whether a bridge copies, by ``time.monotonic``, and whether it did not the time before."""

    at: float
    has_trouble: bool


class Bridges:
    """Starts a bridge for each run, in a session of its own, so that it copies the rest when the broker has ended; and
    again when it was killed, or ended before the run. One that failed has written down why, and is left so until the
    next attempt."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._begun: dict[Path, _Begun] = {}
        self._looks: dict[Path, _Look] = {}

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

    def report(self, live: Mapping[Path, int]) -> dict[Path, str]:
        """What is to be said to the publishers of runs, once for each: why nothing of it is copied.

        Args:
            live: the attempts of the live runs, by the runs' directories.
        """
        now, reports = time.monotonic(), {}
        self._looks = {path: self._looks.get(path, _Look(now + _REPORT_SECONDS, has_trouble=False)) for path in live}
        for path, look in self._looks.items():
            if now < look.at:
                continue
            bridge = read_bridge(path)
            has_trouble = bridge is None or bridge.state not in ("copying", "done")
            at = now + _REPORT_SECONDS
            if has_trouble and look.has_trouble:
                why = "see bridge.log in its folder" if bridge is None else bridge.reason or bridge.state
                reports[path] = (
                    f"it is not copied to NATS at {self._stream} at the moment ({why}); if its bridge ends before all "
                    f"is there, {how_to_send(path, self._stream)}"
                )
                at = math.inf
            self._looks[path] = _Look(at, has_trouble)
        return reports

    def _start(self, path: Path) -> "subprocess.Popen[bytes]":
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with open(open_file(path / "bridge.log", flags), "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "offloop.bus", "server", "bridge", str(path), "--stream", self._stream],
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
