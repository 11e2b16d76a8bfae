"""The run that a broker serves: how it begins, continues after a restart, and ends, and who publishes it."""

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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
from offloop.bus.runs.directory import RunDirectory, is_name_for
from offloop.bus.types.demand import Demand
from offloop.bus.types.timeouts import Timeouts

_log = logging.getLogger("offloop.broker")

MAX_REQUESTS = 10


@dataclass(frozen=True)
class BrokerStatistics:
    """How a broker is doing; counts since it began."""

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


class RunService:
    """Begins, continues and ends the run of a broker, and knows its publishers.

    ``directory`` is the run's, ``control_endpoint`` and ``event_feed`` are where the broker listens. The publishers'
    processes are watched by ``poller``."""

    def __init__(
        self,
        directory: RunDirectory,
        control_endpoint: str,
        event_feed: str,
        poller: zmq.Poller,
        peers: Peers,
        timeouts: Timeouts,
    ) -> None:
        self._timeouts = timeouts
        self.event_feed = event_feed
        self.run: BrokerRun | None = None
        """The run while it is live."""
        self.has_ended = False
        """Whether it was live and is not any more."""
        self.refused = 0
        """Messages that were malformed or came from unknown peers."""
        self._control_endpoint = control_endpoint
        self._counts = Counts()
        self._recorded = 0
        self._directory = directory
        self._poller = poller
        self._publishers: dict[bytes, LiveRank] = {}
        self._peers = peers

    def statistics(self) -> BrokerStatistics:
        """How the broker is doing."""
        recorded = self._recorded if self.run is None else self.run.writer.written
        return BrokerStatistics(recorded=recorded, refused=self.refused, **asdict(self._counts))

    def find(self, name: str) -> BrokerRun:
        """The run, which a request has to name.

        Raises:
            BrokerError: it has another name, or is not live.
        """
        if self.run is None or self.run.name != name:
            raise BrokerError(f"run {name!r} is not live here")
        return self.run

    def publisher(self, identity: bytes) -> tuple[BrokerRun, LiveRank] | None:
        """The run and the rank whose connection that is, if it is a publisher's."""
        rank = self._publishers.get(identity)
        return None if rank is None or self.run is None else (self.run, rank)

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

    # -- it begins ----------------------------------------------------------------------------------------------------

    def greet(self, identity: bytes, hello: dict[str, Any]) -> tuple[BrokerRun, LiveRank]:
        """Takes in a publisher: of a new attempt, which begins with it, as a further rank, or again after its
        connection or the broker was lost.

        Raises:
            OffloopError: it cannot publish here.
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
        own = self._directory.name
        if name != own and not (boolean(hello, "new") and is_name_for(own, check_run_name(name))):
            raise BrokerError(f"this broker serves run {own!r} alone: start a publisher of {name!r} without broker=")
        run = self.run
        if run is None:
            if self.has_ended:
                raise BrokerError(f"run {own!r} has ended: publish without broker=, which starts another broker")
            if attempt is not None:
                status = self._directory.describe_status()
                raise BrokerError(f"attempt {attempt} of run {own!r} cannot continue: {status}")
            run = self._begin(world_size, info, pid, agreed, local_world_size)
        return self._admit(run, publisher, attempt or agreed)

    def _admit(self, run: BrokerRun, publisher: _Publisher, attempt: int | None) -> tuple[BrokerRun, LiveRank]:
        rank = _rank_of(run, publisher.rank, publisher.publisher_id, attempt)
        self.forget_connection(rank)
        rank.identity, rank.may_cut = publisher.identity, publisher.is_replay
        self._publishers[publisher.identity] = rank
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

    def _begin(
        self, world_size: int, info: dict[str, Any], pid: int | None, agreed: int | None, local_world_size: int
    ) -> BrokerRun:
        """Begins the next attempt; ``agreed`` is its number where hosts have agreed on one."""
        directory = self._directory
        _refuse_if_away(directory, pid)
        # The recording first: a reader that finds the run live may open it at once.
        number, recording = directory.next_attempt()
        if agreed is not None and agreed > number:
            number, recording = agreed, recording.with_name(f"recording-{agreed}.mcap")
        elif agreed not in (None, number):
            raise BrokerError(f"attempt {agreed} of run {directory.name!r} cannot begin: another one has begun since")
        writer = RecordingWriter(recording, directory.name, number, directory.run_id)
        try:
            directory.begin_attempt(recording, number, info, world_size, local_world_size=local_world_size)
            directory.announce(number, self._control_endpoint, self.event_feed)
            self.run = BrokerRun(directory, number, writer, world_size, self._timeouts, self._counts, local_world_size)
        except BaseException:
            writer.discard()
            raise
        return self.run

    def resume(self) -> None:
        """Resumes the newest attempt where the broker before this one left it.

        Raises:
            BrokerError: it has ended, or there is none.
        """
        directory = self._directory
        entry = directory.resumable()
        attempt = 0 if entry is None else int(entry["attempt"])
        recording, world_size, local_world_size, publishers = directory.resume_attempt(attempt)
        writer = RecordingWriter.resume(recording, directory.name, attempt, directory.run_id)
        run = BrokerRun(directory, attempt, writer, world_size, self._timeouts, self._counts, local_world_size)
        directory.announce(attempt, self._control_endpoint, self.event_feed)
        for known in publishers:
            self._expect(run, known)
        if any(rank.ended for rank in run.ranks.values()):
            _note_endings(run)
        _log.warning("attempt %d of run %s continues with a new broker", attempt, directory.name)
        self.run = run

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

    # -- it ends ------------------------------------------------------------------------------------------------------

    def forget_connection(self, rank: LiveRank) -> None:
        """Nothing is taken from a rank's connection any more: it has ended, or has another one."""
        self.unwatch(rank)
        rank.is_back()
        rank.names.clear()
        if rank.identity is not None:
            self._publishers.pop(rank.identity, None)

    def end(self, run: BrokerRun) -> str | None:
        """Closes the run's recording, writes down how it ended, and gives its directory back. Returns why it could not
        be written down, if it could not."""
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
        self.run, self.has_ended = None, True
        self._recorded = run.writer.written
        return unwritten

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


def _full(rank: int, run: BrokerRun) -> str:
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
