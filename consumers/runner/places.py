"""The two places where runs are: a folder of this machine, and NATS servers."""

import contextlib
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from offloop.bus.errors import RunError, RunNotFoundError
from offloop.bus.net.nats_addresses import how_to_list
from offloop.bus.recording.recording import Recording
from offloop.bus.replay.replay import Replay
from offloop.bus.runs.directory import RUN_FILE, Origin, RunInfo, find_run, in_words, list_runs, runs_dir
from offloop.bus.runs.restarts import find_restart
from offloop.bus.subscriber.merged import MergedSubscriber
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.consumers.runner.entries import Subscription

Stream: TypeAlias = Subscriber | MergedSubscriber | Recording | Replay


class HostRanks(NamedTuple):
    """Ranks of one host."""

    host: str | None = None
    """``None`` for that of the first rank."""
    ranks: tuple[int, ...] = ()
    """All without one."""


@dataclass(frozen=True)
class FoundRun:
    """A run as it was found in a place."""

    place: "Place"
    name: str
    attempt: int
    """The newest one."""
    status: str
    """``live``, ``paused``, or how the newest attempt ended."""
    is_live: bool
    """It is served, or its trainer is about to have it served again."""
    info: RunInfo | None = None
    """Its folder; ``None`` for one in NATS."""
    chosen: tuple[HostRanks, ...] = ()
    """In NATS, the ranks to read, from the recordings of their hosts; by default all of the first rank's host."""
    remark: str = ""
    """A remark for its reader."""

    @property
    def key(self) -> str:
        """Key that distinguishes it from other runs of its place."""
        return self.name if self.info is None else str(self.info.path)

    @property
    def option(self) -> str:
        """The option by which ``consumer`` reads it as it is."""
        return f"--run {self.name}" if self.info is None else f"--replay {shlex.quote(str(self.info.path))}"

    @property
    def is_starting(self) -> bool:
        """True when its broker has begun it and does not serve it yet."""
        return self.status == "live" and not self.is_live

    def attach(self, subscription: Subscription) -> Stream:
        """Its stream: live with its whole history before, or from the recording when nothing serves it any more, where
        ``subscription`` counts when it is read.

        Raises:
            RunError: with ``after``, another attempt of the run has begun meanwhile.
        """
        stream = self.place.attach(self, subscription)
        if isinstance(stream, Recording) or not subscription.after or stream.attempt == self.attempt:
            return stream
        stream.close()
        rest = "" if self.info is None else f", or finish the one before with '--replay {self.info.recording}'"
        raise RunError(
            f"attempt {stream.attempt} of run {self.name!r} has begun just now: start this consumer again for it{rest}"
        )


class FolderRuns:
    """A folder of runs, by default the usual one; as a text it follows ``waiting for a run`` in messages.

    The methods raise RunDirectoryError when the folder, or a run of it, cannot be read.
    """

    is_elsewhere = False
    """True when its runs can only be read."""

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = directory
        self.in_words = in_words(runs_dir(directory))
        """The place as pages name it."""
        self.label = os.path.abspath(runs_dir(directory))
        """Its path, or address, of which pages show the last parts."""

    def __str__(self) -> str:
        return f"in {self.in_words}"

    def list(self) -> Sequence[FoundRun]:
        """Its runs, the newest first."""
        return [self._found(info) for info in list_runs(self.directory)]

    def find(self, name: str) -> FoundRun:
        """The run of that name, or of that folder.

        Raises:
            RunNotFoundError: there is none.
        """
        return self._found(find_run(name, self.directory))

    def _found(self, info: RunInfo) -> FoundRun:
        origin = Origin.of(info.last.info)
        remark = "" if origin is None else f"run {info.name} is a replay of {origin}"
        return FoundRun(
            self, info.name, info.last.number, info.status, info.live or info.away, info=info, remark=remark
        )

    def has(self, name: str) -> bool:
        """Return True if this folder has a run of that name."""
        is_name = name not in ("", ".", "..") and "/" not in name and "\0" not in name
        return is_name and os.path.isfile(runs_dir(self.directory) / name / RUN_FILE)

    def attach(self, run: FoundRun, subscription: Subscription) -> Subscriber | Recording:
        """The stream of a run."""
        assert run.info is not None
        return Subscriber(str(run.info.path), **vars(subscription)) if run.is_live else Recording(run.info.recording)

    def find_restart(self, run: FoundRun) -> int | None:
        """The process of this machine that may be about to begin a run's next attempt."""
        assert run.info is not None
        return find_restart(run.info, list_runs(run.info.path.parent))


class NatsRuns:
    """The runs in the NATS servers at ``address``, to which this process is connected: as :class:`FolderRuns`.

    The methods raise BrokerError when the servers do not answer.
    """

    is_elsewhere = True

    def __init__(self, address: str) -> None:
        self.address = address
        self.in_words = f"NATS at {address}"
        self.label = address.partition("://")[2]

    def __str__(self) -> str:
        return f"at {self.address}"

    def list(self) -> Sequence[FoundRun]:
        """Its runs, the newest first."""
        return self._list()

    def _list(self, name: str | None = None) -> Sequence[FoundRun]:
        from offloop.bus.jetstream.nats_connection import NatsConnection

        return [
            FoundRun(
                *(self, run.run, run.attempt, run.status, run.status in ("live", "paused")),
                remark=_SILENT.format(run.run) if run.is_silent else "",
            )
            for run in NatsConnection.at(self.address).runs(name)
        ]

    def find(self, name: str) -> FoundRun:
        """The run of that name.

        Raises:
            RunNotFoundError: there is none.
        """
        if found := self._list(name):
            return found[0]
        raise RunNotFoundError(f"NATS at {self.address} has no run {name!r}: {how_to_list(self.address)}", run=name)

    def has(self, name: str) -> bool:
        """Return True: the servers are not asked."""
        return bool(name)

    def attach(self, run: FoundRun, subscription: Subscription) -> Subscriber | MergedSubscriber:
        """The stream of a run."""
        from offloop.bus.jetstream.nats_connection import NatsConnection

        servers = NatsConnection.at(self.address).servers
        subscribers = []
        with contextlib.ExitStack() as opened:
            for host, ranks in run.chosen or (HostRanks(),):
                after = {rank: at for rank, at in (subscription.after or {}).items() if rank in ranks or not ranks}
                asked = {**vars(subscription), "after": after}
                one = Subscriber(run.name, stream=servers, host=host, ranks=ranks, **asked)
                subscribers.append(opened.enter_context(one))
            opened.pop_all()
        return subscribers[0] if len(subscribers) == 1 else MergedSubscriber(subscribers)

    def find_restart(self, run: FoundRun) -> int | None:
        """None: processes of other machines are not seen."""
        return None


_SILENT = (
    "run {0} has no bridge that answers: this reads what is in the servers, and waits for more; "
    "'offloop server bridge {0}' on its host copies the rest"
)


Place: TypeAlias = FolderRuns | NatsRuns


def place_of(runs_dir: str | os.PathLike[str] | None, stream: str | None) -> Place:
    """The place that a user named by ``--runs-dir`` or ``--stream``; without both the usual folder."""
    return FolderRuns(runs_dir) if stream is None else NatsRuns(stream)
