"""The run that a consumer reads: the named one, the newest, or the next one to begin."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from offloop.bus.errors import ConfigurationError, RunNotFoundError
from offloop.bus.terminal import exit_on_signal
from offloop.consumers.runner.places import FoundRun, HostRanks, NatsRuns, Place

Say: TypeAlias = Callable[[str], None]

_POLL = 0.2
_PAUSES = 9
"""To look into a folder of many runs takes a while: it is left alone for so many times as long before the next look."""
_RESTART = 60.0
"""Seconds to wait for a training that is started again."""


def choose_ranks(run: FoundRun, ranks: Sequence[int], wait: bool, say: Say) -> FoundRun:
    """Chooses ranks of a run in NATS, from their hosts; with ``wait``, as soon as those are known. Says on ``say`` what
    it waits for.

    Raises:
        ConfigurationError: there is no such rank and no waiting for it, or the run is in a folder.
        BrokerError: the servers do not answer.
    """
    if not isinstance(run.place, NatsRuns):
        raise ConfigurationError(f"run {run.name!r} is {run.place}: ranks are chosen of a run in NATS")
    from offloop.bus.jetstream.nats_connection import NatsConnection

    address = run.place.address
    unknown: list[int] = []

    def look() -> FoundRun | None:
        hosts = NatsConnection.at(address).hosts(run.name)
        on = {rank: str(host.host) for host in hosts for rank in host.ranks}
        unknown[:] = (rank for rank in ranks if rank not in on)
        if not unknown:
            chosen = [
                HostRanks(
                    None if host == on.get(0) else host, tuple(one for one in sorted(set(ranks)) if on[one] == host)
                )
                for host in dict.fromkeys(on[rank] for rank in sorted(ranks))
            ]
            return replace(run, chosen=tuple(chosen))
        will_come = not hosts or (
            any(host.status in ("live", "paused") for host in hosts)
            and max(unknown) < max(host.world_size for host in hosts)
        )
        if wait and will_come:
            return None
        known = f"its ranks are {min(on)} to {max(on)}" if on else "none is known yet"
        raise ConfigurationError(f"run {run.name!r} has no rank {max(unknown)} with a bridge at {address}: {known}")

    found = look()
    if found is not None:
        return found
    return _as_soon_as_there(
        look, f"waiting for rank {unknown[0]} of run {run.name} {run.place} ... (Ctrl-C ends)", say
    )


def find_or_wait(place: Place, name: str, wait: bool, say: Say) -> FoundRun:
    """The run of that name; with ``wait``, as soon as it exists. Where its training is just being restarted, it waits
    for the next attempt for a limited time. Says on ``say`` what it waits for, and the run's remark.

    Raises:
        RunNotFoundError: there is no such run and ``wait`` is false.
        BrokerError: the servers do not answer.
    """

    def look() -> FoundRun | None:
        try:
            run = place.find(name)
        except RunNotFoundError:
            return None
        return None if run.is_starting else run

    run = look()
    if run is None:
        if not wait:
            place.find(name)
        run = _as_soon_as_there(look, f"waiting for run {name} {place} ... (Ctrl-C ends)", say)
    elif not run.is_live:
        run = _next_attempt(run, look, say)
    return _with_remark(run, say)


def _next_attempt(run: FoundRun, look: Callable[[], FoundRun | None], say: Say) -> FoundRun:
    """The run with its next attempt, if a process of this machine may be about to begin that; as it is otherwise."""
    pid = run.place.find_restart(run)
    if pid is None:
        return run
    deadline = time.monotonic() + _RESTART

    def look_again() -> FoundRun | None:
        found = look()
        is_over = time.monotonic() > deadline or run.place.find_restart(run) is None
        # It may have begun since it was looked for.
        return look() if is_over else found if found is None or found.is_live else None

    waiting = (
        f"run {run.name} has ended ({run.status}), and process {pid} starts its script again: waiting up to "
        f"{_RESTART:g} s for its next attempt ... (Ctrl-C ends; '{run.option}' reads the attempt before)"
    )
    return _as_soon_as_there(look_again, waiting, say)


def newest_run(place: Place, say: Say) -> FoundRun:
    """The newest run, live or not. Says on ``say`` which it is, and its remark.

    Raises:
        RunNotFoundError: there is none.
        BrokerError: the servers do not answer.
    """
    known = place.list()
    if not known:
        raise RunNotFoundError(f"there is no run {place} yet: leave out '--last' to wait for one")
    say(f"the newest run {place} is {known[0].name} ({known[0].status})")
    return _with_remark(known[0], say)


def live_or_wait(place: Place, say: Say) -> FoundRun:
    """The newest live run; when none is live, the next one, however long it takes. Says on ``say`` what it waits for,
    how to read the newest run, which other runs are live, and the run's remark.

    Raises:
        BrokerError: the servers do not answer.
    """
    known = place.list()
    live = [run for run in known if run.is_live]
    if live:
        if len(live) > 1:
            others = ", ".join(run.name for run in live[1:])
            say(f"attaching to {live[0].name}, the newest live run; also live: {others} ('--run NAME' chooses)")
        return _with_remark(live[0], say)
    waiting = f"waiting for a run {place} ... (Ctrl-C ends)"
    if known:
        waiting += (
            f"; the newest there is {known[0].name} ({known[0].status}): this command with '--last' or "
            f"'{known[0].option}' reads it"
        )
    before = {(run.name, run.attempt) for run in known if not run.is_starting}

    def look_again() -> FoundRun | None:
        for run in place.list():
            # A short run can begin and end between two looks.
            if run.is_live or ((run.name, run.attempt) not in before and not run.is_starting):
                return run
        return None

    return _with_remark(_as_soon_as_there(look_again, waiting, say), say)


def _as_soon_as_there(look: Callable[[], FoundRun | None], waiting: str, say: Say) -> FoundRun:
    with exit_on_signal("detached before there was a run"):
        say(waiting)
        while True:
            began = time.monotonic()
            found = look()
            if found is not None:
                return found
            time.sleep(max(_POLL, _PAUSES * (time.monotonic() - began)))


def _with_remark(run: FoundRun, say: Say) -> FoundRun:
    if run.remark:
        say(run.remark)
    return run
