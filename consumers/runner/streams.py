"""Which run a consumer reads, and from where: the live stream or a recording."""

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from offloop.bus.errors import ConfigurationError, RunError, RunNotFoundError
from offloop.bus.net.curve import ClientSecurity
from offloop.bus.net.nats_addresses import how_to_list, is_nats, what_is_at
from offloop.bus.net.requests import is_silent, list_remote_hosts, list_remote_runs
from offloop.bus.recording.recording import Recording
from offloop.bus.replay.replay import Replay
from offloop.bus.runs.announcement import Announcement, list_announcements
from offloop.bus.runs.directory import Origin, RunInfo, find_run, in_words, list_runs, runs_dir
from offloop.bus.runs.restarts import find_restart
from offloop.bus.subscriber.merged import MergedSubscriber
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.bus.terminal import exit_on_signal
from offloop.consumers.runner.entries import Subscription

Stream: TypeAlias = Subscriber | MergedSubscriber | Recording | Replay

Say: TypeAlias = Callable[[str], None]
Where: TypeAlias = str | os.PathLike[str] | None

_POLL = 0.2
_PAUSES = 9
"""To look into a folder of many runs takes a while: it is left alone for so many times as long before the next look."""
_LEFT = "detached before there was a run"
_RESTART = 60.0
"""How long, in seconds, a training that is started again is waited for."""


class RemoteRunInfo(NamedTuple):
    """A run at a broker elsewhere."""

    broker: str
    """The broker's address."""
    name: str
    attempt: int
    status: str
    """``live``, or how the newest attempt ended."""
    security: ClientSecurity | None
    chosen: tuple["HostRanks", ...] = ()
    """Which ranks are read, from the recordings of their hosts; without one all that the first rank's host has."""
    is_silent: bool = False
    """Whether it continues by what was last said of it in a stream, where nothing more is said."""


class HostRanks(NamedTuple):
    """Ranks of one host."""

    host: str | None = None
    """``None`` for that of the first rank."""
    ranks: tuple[int, ...] = ()
    """All without one."""


def attach(run: RunInfo | RemoteRunInfo, subscription: Subscription) -> Stream:
    """The stream of a run: live with its whole history before, or from the recording when nothing serves it any
    more, where ``subscription`` counts when it is read.

    Raises:
        RunError: with ``after``, another attempt of the run has begun meanwhile.
    """
    subscriber: Subscriber | MergedSubscriber
    if isinstance(run, RemoteRunInfo):
        subscriber = _subscribe(run, subscription)
        attempt, rest = run.attempt, f"'offloop show {run.name} --broker {run.broker}' shows it"
    elif run.live or run.away:
        subscriber = Subscriber(str(run.path), **vars(subscription))
        attempt, rest = run.last.number, f"or finish the one before with '--replay {run.recording}'"
    else:
        return Recording(run.recording)
    if subscription.after and subscriber.attempt != attempt:
        subscriber.close()
        raise RunError(
            f"attempt {subscriber.attempt} of run {run.name!r} has begun just now: start this consumer again for "
            f"it, {rest}"
        )
    return subscriber


def _subscribe(run: RemoteRunInfo, subscription: Subscription) -> Subscriber | MergedSubscriber:
    subscribers = []
    with contextlib.ExitStack() as opened:
        for host, ranks in run.chosen or (HostRanks(),):
            after = {rank: at for rank, at in (subscription.after or {}).items() if rank in ranks or not ranks}
            asked = {**vars(subscription), "after": after}
            one = Subscriber(run.name, broker=run.broker, security=run.security, host=host, ranks=ranks, **asked)
            subscribers.append(opened.enter_context(one))
        opened.pop_all()
    return subscribers[0] if len(subscribers) == 1 else MergedSubscriber(subscribers)


def list_remote(broker: str, security: ClientSecurity | None, name: str | None = None) -> list[RemoteRunInfo]:
    """The runs at a broker elsewhere, the newest first; with ``name`` that one, if it is there.

    Raises:
        BrokerError: no broker answers there.
    """
    return [
        RemoteRunInfo(
            *(broker, run["run"], run["attempt"], str(run.get("status")), security),
            is_silent=is_nats(broker) and is_silent(run),
        )
        for run in list_remote_runs(broker, security, name)
    ]


def _say_silence(run: RemoteRunInfo, say: Say) -> RemoteRunInfo:
    if run.is_silent:
        say(
            f"run {run.name} has no bridge that answers: this reads what is in the servers, and waits for more; "
            f"'offloop server bridge {run.name}' on its host copies the rest"
        )
    return run


def find_remote(broker: str, name: str, security: ClientSecurity | None, wait: bool, say: Say) -> RemoteRunInfo:
    """The run of that name at a broker elsewhere; with ``wait``, as soon as it exists. Says on ``say`` what it waits
    for.

    Raises:
        RunNotFoundError: there is no such run, and ``wait`` is false.
        BrokerError: no broker answers there.
    """

    def look() -> RemoteRunInfo | None:
        return next(iter(list_remote(broker, security, name)), None)

    found = look()
    if found is not None:
        return _say_silence(found, say)
    if not wait:
        raise RunNotFoundError(f"{what_is_at(broker)} has no run {name!r}: {how_to_list(broker)}", run=name)
    return _as_soon_as_there(look, f"waiting for run {name} at {broker} ... (Ctrl-C ends)", say)


def choose_ranks(run: RemoteRunInfo, ranks: Sequence[int], wait: bool, say: Say) -> RemoteRunInfo:
    """A run in a stream, of which some ranks alone are read, from their hosts; with ``wait``, as soon as their hosts
    are known. Says on ``say`` what it waits for.

    Raises:
        ConfigurationError: there is no such rank, and there will be none or ``wait`` is false.
        BrokerError: the servers do not answer.
    """
    unknown: list[int] = []

    def look() -> RemoteRunInfo | None:
        hosts = list_remote_hosts(run.broker, run.name)
        on = {rank: str(host["host"]) for host in hosts for rank in host["ranks"]}
        unknown[:] = (rank for rank in ranks if rank not in on)
        if not unknown:
            chosen = [
                HostRanks(
                    None if host == on.get(0) else host, tuple(one for one in sorted(set(ranks)) if on[one] == host)
                )
                for host in dict.fromkeys(on[rank] for rank in sorted(ranks))
            ]
            return run._replace(chosen=tuple(chosen))
        will_come = not hosts or (
            any(host["status"] in ("live", "paused") for host in hosts)
            and max(unknown) < max(host["world_size"] for host in hosts)
        )
        if wait and will_come:
            return None
        known = f"its ranks are {min(on)} to {max(on)}" if on else "none is known yet"
        raise ConfigurationError(f"run {run.name!r} has no rank {max(unknown)} with a bridge at {run.broker}: {known}")

    found = look()
    if found is not None:
        return found
    what = f"waiting for rank {unknown[0]} of run {run.name} at {run.broker} ... (Ctrl-C ends)"
    return _as_soon_as_there(look, what, say)


def find_or_wait(name: str, where: Where, wait: bool, say: Say, *, as_it_is: bool = False) -> RunInfo:
    """The run of that name or directory; with ``wait``, as soon as it exists. Where its training has ended and is just
    being started again, its next attempt is waited for, for a limited time, but not ``as_it_is``. Says on ``say`` what
    it waits for, and of what the run is a replay.

    Raises:
        RunNotFoundError: there is no such run and ``wait`` is false.
    """

    def look() -> RunInfo | None:
        try:
            run = find_run(name, where)
        except RunNotFoundError:
            return None
        return None if _is_about_to_be_live(run) else run

    run = look()
    if run is None:
        if not wait:
            find_run(name, where)
        run = _as_soon_as_there(look, f"waiting for run {name} in {in_words(runs_dir(where))} ... (Ctrl-C ends)", say)
    elif not (as_it_is or is_live(run)):
        run = _next_attempt(run, look, say)
    _say_origin(run, say)
    return run


def _next_attempt(run: RunInfo, look: Callable[[], RunInfo | None], say: Say) -> RunInfo:
    """The run with its next attempt, if a process of this machine may be about to begin that; as it is otherwise."""
    root = run.path.parent
    pid = find_restart(run, list_runs(root))
    if pid is None:
        return run
    deadline = time.monotonic() + _RESTART

    def look_again() -> RunInfo | None:
        found = look()
        is_over = time.monotonic() > deadline or find_restart(run, list_runs(root)) is None
        # It may have begun since it was looked for.
        return look() if is_over else found if found is None or is_live(found) else None

    waiting = (
        f"run {run.name} has ended ({run.status}), and process {pid} starts its script again: waiting up to "
        f"{_RESTART:g} s for its next attempt ... (Ctrl-C ends; '--replay {shlex.quote(str(run.path))}' reads the "
        "attempt before)"
    )
    return _as_soon_as_there(look_again, waiting, say)


def newest_run(where: Where, say: Say) -> RunInfo:
    """The newest run, live or not. Says on ``say`` which it is, and of what it is a replay.

    Raises:
        RunNotFoundError: there is none.
    """
    run = _newest(list_runs(where), f"in {in_words(runs_dir(where))}", say)
    _say_origin(run, say)
    return run


def newest_remote(broker: str, security: ClientSecurity | None, say: Say) -> RemoteRunInfo:
    """The newest run at a broker elsewhere, live or not. Says on ``say`` which it is.

    Raises:
        RunNotFoundError: there is none.
        BrokerError: no broker answers there.
    """
    return _say_silence(_newest(list_remote(broker, security), f"at {broker}", say), say)


def live_or_wait(where: Where, say: Say) -> RunInfo:
    """The newest live run; when none is live, the next one, however long it takes.

    Says on ``say`` what it waits for, how to read the newest run that is there, which trainers are starting, which
    other runs are live, and of what the run is a replay.
    """
    run = _live_or_next(
        lambda: list_runs(where),
        f"in {in_words(runs_dir(where))}",
        lambda run: f"--replay {shlex.quote(str(run.path))}",
        lambda: list_announcements(where),
        say,
    )
    _say_origin(run, say)
    return run


def live_remote_or_wait(broker: str, security: ClientSecurity | None, say: Say) -> RemoteRunInfo:
    """The newest live run at a broker elsewhere; when none is live, the next one, however long it takes. Says
    on ``say`` what :func:`live_or_wait` does, but for trainers that are starting, of which a broker does not know.

    Raises:
        BrokerError: no broker answers there.
    """
    run = _live_or_next(
        lambda: list_remote(broker, security), f"at {broker}", lambda run: f"--run {run.name}", list, say
    )
    return _say_silence(run, say)


_Run = TypeVar("_Run", RunInfo, RemoteRunInfo)


def _newest(known: Sequence[_Run], place: str, say: Say) -> _Run:
    if not known:
        raise RunNotFoundError(f"there is no run {place} yet: leave out '--last' to wait for one")
    say(f"the newest run {place} is {known[0].name} ({known[0].status})")
    return known[0]


def _live_or_next(
    look: Callable[[], Sequence[_Run]],
    place: str,
    option_for: Callable[[_Run], str],
    announcements: Callable[[], Sequence[Announcement]],
    say: Say,
) -> _Run:
    known = look()
    live = [run for run in known if is_live(run)]
    if live:
        _say_others([run.name for run in live], say)
        return live[0]
    waiting = f"waiting for a run {place} ... (Ctrl-C ends)"
    if known:
        waiting += (
            f"; the newest there is {known[0].name} ({known[0].status}): this command with '--last' or "
            f"'{option_for(known[0])}' reads it"
        )
    identities = {_identity(run) for run in known if not _is_about_to_be_live(run)}
    told: set[Announcement] = set()

    def look_again() -> _Run | None:
        # Looked up before the runs: an announcement is taken back when its run is live.
        starting = set(announcements())
        for run in look():
            # A short run can begin and end between two looks.
            if is_live(run) or (_identity(run) not in identities and not _is_about_to_be_live(run)):
                return run
        for trainer in sorted(starting - told):
            say(f"{trainer} is starting")
        for trainer in sorted(told - starting):
            say(f"{trainer} is gone, and no run of it began here: still waiting")
        told.clear()
        told.update(starting)
        return None

    return _as_soon_as_there(look_again, waiting, say)


def _as_soon_as_there(look: Callable[[], _Run | None], waiting: str, say: Say) -> _Run:
    with exit_on_signal("detached before there was a run"):
        say(waiting)
        while True:
            began = time.monotonic()
            found = look()
            if found is not None:
                return found
            time.sleep(max(_POLL, _PAUSES * (time.monotonic() - began)))


def is_live(run: RunInfo | RemoteRunInfo) -> bool:
    """Whether something serves it, or its trainer is about to have it served again."""
    return run.live or run.away if isinstance(run, RunInfo) else run.status == "live"


def _is_about_to_be_live(run: RunInfo | RemoteRunInfo) -> bool:
    """Whether its broker has begun it and does not serve it yet."""
    return run.status == "live" and not is_live(run)


def _identity(run: RunInfo | RemoteRunInfo) -> tuple[str, int]:
    return run.name, run.last.number if isinstance(run, RunInfo) else run.attempt


def _say_others(live: Sequence[str], say: Say) -> None:
    if len(live) > 1:
        say(f"attaching to {live[0]}, the newest live run; also live: {', '.join(live[1:])} ('--run NAME' chooses)")


def _say_origin(run: RunInfo, say: Say) -> None:
    origin = Origin.of(run.last.info)
    if origin is not None:
        say(f"run {run.name} is a replay of {origin}")
