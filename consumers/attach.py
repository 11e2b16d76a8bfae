"""Which run a consumer reads, and from where: the live stream or a recording."""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

from bus.demand import Demand
from bus.errors import RunError, RunNotFoundError
from bus.event import Event
from bus.recording import Recording
from bus.replay import Replay
from bus.replay_origin import Origin
from bus.run_source import list_remote_runs
from bus.runs import RunInfo, find_run, list_runs, runs_dir
from bus.security import ClientSecurity
from bus.subscriber import Subscriber
from bus.terminal import left_on_request

__all__ = ["RemoteRunInfo", "Stream", "attach", "find_or_wait", "find_remote", "newest_or_wait"]

Stream: TypeAlias = Subscriber | Recording | Replay

GRACE_SECONDS = 5.0
"""How long a run may take to become live after the consumer of it was started: a trainer imports torch first."""

_POLL = 0.2
_LEFT = "detached before there was a run"


class RemoteRunInfo(NamedTuple):
    """A run at a broker elsewhere."""

    broker: str
    """The broker's address."""
    name: str
    attempt: int
    live: bool
    security: ClientSecurity | None


def attach(
    run: RunInfo | RemoteRunInfo,
    events: Iterable[Event],
    demand: Demand,
    name: str | None = None,
    after: Mapping[int, tuple[int, int]] | None = None,
    decides: Iterable[Event] = (),
) -> Stream:
    """The stream of a run: live with its whole history before, or from the recording when nothing serves it any
    more.

    ``demand`` is what is asked of the training, ``name`` the consumer's, ``after`` where a live stream goes on,
    ``decides`` the events at which something may be decided, see :class:`~bus.subscriber.Subscriber`; a recording is
    told that when it is read.

    Raises:
        RunError: with ``after``, another attempt of the run has begun meanwhile.
    """
    if isinstance(run, RemoteRunInfo):
        subscriber = Subscriber(
            run.name,
            events=events,
            demand=demand,
            name=name,
            decides=decides,
            after=after,
            broker=run.broker,
            security=run.security,
        )
        attempt, rest = run.attempt, f"'bus info {run.name} --broker {run.broker}' shows it"
    elif run.live or run.away:
        subscriber = Subscriber(str(run.path), events=events, demand=demand, name=name, decides=decides, after=after)
        attempt, rest = run.last.number, f"or finish the one before with '--replay {run.recording}'"
    else:
        return Recording(run.recording)
    if after and subscriber.attempt != attempt:
        subscriber.close()
        raise RunError(
            f"attempt {subscriber.attempt} of run {run.name!r} has begun just now: start this consumer again for "
            f"it, {rest}"
        )
    return subscriber


@left_on_request(_LEFT)
def find_remote(
    broker: str, name: str | None, security: ClientSecurity | None, wait: bool, say: Callable[[str], None]
) -> RemoteRunInfo:
    """The run of that name at a broker elsewhere; without a name the newest live one, else the newest; with ``wait``,
    as soon as there is one, and without a name only a live one, or one that has begun since.

    Raises:
        RunNotFoundError: there is none, and ``wait`` is false.
        BrokerError: no broker answers there.
    """
    said = False
    known: set[tuple[str, int]] | None = None
    while True:
        runs = list_remote_runs(broker, security, name)
        if known is None:
            known = {(run["run"], run["attempt"]) for run in runs}
        live = [run for run in runs if run["live"]]
        # A short run can begin and end between two looks.
        new = [run for run in runs if (run["run"], run["attempt"]) not in known]
        chosen = live or (new if wait and name is None else runs)
        if chosen:
            run = chosen[0]
            return RemoteRunInfo(broker, run["run"], run["attempt"], run["live"], security)
        if not wait:
            what = f"is no run {name!r}" if name else "are no runs"
            raise RunNotFoundError(f"there {what} at {broker}: 'bus runs --broker {broker}' lists what there is")
        if not said:
            say(f"waiting for {'run ' + name if name else 'a run'} at {broker} ... (Ctrl-C ends)")
            said = True
        time.sleep(_POLL)


def find_or_wait(name: str, where: str | os.PathLike[str] | None, wait: bool, say: Callable[[str], None]) -> RunInfo:
    """The run of that name or directory; with ``wait``, as soon as it exists. Says on ``say`` what it waits for, and of
    what the run is a replay.

    Raises:
        RunNotFoundError: there is no such run and ``wait`` is false.
    """
    with left_on_request(_LEFT):
        run = _find_or_wait(name, where, wait, say)
    _say_origin(run, say)
    return run


def _find_or_wait(name: str, where: str | os.PathLike[str] | None, wait: bool, say: Callable[[str], None]) -> RunInfo:
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

    Says on ``say`` what it chose or waits for, which other runs are live, and of what the run is a replay.
    """
    with left_on_request(_LEFT):
        run = _newest_or_wait(where, wait, say)
    _say_origin(run, say)
    return run


def _newest_or_wait(where: str | os.PathLike[str] | None, wait: bool, say: Callable[[str], None]) -> RunInfo:
    known = list_runs(where)
    live = [run for run in known if run.live or run.away]
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


def _say_origin(run: RunInfo, say: Callable[[str], None]) -> None:
    origin = Origin.of(run.last.info)
    if origin is not None:
        say(f"run {run.name} is a replay of {origin}")
