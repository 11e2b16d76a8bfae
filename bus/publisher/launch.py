"""The broker process that a publisher starts for its own run."""

import json
import logging
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

from offloop.bus import errors, processes
from offloop.bus.errors import BrokerError, OffloopError, RunDirectoryError, RunError, RunIsLiveError
from offloop.bus.net.nats_addresses import STREAM_VARIABLE
from offloop.bus.runs.bridged import how_to_send, read_bridge
from offloop.bus.runs.directory import read_run
from offloop.bus.types.timeouts import Timeouts

_log = logging.getLogger("offloop")

TEMPORARY = (RunDirectoryError, RunIsLiveError)
"""Errors of a broker that may pass: the disk is full or read-only, another process still holds the lock."""
RESTART_PAUSES = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)  # seconds before the next start, by the number of deaths in a row
STEADY_SECONDS = 10.0  # a broker that lived this long starts a new row of deaths
_COPY_POLL_SECONDS = 0.05


class BrokerProcess:
    """Process that serves one run. After a restart it resumes the attempt at the end of its recording.

    With ``is_new`` it takes the first free name. ``run_id`` is the identity of a new run. ``servers`` are the NATS
    servers that receive a copy. It raises the error that the process reported when it could not start."""

    def __init__(
        self,
        root: Path,
        name: str,
        timeouts: Timeouts,
        run_id: str | None = None,
        servers: str | None = None,
        *,
        is_new: bool = False,
    ) -> None:
        self._root = root
        self.name: str = name
        self._environment = {} if servers is None else {STREAM_VARIABLE: servers}
        self._timeouts = timeouts
        if is_new:
            what, *more = "new", *filter(None, [processes.restarted_launch()])
        else:
            what, *more = "begin", *filter(None, [run_id])
        try:
            self._process = self._spawn(what, *more)
        except OSError as error:
            raise BrokerError(
                f"the broker cannot be started: {error}; look at the limits of this process, 'ulimit -a'"
            ) from None
        self._began = time.monotonic()
        self._restarts = 0
        self._not_before = 0.0
        self.name = self._first_answer().get("run", name)

    def _spawn(self, what: str, *more: str) -> "subprocess.Popen[bytes]":
        arguments = what, str(self._root), self.name, *more
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return processes.start_module("offloop.bus.broker", *arguments, env=self._environment, **pipes)

    def _first_answer(self) -> dict[str, Any]:
        """Return the broker's first line. Raise the error that it names, or its last line on stderr."""
        process = self._process
        assert process.stdout is not None and process.stderr is not None  # noqa: PT018  they are pipes
        # select() refuses descriptors from 1024 on, and a training may have many files open.
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        try:
            line = process.stdout.readline() if poll.poll(1000 * self._timeouts.broker_start) else b""
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            process.kill()
            *_, why = ["it printed nothing", *process.stderr.read().decode(errors="replace").strip().splitlines()]
            self.kill()
            raise BrokerError(f"the broker did not start: {why}") from None
        except BaseException:
            self.kill()
            raise
        if "error" in answer:
            self.kill()
            raise error_by_name(answer["error"], answer["message"], self.name)
        self._close_pipes()
        return answer

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def ended(self) -> str | None:
        """How it ended; ``None`` while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    @property
    def has_finished(self) -> bool:
        """Its run has ended, and it exited normally."""
        return self._process.poll() == 0

    def refusal(self) -> OffloopError | None:
        """Return the error that a restarted broker reported before it exited, if any."""
        out = self._process.stdout
        if self._process.poll() is None or out is None or out.closed:
            return None
        try:
            # The process has exited, so the read does not wait.
            answer = json.loads(out.readline())
            return error_by_name(answer["error"], str(answer["message"]))
        except (ValueError, KeyError, TypeError):
            return None

    def restart(self) -> bool:
        """Start it again without waiting, unless it has died repeatedly just now; return whether it was started."""
        now = time.monotonic()
        if now < self._not_before:
            return False
        self._restarts = 1 if now - self._began > STEADY_SECONDS else self._restarts + 1
        self._not_before = now + RESTART_PAUSES[min(self._restarts, len(RESTART_PAUSES) - 1)]
        self._close_pipes()
        self._process = self._spawn("resume")
        self._began = now
        return True

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._close_pipes()

    def leave(self, seconds: float) -> None:
        """Wait that many seconds for the end of the recording; later it continues by itself."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            processes.let_go(self._process)
        self._close_pipes()
        servers = {**os.environ, **self._environment}.get(STREAM_VARIABLE)
        if servers:
            self._report_copy(servers)

    def _report_copy(self, servers: str) -> None:
        path, give_up = self._root / self.name, time.monotonic() + self._timeouts.copy
        try:
            attempt = read_run(path).last.number
        except OffloopError:
            return  # the unreadable run directory is reported elsewhere
        while True:
            bridge = read_bridge(path)
            if bridge is not None and not bridge.is_running and bridge.attempt not in (0, attempt):
                bridge = None  # the state of a bridge of an earlier attempt
            if bridge is not None and bridge.has_all(attempt):
                return
            copies = bridge is None or bridge.state == "copying" or not bridge.has_tried
            if not copies or time.monotonic() > give_up:
                break
            time.sleep(_COPY_POLL_SECONDS)
        why = "its bridge has not begun" if bridge is None else bridge.reason or bridge.state
        _log.warning(
            "run %s is not completely in NATS at %s yet (%s); if its bridge ends before that, %s",
            *(self.name, servers, why, how_to_send(path, servers)),
        )


def error_by_name(name: str, message: str, run: str | None = None) -> OffloopError:
    """Return the error that a broker named, so that callers catch the same class wherever it arose."""
    kind = vars(errors).get(name)
    if not (isinstance(kind, type) and issubclass(kind, OffloopError)):
        return BrokerError(message)
    return kind(message, run=run) if issubclass(kind, RunError) else kind(message)
