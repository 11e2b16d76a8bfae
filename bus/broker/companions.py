"""Processes that a broker starts beside itself: the bridge of its run, and the measurement of its host."""

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from offloop.bus.files import open_file
from offloop.bus.processes import let_go, start_module
from offloop.bus.runs.bridged import how_to_send, read_bridge

_BRIDGE_AGAIN_SECONDS = 2.0
_HEALTH_AGAIN_SECONDS = 10.0
_REPORT_SECONDS = 5.0
"""How long a bridge may wait for servers before the training reports it: electing a new leader takes them a while."""


class _Companion:
    def __init__(self, run: Path) -> None:
        self._run = run
        self._process: subprocess.Popen[bytes] | None = None
        self._again_at = 0.0

    def _start(self, log: str, *command: str) -> None:
        with open(open_file(self._run / log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as errors:
            self._process = start_module(*command, stdout=subprocess.DEVNULL, stderr=errors)

    def leave(self) -> None:
        """Let it end by itself."""
        if self._process is not None:
            let_go(self._process)


class HealthProcess(_Companion):
    """Starts the process that measures this host while a consumer requests it. It ends with the demand or the run."""

    def tend(self, is_requested: bool) -> None:
        """Start the process if it is requested and does not run; after a failure only some seconds later."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._process = None
            self._again_at = time.monotonic() + _HEALTH_AGAIN_SECONDS if code else 0.0
        if is_requested and self._process is None and time.monotonic() >= self._again_at:
            with suppress(OSError):  # again the next time
                self._start("broker.log", "offloop.bus.hosts.health", str(self._run))


class BridgeProcess(_Companion):
    """Starts a run's bridge in its own session, so that it outlives the broker, and again if it was killed.

    A bridge that failed has recorded the reason, and is not started again."""

    def __init__(self, run: Path, stream: str) -> None:
        super().__init__(run)
        self._stream = stream
        self._look_at = time.monotonic() + _REPORT_SECONDS
        self._had_trouble = self._has_reported = False

    def tend(self) -> None:
        """Start the bridge if none runs; one that was killed only some seconds later."""
        if self._process is not None:
            code = self._process.poll()
            if code is None or code > 0 or time.monotonic() < self._again_at:
                return
            self._process = None
        if (known := read_bridge(self._run)) is None or not known.is_running:
            with suppress(OSError):  # again the next time
                command = ("server", "bridge", str(self._run), "--stream", self._stream)
                self._start("bridge.log", "offloop.bus", *command)
                self._again_at = time.monotonic() + _BRIDGE_AGAIN_SECONDS

    def report(self) -> str | None:
        """Return why the run is not copied, for its publishers; once."""
        now = time.monotonic()
        if now < self._look_at or self._has_reported:
            return None
        self._look_at = now + _REPORT_SECONDS
        bridge = read_bridge(self._run)
        had_trouble, self._had_trouble = self._had_trouble, bridge is None or bridge.state not in ("copying", "done")
        if not (had_trouble and self._had_trouble):
            return None
        self._has_reported = True
        why = "see bridge.log in its folder" if bridge is None else bridge.reason or bridge.state
        return (
            f"it is not copied to NATS at {self._stream} at the moment ({why}); if its bridge ends before it is "
            f"complete there, {how_to_send(self._run, self._stream)}"
        )
