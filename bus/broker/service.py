"""The run that a broker serves: how it begins, continues after a restart, and ends, and who publishes it."""

import json
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

from offloop.bus import processes
from offloop.bus.broker.messages import HelloMessage
from offloop.bus.broker.rank import LiveRank
from offloop.bus.broker.run import BrokerRun, BrokerStatistics
from offloop.bus.errors import BrokerError, ConfigurationError, RunDirectoryError, RunIsLiveError
from offloop.bus.protocol.frames import check_run_name
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.runs.directory import RunDirectory, is_name_for
from offloop.bus.types.demand import Demand

_log = logging.getLogger("offloop.broker")

Send = Callable[[bytes, str, dict[str, Any]], bool]
"""Sends a control message to a connection; returns whether that is there."""


class RunService:
    """Begins, continues and ends the run of a broker, and knows its publishers.

    ``directory`` is the run's, ``control_endpoint`` and ``event_feed`` are where the broker listens."""

    def __init__(self, directory: RunDirectory, control_endpoint: str, event_feed: str, send: Send) -> None:
        self.event_feed = event_feed
        self.run: BrokerRun | None = None
        """The run while it is live."""
        self.has_ended = False
        """It was live and is not any more."""
        self._control_endpoint = control_endpoint
        self._statistics = BrokerStatistics()
        self._directory = directory
        self._publishers: dict[bytes, LiveRank] = {}
        self._send = send

    def statistics(self) -> BrokerStatistics:
        """Counts of the broker."""
        if self.run is not None:
            self._statistics.recorded = self.run.writer.written
        return self._statistics

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

    def is_there(self, rank: LiveRank) -> bool:
        """A rank's process runs; or its connection is there, where that process cannot be seen."""
        if rank.pid is not None:
            return processes.is_running(rank.pid, rank.started)
        return rank.identity is not None and self._send(rank.identity, "beat", {})

    def request_missing(self, rank: LiveRank) -> None:
        """Requests that a rank's missing events are sent again, unless that was done just now."""
        if not rank.should_request(time.monotonic()):
            return
        assert rank.identity is not None  # only of those it should be requested
        self._statistics.asked_again += 1
        self._send(rank.identity, "retransmit", {"after": rank.retransmit_after})

    # -- it begins ----------------------------------------------------------------------------------------------------

    def greet(self, identity: bytes, hello: HelloMessage) -> tuple[BrokerRun, LiveRank]:
        """Takes in a publisher: of a new attempt, which begins with it, as a further rank, or again after its
        connection or the broker was lost.

        Raises:
            OffloopError: it cannot publish here.
        """
        if hello.rank >= hello.world_size:
            raise ConfigurationError(f"rank {hello.rank} of {hello.world_size}: ranks go from 0 to world_size - 1")
        if (hello.local_world_size or 1) > hello.world_size:
            raise ConfigurationError(
                f"local_world_size is {hello.local_world_size}: it is at most world_size, {hello.world_size}"
            )
        held = Demand.from_wire(hello.demand) if hello.attempt is not None and hello.demand else None
        # It is written down as JSON, which does not take everything that travels: seen before anything is made.
        json.dumps(hello.info, default=str)
        own = self._directory.name
        if hello.run != own and not (hello.new and is_name_for(own, check_run_name(hello.run))):
            raise BrokerError(
                f"this broker serves run {own!r} alone: start a publisher of {hello.run!r} without broker="
            )
        run = self.run
        if run is None:
            if self.has_ended:
                raise BrokerError(f"run {own!r} has ended: publish without broker=, which starts another broker")
            if hello.attempt is not None:
                status = self._directory.describe_status()
                raise BrokerError(f"attempt {hello.attempt} of run {own!r} cannot continue: {status}")
            run = self._begin(hello)
        return run, self._admit(run, identity, hello, held)

    def _admit(self, run: BrokerRun, identity: bytes, hello: HelloMessage, held: Demand | None) -> LiveRank:
        rank = _rank_of(run, hello)
        self.forget_connection(rank)
        rank.identity, rank.may_cut = identity, hello.replay
        self._publishers[identity] = rank
        if held is not None:
            run.consumers.hold(hello.rank, held, time.monotonic())
        # A container may have the name of its host, and processes of its own.
        is_seen = hello.host == socket.gethostname() and processes.is_running(hello.pid, hello.started)
        rank.pid, rank.started = (hello.pid, hello.started) if is_seen else (None, None)
        if hello.flight is not None and (problem := run.flight.attach(rank, hello.flight)) is not None:
            _log.warning("run %s: %s", run.name, problem)
            self._send(identity, "notice", {"text": problem})
        process = {"pid": hello.pid, "started": hello.started, "host": hello.host}
        try:
            run.directory.note_publisher({"rank": hello.rank, "publisher_id": hello.publisher_id, **process})
        except (OSError, RunDirectoryError) as error:
            _log.error("run %s: %s", run.name, error)
        return rank

    def _begin(self, hello: HelloMessage) -> BrokerRun:
        directory = self._directory
        _refuse_if_away(directory, hello.pid)
        # The recording first: a reader that finds the run live may open it at once.
        number, recording = directory.next_attempt()
        agreed = hello.new_attempt
        if agreed is not None and agreed > number:
            number, recording = agreed, recording.with_name(f"recording-{agreed}.mcap")
        elif agreed not in (None, number):
            raise BrokerError(f"attempt {agreed} of run {directory.name!r} cannot begin: another one has begun since")
        local = hello.local_world_size or hello.world_size
        writer = RecordingWriter(recording, directory.name, number, directory.run_id)
        try:
            directory.begin_attempt(recording, number, hello.info, hello.world_size, local_world_size=local)
            directory.announce(number, self._control_endpoint, self.event_feed)
            self.run = BrokerRun(directory, number, writer, hello.world_size, local, self._statistics)
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
        run = BrokerRun(directory, attempt, writer, world_size, local_world_size, self._statistics)
        directory.announce(attempt, self._control_endpoint, self.event_feed)
        for entry in publishers:
            rank = run.ranks.setdefault(int(entry["rank"]), LiveRank(int(entry["rank"])))
            rank.publisher_id = str(entry.get("publisher_id"))
            if entry.get("host") == socket.gethostname():
                rank.pid, rank.started = entry.get("pid"), entry.get("started")
        if any(rank.ended for rank in run.ranks.values()):
            for ending in Recording(run.writer.path).read_endings():
                run.note_ending(ending)
            run.last_end = time.monotonic()
        _log.warning("attempt %d of run %s continues with a new broker", attempt, directory.name)
        self.run = run

    # -- it ends ------------------------------------------------------------------------------------------------------

    def forget_connection(self, rank: LiveRank) -> None:
        """Ignores further messages of a rank's connection: it has ended, or has another one."""
        rank.died = None
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
        self.statistics()
        self.run, self.has_ended = None, True
        return unwritten


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


def _rank_of(run: BrokerRun, hello: HelloMessage) -> LiveRank:
    """The rank that says hello: a new one, or the same one again."""
    number, attempt = hello.rank, hello.attempt or hello.new_attempt
    if attempt not in (None, run.attempt):
        raise BrokerError(
            f"attempt {attempt} of run {run.name!r} cannot continue: attempt {run.attempt} has begun since"
        )
    rank = run.ranks.get(number)
    if rank is None and number < run.world_size:
        if len(run.ranks) >= run.local_world_size:
            raise BrokerError(
                f"rank {number} of run {run.name!r} is one more than the {run.local_world_size} that publish to this "
                "broker: name the broker of its own host, or give all ranks here the same local_world_size"
            )
        rank = run.ranks[number] = LiveRank(number, hello.publisher_id)
    elif rank is not None and not rank.publisher_id:
        # It could not be written down before the broker was lost.
        rank.publisher_id = hello.publisher_id
    elif rank is None or rank.publisher_id != hello.publisher_id:
        raise BrokerError(
            f"rank {number} of run {run.name!r} is there already: choose another run name, or wait until it ends"
        )
    return rank
