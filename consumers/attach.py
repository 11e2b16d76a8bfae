"""Which run a consumer reads, and from where: the live stream or a recording."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

from bus.errors import RunNotFoundError
from bus.event import Event
from bus.recording import Recording
from bus.runs import RunInfo, find_run, list_runs, runs_dir
from bus.subscriber import Subscriber

__all__ = ["Stream", "attach", "find_or_wait", "newest_or_wait"]

Stream: TypeAlias = Subscriber | Recording

GRACE_SECONDS = 5.0
"""How long a run may take to become live after the consumer of it was started: a trainer imports torch first."""

_POLL = 0.2


def attach(run: RunInfo, events: Iterable[Event]) -> Stream:
    """The stream of a run: live with its whole history before, or from the recording when nothing serves it any
    more."""
    return Subscriber(str(run.path), events=events) if run.live else Recording(run.recording)


def find_or_wait(name: str, where: str | os.PathLike[str] | None, wait: bool, say: Callable[[str], None]) -> RunInfo:
    """The run of that name or directory; with ``wait``, as soon as it exists.

    Raises:
        RunNotFoundError: there is no such run and ``wait`` is false.
    """
    said = False
    while True:
        try:
            return find_run(name, where)
        except RunNotFoundError:
            if not wait:
                raise
        if not said:
            say(f"waiting for run {name} in {runs_dir(where)} ... (Ctrl-C ends)")
            said = True
        time.sleep(_POLL)


def newest_or_wait(where: str | os.PathLike[str] | None, wait: bool, say: Callable[[str], None]) -> RunInfo:
    """The newest live run; else the next one, which has a few seconds to come; else the newest that has ended. With
    ``wait``, or when there is none at all, waits for the next one however long it takes.

    Says on ``say`` what it chose or waits for, and which other runs are live.
    """
    known = list_runs(where)
    live = [run for run in known if run.live]
    if live:
        _say_others(live, say)
        return live[0]
    if known and not wait:
        newest = known[0]
        say(
            f"no run is live in {runs_dir(where)}: waiting {GRACE_SECONDS:g} s for one to start, then reading the "
            f"newest recording, of {newest.name} ({newest.status}); "
            "'--wait' waits for the next run however long it takes, '--run NAME' reads at once"
        )
        return _wait_for_new(where, {_identity(run) for run in known}, GRACE_SECONDS) or newest
    say(f"waiting for a run in {runs_dir(where)} ... (Ctrl-C ends)")
    while True:
        found = _wait_for_new(where, {_identity(run) for run in known}, _POLL)
        if found is not None:
            return found


def _wait_for_new(
    where: str | os.PathLike[str] | None, known: set[tuple[Path, int]], patience: float
) -> RunInfo | None:
    """The next run, if one comes in so many seconds."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        for run in list_runs(where):
            # A short run can begin and end between two looks.
            if run.live or _identity(run) not in known:
                return run
        time.sleep(_POLL)
    return None


def _identity(run: RunInfo) -> tuple[Path, int]:
    return run.path, run.last.number


def _say_others(live: list[RunInfo], say: Callable[[str], None]) -> None:
    if len(live) > 1:
        others = ", ".join(run.name for run in live[1:])
        say(f"attaching to {live[0].name}, the newest live run; also live: {others} ('--run NAME' chooses)")
