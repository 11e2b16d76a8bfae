"""The places of runs, a folder of this machine and NATS servers, and the choice of the run to read."""

import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from offloop.bus.errors import RunError, RunNotFoundError
from offloop.bus.net.nats_addresses import no_such_run
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.replay import Replay
from offloop.bus.runs.directory import RUN_FILE, RunInfo, find_run, in_words, list_runs, runs_dir
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.bus.terminal import exit_on_signal
from offloop.consumers.runner.entries import Subscription

Stream: TypeAlias = Subscriber | Recording | Replay


@dataclass(frozen=True)
class FoundRun:
    place: "Place"
    name: str
    attempt: int  # the newest one
    status: str  # live, paused, or how the newest attempt ended
    is_live: bool  # A broker serves it, or its trainer is about to start one again
    info: RunInfo | None = None  # its folder; None in NATS
    remark: str = ""
    id: str | None = None  # of the run; differs between runs that had one name

    @property
    def key(self) -> str:
        return self.name if self.info is None else str(self.info.path)

    @property
    def option(self) -> str:
        return f"--run {self.name}" if self.info is None else f"--replay {shlex.quote(str(self.info.path))}"

    @property
    def is_starting(self) -> bool:
        """True when its broker has begun it and does not serve it yet."""
        return self.status == "live" and not self.is_live

    def attach(self, subscription: Subscription) -> Stream:
        """Its stream: live with its whole history, or from the recording without a broker.

        Raises RunError when, with ``after``, another attempt of the run has begun meanwhile."""
        stream = self.place.attach(self, subscription)
        if isinstance(stream, Recording) or not subscription.after or stream.attempt == self.attempt:
            return stream
        stream.close()
        rest = "" if self.info is None else f", or finish the one before with '--replay {self.info.recording}'"
        raise RunError(
            f"attempt {stream.attempt} of run {self.name!r} has just begun: start this consumer again for it{rest}"
        )


class FolderRuns:
    """A folder of runs, by default the usual one; as a text it follows ``waiting for a run`` in messages.

    The methods raise RunDirectoryError when the folder, or a run of it, cannot be read."""

    is_elsewhere = False  # true when its runs can only be read

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = directory
        self.in_words: str = in_words(runs_dir(directory))

    def __str__(self) -> str:
        return f"in {self.in_words}"

    def list(self) -> Sequence[FoundRun]:
        return [self._found(info) for info in list_runs(self.directory)]

    def find(self, name: str) -> FoundRun:
        return self._found(find_run(name, self.directory))

    def _found(self, info: RunInfo) -> FoundRun:
        return FoundRun(self, info.name, info.last.number, info.status, info.live or info.away, info=info, id=info.id)

    def has(self, name: str) -> bool:
        is_name = name not in ("", ".", "..") and "/" not in name and "\0" not in name
        return is_name and os.path.isfile(runs_dir(self.directory) / name / RUN_FILE)

    def attach(self, run: FoundRun, subscription: Subscription) -> Subscriber | Recording:
        assert run.info is not None
        return Subscriber(str(run.info.path), **vars(subscription)) if run.is_live else Recording(run.info.recording)


class NatsRuns:
    """The runs in the NATS servers at ``address``, with the methods of :class:`FolderRuns`.

    They raise BrokerError when the servers do not answer."""

    is_elsewhere = True

    def __init__(self, address: str) -> None:
        self.address = address
        self.in_words: str = f"NATS at {address}"

    def __str__(self) -> str:
        return f"at {self.address}"

    def list(self, name: str | None = None) -> Sequence[FoundRun]:
        from offloop.bus.jetstream.nats_connection import NatsConnection

        return [
            FoundRun(
                *(self, run.run, run.attempt, run.status, run.status in ("live", "paused")),
                remark=_SILENT.format(run.run) if run.is_silent else "",
                id=run.id,
            )
            for run in NatsConnection.at(self.address).runs(name)
        ]

    def find(self, name: str) -> FoundRun:
        if found := self.list(name):
            return found[0]
        raise no_such_run(self.address, name)

    def has(self, name: str) -> bool:
        # The servers are not asked.
        return bool(name)

    def attach(self, run: FoundRun, subscription: Subscription) -> Subscriber:
        from offloop.bus.jetstream.nats_connection import NatsConnection

        servers = NatsConnection.at(self.address).servers
        return Subscriber(run.name, stream=servers, **vars(subscription))


_SILENT = (
    "run {0} has no bridge that answers: this reads what is in the servers, and waits for more; "
    "'offloop server bridge {0}' on its host copies the rest"
)


Place: TypeAlias = FolderRuns | NatsRuns


def place_of(runs_dir: str | os.PathLike[str] | None, stream: str | None) -> Place:
    return FolderRuns(runs_dir) if stream is None else NatsRuns(stream)


Say: TypeAlias = Callable[[str], None]

_POLL = 0.2
_PAUSES = 9  # between two looks into a folder of many runs, this many times the duration of the last look passes


def find_or_wait(place: Place, name: str, wait: bool, say: Say) -> FoundRun:
    """Return the run of that name; with ``wait``, as soon as it exists.

    ``say`` reports what it waits for, and the run's remark. Raises RunNotFoundError or BrokerError."""

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
    return _with_remark(run, say)


def newest_run(place: Place, say: Say) -> FoundRun:
    """Return the newest run, and report its name and remark. Raises RunNotFoundError or BrokerError."""
    known = place.list()
    if not known:
        raise RunNotFoundError(f"there is no run {place} yet: leave out '--last' to wait for one")
    say(f"the newest run {place} is {known[0].name} ({known[0].status})")
    return _with_remark(known[0], say)


def live_or_wait(place: Place, say: Say) -> FoundRun:
    """Return the newest live run, or else the next one to begin.

    ``say`` reports what it waits for, how to read the newest run, other live runs, and the run's remark. Raises
    BrokerError when the servers do not answer."""
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
    before = {(run.name, run.id, run.attempt) for run in known if not run.is_starting}

    def look_again() -> FoundRun | None:
        for run in place.list():
            # A short run can begin and end between two looks.
            if run.is_live or ((run.name, run.id, run.attempt) not in before and not run.is_starting):
                return run
        return None

    return _with_remark(_as_soon_as_there(look_again, waiting, say), say)


def _as_soon_as_there(look: Callable[[], FoundRun | None], waiting: str, say: Say) -> FoundRun:
    with exit_on_signal("detached before a run began"):
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
