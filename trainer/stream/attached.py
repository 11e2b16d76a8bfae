"""Callbacks and loggers given to a trainer, in a consumer process that the trainer starts."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from offloop.bus.errors import ConfigurationError
from offloop.bus.printing import say
from offloop.bus.processes import python_path
from offloop.bus.types.demand import Demand
from offloop.bus.types.event import Event

# -P: files in the current folder must not shadow packages.
_COMMAND = [sys.executable, "-P", "-m", "offloop.consumers.cli.attached"]
_PATIENCE = 30.0


class AttachedConsumers:
    """A process that runs callbacks and loggers for one run, as ``consumer`` would.

    It reads the stream like any other consumer, has its own session so that Ctrl-C reaches only the trainer, and exits
    once the stream has ended and everything is handled. Its input is a line of JSON with ``sys_path`` and ``where``,
    then a pickle of ``callbacks`` and ``loggers``, whose classes may come from the user's script. A text among them is
    a name, as for ``consumer``."""

    def __init__(
        self,
        callbacks: Sequence[Any],
        loggers: Sequence[Any],
        where: Mapping[str, str | bool | None],
        command: Sequence[str] = _COMMAND,
    ) -> None:
        order = _order(callbacks, loggers, where)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=_environment())
        assert self._process.stdin is not None  # it is a pipe
        try:
            with self._process.stdin as pipe:
                pipe.write(order)
        except BrokenPipeError:
            # It exited before it read anything; wait() reports how.
            return

    def wait(self, patience: float = _PATIENCE) -> None:
        """Wait until everything is handled, and report on standard error a failure or a timeout."""
        try:
            code = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            say(f"{self} still runs after {patience:g} s, and continues without the trainer", err=True)
            # A return code keeps Popen from warning that the process still runs.
            self._process.returncode = 0
            return
        if code:
            how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
            say(f"{self} {how}: its logs may be incomplete; the recording is complete", err=True)

    def __str__(self) -> str:
        return f"the callbacks' process {self._process.pid}"


class NamedCallbacks:
    """The demand of callbacks and loggers given by name, reported by a process that makes them."""

    def __init__(self, callbacks: Sequence[str], loggers: Sequence[str], command: Sequence[str] = _COMMAND) -> None:
        names = ", ".join([*callbacks, *loggers])
        order = _order(callbacks, loggers, {"describe": True})
        try:
            done = subprocess.run(
                command,
                input=order,
                stdout=subprocess.PIPE,
                env=_environment(),
                timeout=_PATIENCE,
                check=False,
                # Ctrl-C is for the trainer: here it would show a traceback of an import.
                start_new_session=True,
            )
            # Imported modules may print lines of their own.
            described = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            raise ConfigurationError(f"{names} cannot be made within {_PATIENCE:g} s") from None
        except (IndexError, ValueError):
            raise ConfigurationError(f"{names} cannot be made: their process ended with {done.returncode}") from None
        if "error" in described:
            raise ConfigurationError(described["error"])
        self._demand = Demand.from_wire(described["demand"])
        self.barrier_events: frozenset[Event] = frozenset(Event(event) for event in described["barrier_events"])

    def demand(self) -> Demand:
        return self._demand


def _order(callbacks: Sequence[Any], loggers: Sequence[Any], about: Mapping[str, Any]) -> bytes:
    line = json.dumps({"sys_path": sys.path, **about}).encode() + b"\n"
    pickled: bytes = cloudpickle.dumps({"callbacks": list(callbacks), "loggers": list(loggers)})
    return line + pickled


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": python_path()}


def demand_of(callbacks: Iterable[Any]) -> Demand:
    demands: list[Demand] = []
    for callback in callbacks:
        _check_kind(callback, "demand", "callbacks", "Callback", "SpeedMonitor", "speed")
        demands.append(callback.demand())
    return Demand.merge(demands)


def check_loggers(loggers: Iterable[Any]) -> None:
    for logger in loggers:
        _check_kind(logger, "log_rows", "loggers", "LoggerDestination", "JsonlLogger", "jsonl")


def _check_kind(one: Any, method: str, argument: str, base: str, example: str, name: str) -> None:
    # By a method, because this package does not import the consumers.
    if isinstance(one, type) or not callable(getattr(one, method, None)):
        what = f"the class {one.__name__}" if isinstance(one, type) else f"a {type(one).__name__}"
        also = "; to change the training, use an algorithm" if argument == "callbacks" else ""
        raise ConfigurationError(
            f"{argument} has {what}: give objects whose class extends offloop.consumers.{base}, such as "
            f"offloop.consumers.{example}(), or names such as {name!r}{also}"
        )


def check_picklable(objects: Iterable[Any], argument: str) -> None:
    for one in objects:
        try:
            cloudpickle.dumps(one)
        except Exception as error:  # noqa: BLE001
            raise ConfigurationError(
                f"{argument} has a {type(one).__name__} that cannot be sent to the consumers' process ({error}): "
                "open files, connections and the like in its methods, not when it is made"
            ) from None
