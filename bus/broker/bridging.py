"""Bridge of a broker's run: the process that copies it into NATS JetStream."""

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from offloop.bus.files import open_file
from offloop.bus.processes import let_go, start_module
from offloop.bus.runs.bridged import how_to_send, read_bridge

_AGAIN_SECONDS = 2.0
_REPORT_SECONDS = 5.0
"""How long a bridge may wait for servers before the training reports it: electing a new leader takes them a while."""


class BridgeProcess:
    """Starts a run's bridge in its own session, so that it outlives the broker, and again if it was killed.

    A bridge that failed has recorded the reason, and is not started again."""

    def __init__(self, run: Path, stream: str) -> None:
        self._run = run
        self._stream = stream
        self._process: subprocess.Popen[bytes] | None = None
        self._again_at = 0.0
        self._look_at = time.monotonic() + _REPORT_SECONDS
        self._had_trouble = self._has_reported = False

    def tend(self) -> None:
        if self._process is not None:
            code = self._process.poll()
            if code is None or code > 0 or time.monotonic() < self._again_at:
                return
            self._process = None
        if (known := read_bridge(self._run)) is None or not known.is_running:
            with suppress(OSError):  # again the next time
                self._process = self._start()
                self._again_at = time.monotonic() + _AGAIN_SECONDS

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

    def _start(self) -> "subprocess.Popen[bytes]":
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        command = ("server", "bridge", str(self._run), "--stream", self._stream)
        with open(open_file(self._run / "bridge.log", flags), "ab") as log:
            return start_module("offloop.bus", *command, stdout=subprocess.DEVNULL, stderr=log)

    def leave(self) -> None:
        """Let it copy the rest by itself."""
        if self._process is not None:
            let_go(self._process)
