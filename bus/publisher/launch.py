"""The broker that a publisher starts for its own run, in a process of its own."""

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
"""Why a broker may not take up a run now and may later: a disk that takes nothing, a lock that is still held."""
RESTART_PAUSES = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
"""Seconds before a broker is started again, by how often it has died in a row."""
STEADY_SECONDS = 10.0
"""For which a broker has to live for its next death to count as the first one."""
_COPY_POLL_SECONDS = 0.05


class BrokerProcess:
    """The process that serves one run. It is started again when it dies, and then resumes the attempt where its
    recording ends.

    With ``is_new`` it takes the first of the names that a new run may get, see
    :func:`offloop.bus.runs.directory.free_name`. ``run_id`` is the identity of a run that is new here, ``servers`` are
    those of NATS to which it is copied, by default those that the environment names.

    Raises OffloopError: the one that the process named, when it could not begin."""

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
        self.name = name
        """The name of the run that it serves."""
        self._environment = {} if servers is None else {STREAM_VARIABLE: servers}
        self._timeouts = timeouts
        if is_new:
            what, *more = "new", *filter(None, [processes.restarted_launch()])
        else:
            what, *more = "begin", *filter(None, [run_id])
        self._process = self._spawn(what, *more)
        self._began = time.monotonic()
        self._restarts = 0
        self._not_before = 0.0
        self.name = self._first_answer().get("run", name)

    def _spawn(self, what: str, *more: str) -> "subprocess.Popen[bytes]":
        arguments = what, str(self._root), self.name, *more
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return processes.start_module("offloop.bus.broker", *arguments, env=self._environment, **pipes)

    def _first_answer(self) -> dict[str, Any]:
        """The line in which a new broker says that it is ready. Raises the error that it names, or its last words."""
        process = self._process
        assert process.stdout is not None and process.stderr is not None  # noqa: PT018  they are pipes
        # Not select(), which refuses descriptors from 1024 on: a training may have many files open.
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        try:
            line = process.stdout.readline() if poll.poll(1000 * self._timeouts.broker_start) else b""
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            process.kill()
            *_, why = ["it said nothing", *process.stderr.read().decode(errors="replace").strip().splitlines()]
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
        """Its end in words; ``None`` while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    @property
    def has_finished(self) -> bool:
        """It exited because its run has ended."""
        return self._process.poll() == 0

    def refusal(self) -> OffloopError | None:
        """Why it does not serve the run again, if one that was started again has said so before it ended."""
        out = self._process.stdout
        if self._process.poll() is None or out is None or out.closed:
            return None
        try:
            # It has ended, so what it said is all there, and reading does not wait.
            answer = json.loads(out.readline())
            return error_by_name(answer["error"], str(answer["message"]))
        except (ValueError, KeyError, TypeError):
            return None

    def restart(self) -> bool:
        """Starts it again, without waiting for it, unless it has died again and again just now; whether it did.
        Raises OSError: no process can be started."""
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
        """Ends it at once."""
        self._process.kill()
        self._process.wait()
        self._close_pipes()

    def leave(self, seconds: float) -> None:
        """Waits so long for it to finish the recording; then it continues by itself."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            processes.let_go(self._process)
        self._close_pipes()
        servers = {**os.environ, **self._environment}.get(STREAM_VARIABLE)
        if servers:
            self._report_copy(servers)

    def _report_copy(self, servers: str) -> None:
        """Says at the end of the run what its bridge has not copied."""
        path, give_up = self._root / self.name, time.monotonic() + self._timeouts.copy
        try:
            attempt = read_run(path).last.number
        except OffloopError:
            return  # said elsewhere: the run's directory cannot be read
        while True:
            bridge = read_bridge(path)
            if bridge is not None and not bridge.is_running and bridge.attempt not in (0, attempt):
                bridge = None  # it has left that behind for an attempt before
            if bridge is not None and bridge.has_all(attempt):
                return
            copies = bridge is None or bridge.state == "copying" or not bridge.has_tried
            if not copies or time.monotonic() > give_up:
                break
            time.sleep(_COPY_POLL_SECONDS)
        why = "its bridge has not begun" if bridge is None else bridge.reason or bridge.state
        _log.warning(
            "run %s is not all in NATS at %s yet (%s); if its bridge ends before it is, %s",
            *(self.name, servers, why, how_to_send(path, servers)),
        )


def error_by_name(name: str, message: str, run: str | None = None) -> OffloopError:
    """The error that a broker named, about this run, so that users catch the same one wherever it arose."""
    kind = vars(errors).get(name)
    if not (isinstance(kind, type) and issubclass(kind, OffloopError)):
        return BrokerError(message)
    return kind(message, run=run) if issubclass(kind, RunError) else kind(message)
