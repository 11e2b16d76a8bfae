"""The runs that a broker serves: how they begin, continue after a restart, and end, and who publishes them."""

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from offloop.bus import processes
from offloop.bus.broker.content import boolean, container, integer, integer_or_none, text, text_or_none
from offloop.bus.broker.peers import Peers
from offloop.bus.broker.rank import LiveRank
from offloop.bus.broker.run import BrokerRun, Counts
from offloop.bus.errors import BrokerError, ConfigurationError, RunDirectoryError, RunIsLiveError
from offloop.bus.protocol.frames import MAX_FRAME, check_run_name
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.runs.directory import (
    RUN_FILE,
    RunDirectory,
    check_writable,
    is_name_for,
    is_own_name,
    is_taken,
    new_run_id,
    numbered_names,
    read_run,
)
from offloop.bus.types.demand import Demand
from offloop.bus.types.timeouts import Timeouts

_log = logging.getLogger("offloop.broker")

MAX_REQUESTS = 10
MAX_ANNOUNCED = 100
"""How many runs of one peer may have said hello and not begun."""


@dataclass(frozen=True)
class BrokerStatistics:
    """How a broker is doing; counts since it began."""

    runs: int
    """Runs served now."""
    collected: int
    """Events taken from publishers and sent out."""
    recorded: int
    """Events written to recordings."""
    duplicates: int
    """Events that came a second time and were skipped."""
    refused: int
    """Messages that were malformed or came from unknown peers."""
    asked_again: int
    """How often a publisher was asked to send again."""
    missing: int
    """Events that publishers had to give up before they came: gaps."""
    ended: int
    """Runs that have ended."""


class _Publisher(NamedTuple):
    """What a publisher says of itself in ``hello``."""

    identity: bytes
    rank: int
    publisher_id: str
    pid: int | None
    started: int | None
    host: str | None
    is_replay: bool
    held: Demand | None
    """The demand that it continues with."""
    flight: dict[str, Any] | None = None
    """Where its flight recorder is."""


@dataclass
class AnnouncedRun:
    """A run whose publishers have said hello and sent nothing yet: nothing of it exists, but its name and number."""

    name: str
    attempt: int
    recording: Path
    world_size: int
    local_world_size: int
    info: dict[str, Any]
    peer: str
    """Who said so first: a key, or the address of a host."""
    id: str = ""
    """The identity that it will have: see :attr:`offloop.bus.runs.RunInfo.id`."""
    publishers: dict[int, _Publisher] = field(default_factory=dict)
    announced: float = field(default_factory=time.time)
    """When that was, in seconds since 1970."""


class LiveRuns:
    """Every run at a broker with its publishers. ``control_endpoint`` and ``event_feed`` are where the broker listens;
    with ``directory`` that run's is held already. Processes of this machine are watched by ``poller``."""

    def __init__(
        self,
        root: Path,
        directory: RunDirectory | None,
        control_endpoint: str,
        event_feed: str,
        poller: zmq.Poller,
        peers: Peers,
        timeouts: Timeouts,
    ) -> None:
        self._timeouts = timeouts
        self.control_endpoint = control_endpoint
        self.event_feed = event_feed
        self.served = 0
        """Runs that came."""
        self.refused = 0
        """Messages that were malformed or came from unknown peers."""
        self._counts = Counts()
        self._recorded_before = 0
        self._root = root
        self._directory = directory
        self._poller = poller
        self._live: dict[str, BrokerRun] = {}
        self._publishers: dict[bytes, tuple[BrokerRun, LiveRank]] = {}
        self._peers = peers
        self._announced: dict[str, AnnouncedRun] = {}
        self._announcers: dict[bytes, AnnouncedRun] = {}

    def __iter__(self) -> Iterator[BrokerRun]:
        # What is done with a run may end it.
        return iter(tuple(self._live.values()))

    def __len__(self) -> int:
        return len(self._live)

    def statistics(self) -> BrokerStatistics:
        """How the broker is doing."""
        return BrokerStatistics(
            runs=len(self._live),
            recorded=self._recorded_before + sum(run.writer.written for run in self._live.values()),
            refused=self.refused,
            ended=self.served - len(self._live),
            **asdict(self._counts),
        )

    def get(self, name: str) -> BrokerRun | None:
        """The run of that name, if it is live."""
        return self._live.get(name)

    def find(self, name: str) -> BrokerRun:
        """The run of that name, which begins now if it is announced.

        Raises:
            OffloopError: it is not live here, or cannot begin.
        """
        self.begin_if_announced(name)
        run = self._live.get(name)
        if run is None:
            raise BrokerError(f"run {name!r} is not live here")
        return run

    def publisher(self, identity: bytes) -> tuple[BrokerRun, LiveRank] | None:
        """Whose connection that is, if it is a publisher's."""
        return self._publishers.get(identity)

    def request_missing(self, rank: LiveRank) -> None:
        """Requests that a rank's missing events are sent again, unless that was done just now."""
        if not rank.should_request(time.monotonic(), self._timeouts.retransmit):
            return
        assert rank.identity is not None  # only of those it should be requested
        self._counts.asked_again += 1
        if rank.times_requested == MAX_REQUESTS:
            # ZeroMQ closes the connection of a message that is too large, and does not report it.
            text = (
                f"event {rank.seq + 1} of rank {rank.rank} was asked for {MAX_REQUESTS} times and has not come: a "
                f"message of more than {MAX_FRAME:,} bytes closes the connection; what cannot be sent is passed over "
                "with 'resume'"
            )
            _log.warning("%s: %s", rank.identity[:8].hex(), text)
            self._peers.send(rank.identity, "notice", {"text": text})
        self._peers.send(rank.identity, "retransmit", {"after": rank.retransmit_after})

    # -- they begin ---------------------------------------------------------------------------------------------------

    def greet(self, identity: bytes, hello: dict[str, Any], peer: str) -> tuple[BrokerRun, LiveRank] | AnnouncedRun:
        """Takes in a publisher: of a new attempt, as a further rank, or again after its connection or the broker was
        lost. An attempt begins with its first event (:meth:`begin_announced`), but for that of the directory that was
        given. ``peer`` is whose connection it is, as far as that is known.

        Raises:
            OffloopError: the one that says why not.
        """
        name, number, world_size = text(hello, "run"), integer(hello, "rank"), integer(hello, "world_size", 1)
        if number >= world_size:
            raise ConfigurationError(f"rank {number} of {world_size}: ranks go from 0 to world_size - 1")
        local = integer_or_none(hello, "local_world_size", 1)
        local_world_size = world_size if local is None else local
        if local_world_size > world_size:
            raise ConfigurationError(f"local_world_size is {local_world_size}: it is at most world_size, {world_size}")
        publisher_id, attempt = text(hello, "publisher_id"), integer_or_none(hello, "attempt", 1)
        agreed = integer_or_none(hello, "new_attempt", 1)
        pid, started = integer_or_none(hello, "pid"), integer_or_none(hello, "started")
        host, is_replay = text_or_none(hello, "host"), boolean(hello, "replay")
        info = container(hello, "info", dict)
        container(hello, "events", list)
        held = Demand.from_wire(hello["demand"]) if attempt is not None and hello.get("demand") else None
        flight = container(hello, "flight", dict) or None
        publisher = _Publisher(identity, number, publisher_id, pid, started, host, is_replay, held, flight)
        # It is written down as JSON, which does not take everything that travels: seen before anything is made.
        json.dumps(info, default=str)
        if boolean(hello, "new"):
            name = self._name_new(name, number, text_or_none(hello, "launch"))
        if self._directory is not None and self._directory.name != name:
            raise BrokerError(
                f"this broker serves run {self._directory.name!r} alone: 'offloop server broker' serves any number"
            )
        self._refuse_second_run(identity, name)
        self._forget_disconnected(self._announced.get(name), publisher_id)
        announced = self._announced.get(name)
        if announced is not None and attempt is not None and attempt < announced.attempt:
            raise BrokerError(_overtaken(attempt, name, announced.attempt))
        run = self._live.get(name)
        if run is None and attempt is not None and self._has_begun(name, attempt):
            run = self._resume(name, attempt, number, publisher_id)
        elif run is None and self._directory is not None:
            run = self._begin(name, world_size, info, pid, agreed, local_world_size=local_world_size)
        elif run is None:
            new = AnnouncedRun(name, attempt or agreed or 0, Path(), world_size, local_world_size, info, peer)
            return self._announce(new, publisher)
        return self._admit(run, publisher, attempt or agreed)

    def _name_new(self, name: str, number: int, launch: str | None) -> str:
        """The name of a run that begins with this rank, and is to be called ``name``; the first rank chooses it."""
        check_run_name(name)
        if self._directory is not None:
            return self._directory.name if is_name_for(self._directory.name, name) else name
        if number > 0:
            if name not in self._live and name not in self._announced and is_taken(self._root / name):
                raise BrokerError(
                    f"run {name!r} is there already: give rank {number} the Publisher.run_name of the first rank, "
                    "or all ranks resume=True for another attempt of the run"
                )
            return name
        for one in numbered_names(name):
            self._forget_disconnected(self._announced.get(one))
            begun = self._live.get(one) or self._announced.get(one)
            if begun is None:
                is_free = is_own_name(self._root / one, launch)
            else:
                is_free = number not in (begun.ranks if isinstance(begun, BrokerRun) else begun.publishers)
            if is_free:
                return one
        raise AssertionError("there are always further names")

    def _refuse_second_run(self, identity: bytes, name: str) -> None:
        run, rank = self._publishers.get(identity, (None, None))
        if run is not None and rank is not None and run.name != name and not rank.ended:
            raise BrokerError(f"this connection publishes run {run.name!r}: use another one for run {name!r}")

    def _admit(self, run: BrokerRun, publisher: _Publisher, attempt: int | None) -> tuple[BrokerRun, LiveRank]:
        rank = _rank_of(run, publisher.rank, publisher.publisher_id, attempt)
        self.forget_connection(rank)
        rank.identity, rank.may_cut = publisher.identity, publisher.is_replay
        self._publishers[publisher.identity] = run, rank
        pid, started, host = publisher.pid, publisher.started, publisher.host
        if publisher.held is not None:
            run.leases.hold(publisher.rank, publisher.held, time.monotonic())
        # A container may have the name of its host, and processes of its own.
        if pid is not None and host == socket.gethostname() and processes.is_running(pid, started):
            rank.process, rank.pid = self._watch(pid), pid
        if publisher.flight is not None and (problem := run.flight.attach(rank, publisher.flight)) is not None:
            _log.warning("run %s: %s", run.name, problem)
            self._peers.send(publisher.identity, "notice", {"text": problem})
        with _said_in_the_log(run):
            process = {"pid": pid, "started": started, "host": host}
            run.directory.note_publisher({"rank": publisher.rank, "publisher_id": publisher.publisher_id, **process})
        return run, rank

    # -- they are announced -------------------------------------------------------------------------------------------

    def is_announced(self, identity: bytes) -> bool:
        """Whether it has said hello for a run that has not begun."""
        return identity in self._announcers

    def _announce(self, new: AnnouncedRun, publisher: _Publisher) -> AnnouncedRun:
        self._forget_announcer(publisher.identity)
        run = self._announced.get(new.name)
        if run is None:
            new.attempt, new.recording, new.id = self._next_attempt(new.name, new.attempt, publisher.pid)
            run = new
            others = [one for one in self._announced.values() if one.peer == new.peer]
            if len(others) >= MAX_ANNOUNCED:
                # Its publisher learns it with its first event, and says hello again.
                self._forget_announced(others[0])
        elif new.attempt not in (0, run.attempt):
            raise BrokerError(_overtaken(new.attempt, run.name, run.attempt))
        elif publisher.rank in run.publishers or publisher.rank >= run.world_size:
            raise BrokerError(_taken(publisher.rank, run.name))
        elif len(run.publishers) >= run.local_world_size:
            raise BrokerError(_full(publisher.rank, run))
        self._announced[run.name] = run
        self._announcers[publisher.identity] = run
        run.publishers[publisher.rank] = publisher
        return run

    def begin_announced(self, identity: bytes) -> tuple[BrokerRun, LiveRank] | None:
        """Begins the run that a connection has said hello for, with all publishers that have; ``None`` when it has for
        none.

        Raises:
            OffloopError: it cannot begin; its publishers have to say hello again.
        """
        announced = self._announcers.get(identity)
        if announced is None:
            return None
        self._begin_announced(announced)
        return self._publishers[identity]

    def begin_if_announced(self, name: str) -> None:
        """Begins the run of that name if it is announced, because a consumer is about to follow it.

        Raises:
            OffloopError: it cannot begin; its publishers have to say hello again.
        """
        announced = self._announced.get(name)
        if announced is not None:
            self._begin_announced(announced)

    def announced(self) -> tuple[AnnouncedRun, ...]:
        """The runs whose publishers have said hello and sent nothing yet, the newest first."""
        return tuple(reversed(self._announced.values()))

    def _begin_announced(self, announced: AnnouncedRun) -> None:
        self._forget_announced(announced)
        publishers = tuple(announced.publishers.values())
        run = self._begin(
            *(announced.name, announced.world_size, announced.info, publishers[0].pid, announced.attempt, announced.id),
            local_world_size=announced.local_world_size,
        )
        for publisher in publishers:
            self._admit(run, publisher, None)

    def forget_disconnected(self) -> None:
        """Forgets runs that were announced over connections that are gone."""
        for run in tuple(self._announced.values()):
            self._forget_disconnected(run)

    def _forget_disconnected(self, run: AnnouncedRun | None, publisher_id: str | None = None) -> None:
        for publisher in () if run is None else tuple(run.publishers.values()):
            if publisher.publisher_id == publisher_id or not self._peers.is_there(publisher.identity):
                self._forget_announcer(publisher.identity)

    def _forget_announcer(self, identity: bytes) -> None:
        run = self._announcers.pop(identity, None)
        if run is not None:
            run.publishers = {rank: one for rank, one in run.publishers.items() if one.identity != identity}
            if not run.publishers:
                del self._announced[run.name]

    def _forget_announced(self, run: AnnouncedRun) -> None:
        del self._announced[run.name]
        for publisher in run.publishers.values():
            del self._announcers[publisher.identity]

    def _has_begun(self, name: str, attempt: int) -> bool:
        """Whether there is anything of an attempt, or of one after it; in a directory that was given there is."""
        if self._directory is not None:
            return True
        path = self._root / check_run_name(name)
        return (path / RUN_FILE).exists() and any(one.number >= attempt for one in read_run(path).attempts)

    def _next_attempt(self, name: str, attempt: int, pid: int | None) -> tuple[int, Path, str]:
        """The number and recording of a run's next attempt, or of that attempt, of which there is nothing, and the
        run's identity."""
        path = self._root / check_run_name(name)
        number, recording, run_id = 1, path / "recording-1.mcap", new_run_id()
        if path.exists():
            directory = RunDirectory(self._root, name)
            try:
                _refuse_if_away(directory, pid)
                (number, recording), run_id = directory.next_attempt(), directory.run_id
            finally:
                directory.release()
        else:
            check_writable(self._root)
        if attempt > number:
            number, recording = attempt, path / f"recording-{attempt}.mcap"
        return number, recording, run_id

    def _begin(
        self,
        name: str,
        world_size: int,
        info: dict[str, Any],
        pid: int | None,
        attempt: int | None = None,
        run_id: str | None = None,
        *,
        local_world_size: int,
    ) -> BrokerRun:
        directory = self._directory_of(name, run_id)
        try:
            _refuse_if_away(directory, pid)
            # The recording first: a reader that finds the run live may open it at once.
            number, recording = directory.next_attempt()
            if attempt is not None and attempt > number:
                number, recording = attempt, recording.with_name(f"recording-{attempt}.mcap")
            elif attempt not in (None, number):
                raise BrokerError(f"attempt {attempt} of run {name!r} cannot begin: another one has begun since")
            writer = RecordingWriter(recording, name, number, directory.run_id)
            try:
                directory.begin_attempt(recording, number, info, world_size, local_world_size=local_world_size)
                directory.announce(number, self.control_endpoint, self.event_feed)
                run = BrokerRun(directory, number, writer, world_size, self._timeouts, self._counts, local_world_size)
            except BaseException:
                writer.discard()
                raise
        except BaseException:
            directory.release()
            raise
        return self._serve(run)

    def resume_given(self) -> None:
        """Takes up the run of the directory that was given, where the broker before this one left it.

        Raises:
            BrokerError: its newest attempt has ended, or there is none.
        """
        assert self._directory is not None  # it is given where a run is resumed
        entry = self._directory.resumable()
        self._resume(self._directory.name, 0 if entry is None else int(entry["attempt"]))

    def _resume(self, name: str, attempt: int, number: int = 0, publisher_id: str | None = None) -> BrokerRun:
        if not (self._root / check_run_name(name) / RUN_FILE).exists():
            raise BrokerError(f"attempt {attempt} of run {name!r} cannot continue: its directory is gone")
        directory = self._directory_of(name)
        try:
            _refuse_others(directory, number, publisher_id)
            recording, world_size, local_world_size, publishers = directory.resume_attempt(attempt)
            writer = RecordingWriter.resume(recording, name, attempt, directory.run_id)
            run = BrokerRun(directory, attempt, writer, world_size, self._timeouts, self._counts, local_world_size)
            directory.announce(attempt, self.control_endpoint, self.event_feed)
        except BaseException:
            directory.release()
            raise
        for entry in publishers:
            self._expect(run, entry)
        if any(rank.ended for rank in run.ranks.values()):
            _note_endings(run)
        _log.warning("attempt %d of run %s continues with a new broker", attempt, name)
        return self._serve(run)

    def _expect(self, run: BrokerRun, entry: dict[str, Any]) -> None:
        """A publisher of an attempt that is continued, which may come again, or may have died in the meantime."""
        rank = run.ranks.setdefault(int(entry["rank"]), LiveRank(int(entry["rank"])))
        rank.publisher_id = str(entry.get("publisher_id"))
        if entry.get("host") == socket.gethostname() and not rank.ended:
            if processes.is_running(entry.get("pid"), entry.get("started")):
                rank.pid = int(entry["pid"])
                rank.process = self._watch(rank.pid)
            else:
                rank.died = time.monotonic()

    def _directory_of(self, name: str, run_id: str | None = None) -> RunDirectory:
        if self._directory is not None and self._directory.name == name:
            return self._directory
        return RunDirectory(self._root, name, run_id)

    def _serve(self, run: BrokerRun) -> BrokerRun:
        self._live[run.name] = run
        self.served += 1
        return run

    # -- they end -----------------------------------------------------------------------------------------------------

    def forget_connection(self, rank: LiveRank) -> None:
        """Nothing is taken from a rank's connection any more: it has ended, or has another one."""
        self.unwatch(rank)
        rank.is_back()
        rank.names.clear()
        # A connection may have begun something else since.
        if rank.identity is not None and self._publishers.get(rank.identity, (None, None))[1] is rank:
            del self._publishers[rank.identity]

    def end(self, run: BrokerRun) -> str | None:
        """Closes a run's record, writes down how it ended, and gives its directory back. Returns why it could not be
        written down, if it could not."""
        run.close_recording()
        unwritten = None
        try:
            run.directory.end_attempt(run.ending, run.incomplete, run.reached, gaps=run.gaps)
        except RunDirectoryError as error:
            unwritten = f"it is {run.ending.status}, but that cannot be written down: {error}"
            _log.error("run %s: %s", run.name, unwritten)
        run.directory.release()
        for rank in run.ranks.values():
            self.forget_connection(rank)
        del self._live[run.name]
        self._recorded_before += run.writer.written
        return unwritten

    def close(self) -> None:
        """Gives the directory back that no run came for."""
        if self._directory is not None and self.served == 0:
            self._directory.release()

    # -- processes ----------------------------------------------------------------------------------------------------

    def _watch(self, pid: int) -> int | None:
        """A file descriptor that becomes readable when a process of this machine ends, if the system has such."""
        try:
            descriptor = os.pidfd_open(pid)
        except (AttributeError, OSError, OverflowError):
            return None
        self._poller.register(descriptor, zmq.POLLIN)
        return descriptor

    def unwatch(self, rank: LiveRank) -> None:
        """Stops watching a rank's process."""
        rank.pid = None
        if rank.process is not None:
            self._poller.unregister(rank.process)
            os.close(rank.process)
            rank.process = None


def _refuse_if_away(directory: RunDirectory, pid: int | None) -> None:
    """A run whose broker is gone belongs to its trainer for as long as that lives; another attempt would put an end to
    what it continues."""
    entry = directory.resumable()
    for publisher in (entry or {}).get("publishers", ()):
        other = publisher.get("pid")
        here = publisher.get("host") == socket.gethostname()
        if here and other != pid and processes.is_running(other, publisher.get("started")):
            raise RunIsLiveError(
                f"run {directory.name!r} is live already: its trainer, process {other}, continues and finds this "
                "broker again; choose another run name, or end that process",
                run=directory.name,
            )


def _refuse_others(directory: RunDirectory, number: int, publisher_id: str | None) -> None:
    """An attempt is taken up for its own publishers alone."""
    for publisher in (directory.resumable() or {}).get("publishers", ()):
        if (
            publisher_id is not None
            and publisher.get("rank") == number
            and publisher.get("publisher_id") != publisher_id
        ):
            raise BrokerError(f"rank {number} of run {directory.name!r} is another trainer's: choose another run name")


def _rank_of(run: BrokerRun, number: int, publisher_id: str, attempt: Any) -> LiveRank:
    """The rank that says hello: a new one, or the same one again."""
    if attempt is not None and attempt != run.attempt:
        raise BrokerError(_overtaken(attempt, run.name, run.attempt))
    rank = run.ranks.get(number)
    if rank is None and number < run.world_size and len(run.ranks) >= run.local_world_size:
        raise BrokerError(_full(number, run))
    if rank is None and number < run.world_size:
        rank = run.ranks[number] = LiveRank(number, publisher_id)
    elif rank is not None and not rank.publisher_id:
        # It could not be written down before the broker was lost.
        rank.publisher_id = publisher_id
    elif rank is None or rank.publisher_id != publisher_id:
        raise BrokerError(_taken(number, run.name))
    return rank


def _overtaken(attempt: int, name: str, other: int) -> str:
    return f"attempt {attempt} of run {name!r} cannot continue: attempt {other} has begun since"


def _taken(rank: int, name: str) -> str:
    return f"rank {rank} of run {name!r} is there already: choose another run name, or wait until it ends"


def _full(rank: int, run: BrokerRun | AnnouncedRun) -> str:
    return (
        f"rank {rank} of run {run.name!r} is one more than the {run.local_world_size} that publish to this broker: "
        "name the broker of its own host, or give all ranks here the same local_world_size"
    )


def _note_endings(run: BrokerRun) -> None:
    """How the ranks ended that had ended before the broker did, by the recording."""
    recording = Recording(run.writer.path)
    for ending in recording.read_endings():
        run.note_ending(ending)
    run.last_end = time.monotonic()


@contextlib.contextmanager
def _said_in_the_log(run: BrokerRun) -> Iterator[None]:
    """What cannot be written down about a run stops neither the broker nor the event feed."""
    try:
        yield
    except (OSError, RunDirectoryError) as error:
        _log.error("run %s: %s", run.name, error)
