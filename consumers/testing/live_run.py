"""A training in processes of its own, for a test."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from offloop.bus import processes
from offloop.bus.errors import OffloopError
from offloop.bus.protocol.order import Ending
from offloop.bus.recording.recording import Recording
from offloop.bus.runs.directory import RUN_FILE, RunInfo, read_run
from offloop.bus.subscriber.commands import send_command
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.bus.types.commands import Argument, Outcome
from offloop.bus.types.event import Event
from offloop.consumers.api.callback import Callback, OnError
from offloop.consumers.api.logger import LoggerDestination
from offloop.consumers.runner.entries import Subscription
from offloop.consumers.testing.harness import Harness, as_callbacks
from offloop.consumers.testing.logged import Logged

SECONDS = 120.0
"""How long a test waits for a training, unless it is given."""

WATCHER = "test"
"""What a test is called by the trainings that it watches."""

_MARK = "OFFLOOP_LIVE_RUN"
"""The environment variable by which the processes of a training are known, wherever they stand."""

_BROKER = b"offloop.bus.broker"
_POLL = 0.02
_BROKER_SECONDS = 5.0
_SHOWN = 50

_SOCKET_PATH = 100
"""Bytes in a socket's path that every system allows."""

_SOCKET_NAME = len("/feed.sock")
_SHORT = "/tmp"


class LiveRun:
    """A training that the command ``trainer`` does, in a process of its own, from now on.

        with LiveRun(tmp_path, "digits", max_duration="1ep") as run:
            logged = run.watch(Perplexity())
        assert run.wait().status == "finished"

    Use it as a context manager: at the end of the ``with`` block nothing of it is left running. The fixture
    ``live_run`` does that by itself.

    Args:
        folder: where everything is written: the run below ``runs``, its output to ``NAME.log``.
        task: as for the command: ``digits``, ``module:function``, ``path/to/file.py:function``.
        arguments: further words for the command as they are, such as ``"-o", "EMA.half_life=10ba"``.
        run_name: name of the run; by default that of the task.
        ranks: processes that train, started with ``torchrun``.
        options: the command's options and the task's: ``max_duration="2ep"`` is ``--max-duration 2ep``, ``True`` gives
            a flag without a value, ``False`` and ``None`` leave it out, a list gives it once for each entry.

    ``sys.path`` of the test is in place there, so a task finds what the test finds.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        task: str,
        *arguments: str,
        run_name: str | None = None,
        ranks: int = 1,
        **options: Any,
    ) -> None:
        self._folder = Path(folder)
        self.name = run_name or _name_of(task)
        """Name of the run."""
        self._log = self._folder / f"{self.name}.log"
        runs = self._folder / "runs"
        self.path = runs / self.name
        """The run's directory; there once the training has begun."""
        self._opened = ExitStack()
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "offloop.trainer"]
            if ranks > 1
            else ["-m", "offloop.trainer"]
        )
        words = [task, *arguments, *_flags(options), "--runs-dir", str(self._reachable(runs)), "--run-name", self.name]
        before = self._found_on_disk()
        self._attempt = 1 if before is None else before.last.number + 1
        self._mark = uuid4().hex
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *launcher, *words],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # What it starts belongs to it, and none of it to the process that runs the tests.
                start_new_session=True,
                env=_environment() | {_MARK: self._mark},
            )

    def _reachable(self, runs: Path) -> Path:
        if len(os.fsencode(self.path.absolute())) + _SOCKET_NAME <= _SOCKET_PATH:
            return runs
        runs.mkdir(exist_ok=True)
        link = Path(self._opened.enter_context(TemporaryDirectory(prefix="ol-", dir=_SHORT))) / "runs"
        link.symlink_to(runs.absolute(), target_is_directory=True)
        return link

    def __enter__(self) -> "LiveRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def __repr__(self) -> str:
        return f"<LiveRun {self.path}>"

    @property
    def pid(self) -> int:
        """Number of the process that was started."""
        return self._process.pid

    @property
    def output(self) -> str:
        """What it has written to standard output and standard error so far."""
        return self._log.read_text(errors="replace")

    def recording(self, attempt: int | None = None) -> Recording:
        """What is recorded so far, of the newest attempt unless it is given.

        Raises:
            RecordingError: nothing is.
        """
        return Recording(self.path, attempt)

    def watch(
        self,
        *callbacks: Callback,
        loggers: Sequence[LoggerDestination] = (),
        on_error: OnError = "stop",
        name: str = WATCHER,
        timeout: float = SECONDS,
    ) -> Logged:
        """Attaches callbacks to the run, wherever it is, and returns when it has ended, with all that they logged.

        They run here, in the test's process. Events and fields beyond the base set are there from the moment that the
        training has heard of them, and a stop takes effect some batches later. A training that was started with
        ``wait_for="test"``, or another ``name``, waits before its first batch until they are attached, and after each
        batch until they have handled it. ``loggers`` and ``on_error`` are as for
        :func:`~offloop.consumers.testing.replay`.

        Raises:
            AssertionError: the training did not begin, or has not ended within ``timeout`` seconds.
            ConfigurationError: a callback handles no event.
        """
        made = as_callbacks(callbacks)
        deadline = time.monotonic() + timeout
        self.wait_to_begin(timeout)
        asked = Subscription.of(made, name)
        # A training with wait_for waits for consumers that may decide something.
        asked = replace(
            asked, events=asked.events | {Event.BATCH_END}, barrier_events=asked.barrier_events | {Event.BATCH_END}
        )
        with Subscriber(self.path, **vars(asked)) as stream:
            harness = Harness(stream, made, loggers, on_error)
            too_late = threading.Timer(max(0.0, deadline - time.monotonic()), harness.runner.stop)
            too_late.start()
            try:
                logged = harness.run()
            finally:
                too_late.cancel()
                too_late.join()
        statistics = logged.statistics
        if statistics.interrupted:
            raise AssertionError(self._told(f"has not ended within {timeout:g} s"))
        logged.commands += [outcome.command for outcome in statistics.outcomes]
        return logged

    def command(self, name: str, *arguments: Argument, timeout: float = SECONDS) -> Outcome:
        """Sends the run a command, such as ``command("set", "lr", 0.1)``, and returns what became of it.

        Raises:
            AssertionError: the training did not begin within ``timeout`` seconds.
            ConfigurationError: there is no such command, or the run has ended.
            BrokerError: the run's broker does not answer, or refuses.
        """
        self.wait_to_begin(timeout)
        return send_command(read_run(self.path), name, *arguments, wait=timeout)

    def stop(self, timeout: float = SECONDS) -> Ending:
        """Stops the training with the command ``stop``, and waits for its end."""
        deadline = time.monotonic() + timeout
        with contextlib.suppress(OffloopError):  # it may have come to its end by itself just now
            self.command("stop", timeout=timeout)
        return self.wait(max(0.0, deadline - time.monotonic()))

    def wait(self, timeout: float = SECONDS, check: bool = True) -> Ending:
        """Waits until the training is over and its record complete, and returns how it ended.

        Raises:
            AssertionError: that took more than ``timeout`` seconds, or, unless ``check`` is false, the command failed;
                the end of its output is shown.
        """
        __tracebackhide__ = True
        deadline = time.monotonic() + timeout
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(self._told(f"has not ended within {timeout:g} s")) from None
        if check and code != 0:
            raise AssertionError(self._told(f"ended with exit code {code}"))
        while (found := self._found()) is not None and found.live and time.monotonic() < deadline:
            time.sleep(_POLL)
        if found is None:
            return Ending("lost")
        return Ending(found.last.status, found.last.error, found.last.reason)

    def wait_to_begin(self, timeout: float = SECONDS) -> None:
        """Waits until the run is there.

        Raises:
            AssertionError: the command ended before that, or it took more than ``timeout`` seconds.
        """
        __tracebackhide__ = True
        deadline = time.monotonic() + timeout
        while self._found() is None:
            if self._process.poll() is not None and self._found() is None:
                raise AssertionError(self._told(f"ended with exit code {self._process.returncode} before it began"))
            if time.monotonic() > deadline:
                raise AssertionError(self._told(f"has not begun within {timeout:g} s"))
            time.sleep(_POLL)

    def kill(self) -> None:
        """Kills the training, all of its processes, and waits until its broker is gone too."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._kill_the_rest()
        found = self._found_on_disk()
        if found is not None and found.live:
            self._see_broker_off()
        self._opened.close()

    def _kill_the_rest(self) -> None:
        # torchrun gives each rank a session of its own, and so does a trainer the process of its callbacks.
        deadline = time.monotonic() + _BROKER_SECONDS
        while (left := _marked(self._mark)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL)

    def _see_broker_off(self) -> None:
        # It writes the end of the record, which a test may want to see.
        deadline = time.monotonic() + _BROKER_SECONDS
        broker = self._broker()
        while processes.is_running(broker) and time.monotonic() < deadline:
            time.sleep(_POLL)
        if broker is not None and processes.is_running(broker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(broker, signal.SIGKILL)

    def _found(self) -> RunInfo | None:
        found = self._found_on_disk()
        if found is None or found.last.number < self._attempt:
            return None
        return found if found.live or found.last.status != "running" else None

    def _found_on_disk(self) -> RunInfo | None:
        return read_run(self.path) if (self.path / RUN_FILE).exists() else None

    def _told(self, what: str) -> str:
        *_, last = ["", *self.output.splitlines()]
        shown = "\n".join(self.output.splitlines()[-_SHOWN:])
        return f"the training of {self.name} {what}" + (f"; its output ends with\n{shown}" if last or shown else "")

    def _broker(self) -> int | None:
        try:
            pid = json.loads((self.path / "broker.json").read_text())["pid"]
        except (OSError, ValueError, KeyError):
            return None
        return pid if isinstance(pid, int) else None


def _marked(mark: str) -> list[int]:
    """The processes with that mark in their environment, but for brokers, which end by themselves."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment, command = (process / "environ").read_bytes(), (process / "cmdline").read_bytes()
        except OSError:  # it is gone, or another user's
            continue
        if f"{_MARK}={mark}".encode() in environment.split(b"\0") and _BROKER not in command.split(b"\0"):
            found.append(int(process.name))
    return found


def _name_of(task: str) -> str:
    _, _, function = task.rpartition(":")
    return function


def _flags(options: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is True:
                words.append(flag)
            elif one is not False and one is not None:
                words += [flag, str(one)]
    return words


def _environment() -> dict[str, str]:
    # The processes of this training get their place, not that of a rank in which the tests might run.
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return environment | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONUNBUFFERED": "1"}
