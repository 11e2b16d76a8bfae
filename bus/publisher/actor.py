"""Actors: processes that join a run besides the ranks of its training."""

import os
import re
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from offloop.bus.errors import BrokerError, ConfigurationError, RunNotFoundError
from offloop.bus.publisher.own_events import OwnEvents
from offloop.bus.publisher.publisher import Publisher, ending_for
from offloop.bus.runs.directory import RunInfo, find_run
from offloop.bus.types.actor import JOIN, ActorName
from offloop.bus.types.disabled import is_disabled
from offloop.bus.types.event import ANY_CUSTOM, ANY_TABLE, Event

_ALWAYS = frozenset({Event.INIT, Event.ITERATION_CHECKPOINT})
_LOOK_SECONDS = 0.1
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\Z")


class Actor(OwnEvents):
    """A process in a run that is not a rank of its training: a rollout worker, an inference server, an evaluator.

    It has its own stream in the run, with its own numbers, and comes and goes without ending the run. Made by
    :func:`join`, and closed by ``with`` or :meth:`close`. Its methods may be called from any thread."""

    def __init__(self, publisher: Publisher | None, role: str) -> None:
        super().__init__()
        self._publisher = publisher
        self.role = role

    @property
    def name(self) -> str:
        """Its name in the run, such as ``rollout-0``."""
        actor = None if self._publisher is None else self._publisher.actor
        return self.role if actor is None else actor.name

    @property
    def run_name(self) -> str | None:
        """Name of the run; ``None`` if offloop is disabled."""
        return None if self._publisher is None else self._publisher.run_name

    @property
    def batch(self) -> int:
        """Batches trained, as last reported by the broker, at most some tenths of a second ago."""
        self.poll()
        return self._default_step()

    @property
    def training_ended(self) -> bool:
        """True when the training has ended. Events are recorded for some more seconds."""
        self.poll()
        return self._publisher is not None and self._publisher.training_ended

    def log(self, values: Mapping[str, Any] | None = None, /, *, step: int | None = None, **more: Any) -> None:
        """Log numbers by name. In the run each name begins with the actor's: ``rollout-0/reward``.

        ``step`` is by default :attr:`batch`. Raises ConfigurationError for anything but numbers."""
        if self._publisher is not None:
            named = {f"{self.name}/{name}": value for name, value in {**(values or {}), **more}.items()}
            self._publisher.log(named, step)
            self._publisher.poll()

    def poll(self) -> None:
        """Send what waits, and read what the broker sent, without waiting. Call it in a process that logs seldom."""
        if self._publisher is not None:
            self._publisher.poll()

    def close(self, error: BaseException | None = None) -> None:
        """Leave the run: send what waits, and wait at most some seconds until it is recorded."""
        if self._publisher is not None:
            self._publisher.close(*ending_for(error))

    @property
    def requested_events(self) -> set[Event]:  # type: ignore[override]  # it changes with the demand
        return set() if self._publisher is None else self._publisher.requested_events

    def publish_own(self, event: Event, fields: dict[str, Any]) -> None:
        if self._publisher is not None:
            self._publisher.publish_own(event, fields)

    def room_for_rows(self) -> int:
        return 0 if self._publisher is None else self._publisher.room_for_rows()

    def _default_step(self) -> int:
        return 0 if self._publisher is None else self._publisher._default_step()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)


def join(
    run: str | os.PathLike[str] | None = None,
    *,
    role: str,
    name: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    record: Iterable[Event | str] = (ANY_CUSTOM, ANY_TABLE),
    wait_seconds: float = 60.0,
) -> Actor:
    """Join a live run on this machine as an actor.

        with offloop.join(role="rollout") as actor:
            with actor.span("generate"):
                ...
            actor.log_table("completions", rows)
            actor.log(reward=0.5)

    Args:
        run: Its name or directory; by default ``$OFFLOOP_JOIN``, which a training sets for its child processes.
        role: What the process does, such as ``rollout``: letters, digits, ``.``, ``_`` and ``-``.
        name: Its name, by default the role with a number. If another actor of the run has it, a number follows.
        runs_dir: Folder of the runs, by default that of :func:`offloop.bus.runs_dir`.
        record: Events and tables that are always published, by default all.
        wait_seconds: How long to wait until the run is live.

    Raises:
        ConfigurationError: A wrong argument, or neither ``run`` nor the variable names a run.
        RunNotFoundError, BrokerError: There is no such live run after that time.
    """
    for text in (role, *([] if name is None else [name])):
        check_actor_name(text)
    if is_disabled():
        return Actor(None, role)
    where = os.environ.get(JOIN) if run is None else run
    if not where:
        raise ConfigurationError(f"no run is named: give run=, or start the process with {JOIN}=DIRECTORY of the run")
    found = _await_live(where, runs_dir, wait_seconds)
    publisher = Publisher(
        found.name,
        broker=found.control_endpoint,
        events={*_ALWAYS, *map(Event, record)},
        actor=ActorName(name or "", role),
    )
    return Actor(publisher, role)


def check_actor_name(name: str) -> None:
    """Raise ConfigurationError unless an actor can have the name or role."""
    if not isinstance(name, str) or not _NAME.match(name):
        raise ConfigurationError(
            f"{name!r} cannot be the name or role of an actor: use at most 100 letters, digits, '_', '.' and '-', the "
            "first a letter, digit or '_'"
        )


def _await_live(run: str | os.PathLike[str], runs_dir: str | os.PathLike[str] | None, seconds: float) -> RunInfo:
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = find_run(run, runs_dir)
        except RunNotFoundError:
            if time.monotonic() > deadline:
                raise
        else:
            if found.live:
                return found
            if time.monotonic() > deadline:
                raise BrokerError(f"run {found.name!r} is {found.status}: an actor joins a live run")
        time.sleep(_LOOK_SECONDS)
