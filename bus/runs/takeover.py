"""Where a broker of one run records what comes after another broker is gone for good."""

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

from offloop.bus.errors import ConfigurationError, OffloopError, RunDirectoryError, RunIsLiveError
from offloop.bus.runs.directory import RUN_FILE, SOCKET_FILES, RunDirectory, read_run, socket_address
from offloop.bus.types.timeouts import Timeouts


class Predecessor(NamedTuple):
    """What the broker that is gone had said of an attempt."""

    path: str
    """The run's directory as that broker saw it; empty where it is not to be used."""
    attempt: int
    id: str
    """The run's identity."""


class Takeover(NamedTuple):
    """Where the attempt is recorded from now on."""

    path: Path
    directory: RunDirectory | None
    """The run's directory, locked; ``None`` where the broker of another rank serves it."""
    control: str | None
    """Where that broker listens."""
    in_place: bool
    """Whether it is the same recording; otherwise the attempt has one more, which holds what came later."""


def take_over(root: Path, name: str, before: Predecessor, timeouts: Timeouts) -> Takeover:
    """Takes up an attempt in its own directory, if that is here and not served; else in a directory of the same
    name in ``root``, or below a new directory in there when another run has that name already. What another rank of
    the same attempt has taken is shared.

    Raises:
        OffloopError: none of them can be used, or the broker before is back.
    """
    places = [(Path(before.path), True), (root / name, False), (root / f"rest-{before.id}" / name, False)]
    if not places[0][0].is_absolute() or places[0][0].name != name:
        del places[0]
    problem: OffloopError | None = None
    for path, in_place in places:
        try:
            return _take(path, before, in_place, timeouts)
        except RunIsLiveError as error:
            if in_place:
                raise
            problem = error
        except OffloopError as error:
            problem = error
    assert problem is not None  # every place has one
    raise problem


def _take(path: Path, before: Predecessor, in_place: bool, timeouts: Timeouts) -> Takeover:
    deadline = time.monotonic() + timeouts.takeover
    while True:
        _check(path, before, in_place)
        try:
            directory = RunDirectory(path.parent, path.name, before.id)
        except RunIsLiveError:
            control = _control_of(path, before)
            if control is not None:
                if control.startswith("ipc://"):
                    return Takeover(path, None, control, in_place)
                raise
            # The broker of another rank may just have taken it.
            if time.monotonic() > deadline:
                raise
            time.sleep(timeouts.takeover_poll)
            continue
        try:
            # It may have changed before it was locked.
            _check(path, before, in_place)
        except BaseException:
            directory.release()
            raise
        return Takeover(path, directory, None, in_place)


def _check(path: Path, before: Predecessor, in_place: bool) -> None:
    """Raises :class:`ConfigurationError` unless the attempt can be recorded in that directory."""
    for socket in SOCKET_FILES:
        socket_address(path / socket)
    if not (path / RUN_FILE).exists():
        if in_place:
            raise ConfigurationError(f"the run's directory {path} is not here")
        if os.path.lexists(path / f"recording-{before.attempt}.mcap"):
            raise ConfigurationError(f"{path} has a recording of attempt {before.attempt} already")
        return
    run = read_run(path)
    newest, status = run.last.number, run.last.status
    if run.id != before.id or run.recorded_as != path.name:
        raise ConfigurationError(f"{path} is another run's")
    if in_place and newest != before.attempt:
        raise ConfigurationError(
            f"attempt {before.attempt} of {path} cannot continue: attempt {newest} has begun since"
        )
    if in_place and status not in ("running", "lost"):
        raise ConfigurationError(f"attempt {before.attempt} of {path} cannot continue: it is {status}")
    if not in_place and newest >= before.attempt and not run.live:
        raise ConfigurationError(f"{path} has a recording of attempt {before.attempt} already")


def _control_of(path: Path, before: Predecessor) -> str | None:
    """Where the attempt is served, if it is."""
    with contextlib.suppress(RunDirectoryError):
        run = read_run(path)
        if run.live and (run.id, run.last.number) == (before.id, before.attempt):
            return run.control_endpoint
    return None
