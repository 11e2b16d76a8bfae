"""A live run at its broker: ranks, recording, and demand of the consumers."""

import itertools
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from offloop.bus import processes
from offloop.bus.broker.console import ConsoleRecorder
from offloop.bus.broker.consumers import Consumers
from offloop.bus.broker.flight import FlightRecorder
from offloop.bus.broker.messages import HelloMessage
from offloop.bus.broker.rank import LiveRank, Placement
from offloop.bus.errors import BrokerError, OffloopError, ProtocolError, RunDirectoryError, RunIsLiveError
from offloop.bus.protocol.frames import COMMAND, END, EventBody, decode_whole_event, sequence_number
from offloop.bus.protocol.order import Ending, Gap, base_step, worst_of
from offloop.bus.protocol.run_state import Pause, Reached
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.summary import MIN_BYTES, Summarizer
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.runs.directory import numbered_names
from offloop.bus.runs.writing import RunDirectory
from offloop.bus.types.actor import FIRST_ACTOR, ActorName, is_actor
from offloop.bus.types.demand import Demand
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import TrainingTime

_log = logging.getLogger("offloop.broker")

LIVE_FRAME = 32 * 1024  # largest event on the event feed, in bytes; larger ones are read from the recording
JOIN_SECONDS = 30.0  # how long a run whose ranks have finished waits for missing ranks
RETRY_WRITE_SECONDS = 0.5


@dataclass
class BrokerStatistics:
    """Counts of a broker since its start."""

    collected: int = 0  # events received from publishers and forwarded
    recorded: int = 0  # events written to the recording
    duplicates: int = 0  # repeated events, skipped
    refused: int = 0  # messages that were malformed or from unknown peers
    asked_again: int = 0  # requests to publishers to send again
    missing: int = 0  # events that publishers dropped before they arrived: gaps


class BrokerRun:
    """One live run. Ranks continue where the attempt in ``writer`` ends."""

    def __init__(
        self,
        directory: RunDirectory,
        attempt: int,
        writer: RecordingWriter,
        world_size: int,
        local_world_size: int,
        statistics: BrokerStatistics,
    ) -> None:
        self._statistics = statistics
        self.directory = directory
        self.name: str = directory.name
        self.attempt = attempt
        self.writer = writer
        self.world_size = world_size
        self.local_world_size = local_world_size  # number of ranks that publish here
        self.ranks: dict[int, LiveRank] = {}
        self.consumers: Consumers = Consumers()
        self.reported: tuple[Demand, int] = Demand(), 0
        """Demand and version of :attr:`consumers` last sent to publishers."""
        self.ending: Ending = Ending("finished")  # worst ending of a rank so far
        self.last_end: float | None = None
        self.write_error: str | None = None  # why nothing can be recorded at the moment, if so
        self.lost: int = 0  # number of received events that are not in the recording
        self.flush_soon: bool = False
        self._is_full = False
        self.flight: FlightRecorder = FlightRecorder(directory, attempt)
        self.console: ConsoleRecorder = ConsoleRecorder(directory, attempt)
        self._retry_at = 0.0
        self._summarizer: Summarizer | None = None
        self._is_summarized = True
        for number, at in writer.positions.items():
            self.ranks[number] = LiveRank(
                number, None, seq=at.seq, base_seq=at.base_seq, base_seq_at=at.seq, time=at.time, ended=at.ended
            )
        self._back_to_disk()

    @classmethod
    def begin(
        cls, directory: RunDirectory, hello: HelloMessage, addresses: tuple[str, str], statistics: BrokerStatistics
    ) -> "BrokerRun":
        _refuse_if_away(directory, hello.pid)
        # Create the recording first: a reader that sees a live run may open it at once.
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
            directory.announce(number, *addresses)
            return cls(directory, number, writer, hello.world_size, local, statistics)
        except BaseException:
            writer.discard()
            raise

    @classmethod
    def resume(cls, directory: RunDirectory, addresses: tuple[str, str], statistics: BrokerStatistics) -> "BrokerRun":
        entry = directory.resumable()
        attempt = 0 if entry is None else int(entry["attempt"])
        recording, world_size, local_world_size, publishers = directory.resume_attempt(attempt)
        writer = RecordingWriter(recording, directory.name, attempt, directory.run_id, resume=True)
        run = cls(directory, attempt, writer, world_size, local_world_size, statistics)
        directory.announce(attempt, *addresses)
        for entry in publishers:
            rank = run.ranks.setdefault(int(entry["rank"]), LiveRank(int(entry["rank"])))
            rank.publisher_id = str(entry.get("publisher_id"))
            if is_actor(rank.rank):
                rank.actor = ActorName(str(entry.get("name")), str(entry.get("role")))
            if entry.get("host") == socket.gethostname():
                rank.pid, rank.started = entry.get("pid"), entry.get("started")
        if any(rank.ended for rank in run.trainers):
            for ending in Recording(recording).read_endings():
                run.note_ending(ending)
            run.last_end = time.monotonic()
        _log.warning("attempt %d of run %s continues with a new broker", attempt, directory.name)
        return run

    @property
    def trainers(self) -> list[LiveRank]:
        """The ranks of the training."""
        return [rank for number, rank in self.ranks.items() if not is_actor(number)]

    @property
    def has_actors(self) -> bool:
        """At least one actor has not left."""
        return any(not rank.ended for number, rank in self.ranks.items() if is_actor(number))

    def actor_of(self, hello: HelloMessage) -> LiveRank:
        """Return the actor of a ``hello``, new or known. Raise BrokerError if it cannot publish here."""
        if hello.attempt is None:
            number = max(FIRST_ACTOR - 1, *self.ranks) + 1
            taken = {rank.actor.name for rank in self.ranks.values() if rank.actor is not None and not rank.ended}
            role = str(hello.role)
            if hello.exclusive and hello.name in taken:
                raise BrokerError(f"run {self.name!r} has an actor {hello.name!r} already: wait for its end")
            names = numbered_names(hello.name) if hello.name else (f"{role}-{index}" for index in itertools.count())
            name = next(name for name in names if name not in taken)
            self.ranks[number] = LiveRank(number, ActorName(name, role), hello.publisher_id)
            return self.ranks[number]
        known = self.ranks.get(hello.rank)
        if hello.attempt != self.attempt or known is None or known.publisher_id != hello.publisher_id:
            raise BrokerError(f"attempt {hello.attempt} of run {self.name!r} has no actor {hello.rank}: join it anew")
        return known

    def published_before(self, rank: LiveRank) -> int:
        """Return the number of events of earlier actors of the same name, without the first and the end of each."""
        others = (one for one in self.ranks.values() if one is not rank and one.actor is not None)
        name = None if rank.actor is None else rank.actor.name
        return sum(max(0, one.seq - 1 - one.ended) for one in others if one.actor and one.actor.name == name)

    def rank_of(self, hello: HelloMessage) -> LiveRank:
        """Return the rank of a ``hello``, new or known. Raise BrokerError if it cannot publish here."""
        number, attempt, name = hello.rank, hello.attempt or hello.new_attempt, self.name
        if attempt not in (None, self.attempt):
            raise BrokerError(f"attempt {attempt} of run {name!r} cannot continue: attempt {self.attempt} has begun")
        rank = self.ranks.get(number)
        if rank is None and number < self.world_size:
            if len(self.trainers) >= self.local_world_size:
                raise BrokerError(
                    f"rank {number} of run {name!r} is one more than the {self.local_world_size} that publish to this "
                    "broker: name the broker of its own host, or give all ranks here the same local_world_size"
                )
            rank = self.ranks[number] = LiveRank(number, None, hello.publisher_id)
        elif rank is not None and not rank.publisher_id:
            # The previous broker died before it could store the id.
            rank.publisher_id = hello.publisher_id
        elif rank is None or rank.publisher_id != hello.publisher_id:
            raise BrokerError(
                f"rank {number} of run {name!r} exists already: use another run name, or wait for its end"
            )
        return rank

    @property
    def over(self) -> bool:
        """Every rank that publishes here has ended."""
        trainers = self.trainers
        return len(trainers) == self.local_world_size and all(rank.ended for rank in trainers)

    def is_abandoned(self, now: float) -> bool:
        """Return whether every present rank has ended, and missing ones had their time to join."""
        return (
            self.last_end is not None
            and now - self.last_end > JOIN_SECONDS
            and all(rank.ended for rank in self.trainers)
        )

    def take(self, rank: LiveRank, frame: bytes) -> Placement:
        """Accept and record an event if it is the next one. Raise ProtocolError if it is refused, perhaps lost."""
        end = frame.find(b"\0", 0, 257)
        topic, body = frame[:end], frame[end + 1 :]
        name = rank.names.get(topic)
        if name is None:
            try:
                name = rank.add_topic(self.name, topic, frame)
                if name != END and not self.writer.has_room_for(topic):
                    return self._refuse_topic(rank, name, topic, body)
            except ProtocolError:
                self._skip_refused(rank, None)
                raise
        try:
            event = decode_whole_event(body)
        except ProtocolError:
            self._skip_refused(rank, sequence_number(body))
            raise
        if event.attempt != self.attempt:
            raise ProtocolError(f"an event of attempt {event.attempt} of run {self.name!r} in attempt {self.attempt}")
        try:
            placement = rank.take(name, event)
        except ProtocolError as error:
            self._skip_refused(rank, event.seq)
            raise ProtocolError(f"rank {rank.rank} of run {self.name!r}: {error}") from None
        if placement is Placement.NEXT:
            self._statistics.collected += 1
            self.record(rank, topic, event, body)
            if name == COMMAND:
                self._note_command(rank, event)
            elif rank.rank in self.flight.rings and name == Event.BATCH_END:
                self.flight.note_loss(rank, event)
            elif name == END:
                rank.end = topic, event, body
                if rank.actor is None:
                    self.last_end = time.monotonic()
                    self.flight.note_end(rank, event.fields)
                    self.note_ending(Ending.from_fields(event.fields))
        elif placement is Placement.DUPLICATE and not self.record(rank, topic, event, body):
            self._statistics.duplicates += 1
        return placement

    def _refuse_topic(self, rank: LiveRank, name: str, topic: bytes, body: bytes) -> Placement:
        """Drop an event whose topic does not fit into the recording; raise ProtocolError for the first one."""
        del rank.names[topic]
        self._skip_refused(rank, sequence_number(body))
        if self._is_full:
            self._statistics.refused += 1
            return Placement.DUPLICATE
        self._is_full = True
        raise ProtocolError(f"a recording has no room for further topics: {name} of rank {rank.rank} is lost")

    def take_in_order(self, rank: LiveRank, frames: Sequence[bytes]) -> int:
        """Accept and record the leading ordinary events at once; return their number.

        Ordinary are consecutive events with known topics, at most :data:`LIVE_FRAME` bytes, no marks. :meth:`take`
        handles others."""
        takes_records = self.write_error is None
        if rank.seq != rank.base_seq_at or rank.ended or (takes_records and rank.seq != rank.recorded):
            return 0
        names, attempt, base_seq = rank.names, self.attempt, rank.base_seq
        topic, front, size, step = b"", b"\0", 0, None
        watches, is_watched = rank.rank in self.flight.rings, False
        events: list[tuple[bytes, int, int, bytes]] = []
        try:
            for number, frame in enumerate(frames, rank.seq + 1):
                if not frame.startswith(front):
                    topic, _, _ = frame.partition(b"\0")
                    step = base_step(names.get(topic, ""))
                    if step is None:
                        break
                    front, size = topic + b"\0", len(topic) + 1
                    is_watched = watches and names[topic] == Event.BATCH_END
                body = frame[size:]
                event = decode_whole_event(body)
                if (
                    step is None
                    or event.seq != number
                    or event.base_seq != base_seq + step
                    or event.attempt != attempt
                    or len(frame) > LIVE_FRAME
                ):
                    break
                if is_watched:
                    self.flight.note_loss(rank, event)
                base_seq, last = event.base_seq, event
                events.append((topic, number, event.time, body))
        except ProtocolError:
            pass  # take() reports it
        if events:
            rank.seq = rank.base_seq_at = last.seq
            rank.base_seq, rank.time, rank.last = base_seq, last.time, last
            self._statistics.collected += len(events)
            if takes_records:
                self._record_all(rank, events)
        return len(events)

    def _record_all(self, rank: LiveRank, events: list[tuple[bytes, int, int, bytes]]) -> None:
        try:
            self.writer.append_all(events, rank.base_seq)
        except (OSError, OffloopError) as error:
            self._fail(error)
        else:
            rank.recorded = rank.seq

    def _skip_refused(self, rank: LiveRank, number: int | None) -> None:
        if rank.is_lost(number):
            self.skip_to(rank, rank.seq + 2)

    def skip_to(self, rank: LiveRank, first: int) -> None:
        """Continue a rank at event ``first``; missing events before it are lost."""
        if self.write_error is None and first > rank.recorded + 1:
            _log.warning(
                "run %s, rank %d: events %d to %d are not recorded, because they were lost",
                *(self.name, rank.rank, rank.recorded + 1, first - 1),
            )
            self.lost += first - 1 - rank.recorded
            rank.recorded = first - 1
        if first > rank.seq + 1:
            self._statistics.missing += first - rank.seq - 1
            rank.seq = first - 1

    def _note_command(self, rank: LiveRank, event: EventBody) -> None:
        """Store in the run's directory that the first rank was paused or continues."""
        command = event.fields.get("command")
        if rank.rank or event.fields.get("error") is not None or command not in ("pause", "resume", "stop"):
            return
        try:
            self.directory.note_pause(Pause(event.time / 1e9, event.timestamp.batch) if command == "pause" else None)
        except RunDirectoryError as error:
            _log.error("run %s: %s", self.name, error)

    def note_ending(self, ending: Ending) -> None:
        self.ending = worst_of([self.ending, ending])

    def connected(self) -> list[tuple[bytes, LiveRank]]:
        return [(rank.identity, rank) for rank in self.ranks.values() if rank.identity is not None]

    def publishers(self) -> list[tuple[bytes, LiveRank]]:
        return [(identity, rank) for identity, rank in self.connected() if not rank.ended]

    @property
    def reached(self) -> Reached | None:
        """Progress of the lowest rank here."""
        first = self.ranks.get(min(self.ranks, default=0))
        return None if first is None or first.last is None else Reached.of(first.last)

    @property
    def training_time(self) -> TrainingTime | None:
        """Training time of the lowest rank here."""
        first = self.ranks.get(min(self.ranks, default=0))
        return None if first is None or first.last is None else first.last.timestamp

    @property
    def incomplete(self) -> str | None:
        if self.write_error is not None:
            return f"the recording is incomplete: {self.write_error}"
        return f"the recording lacks {self.lost} events" if self.lost else None

    @property
    def gaps(self) -> list[Gap]:
        """Events after the end of the recording."""
        last = {number: rank.seq if rank.end is None else rank.end[1].seq - 1 for number, rank in self.ranks.items()}
        return [
            Gap(number, rank.recorded + 1, last[number])
            for number, rank in sorted(self.ranks.items())
            if last[number] > rank.recorded
        ]

    def record(self, rank: LiveRank, topic: bytes, event: EventBody, body: bytes) -> bool:
        """Append an event if it is the recording's next one; return whether it was. Skip it after a write error."""
        if self.write_error is not None or event.seq != rank.recorded + 1:
            return False
        try:
            self.writer.append(topic, event.seq, event.base_seq, event.time, body)
        except (OSError, OffloopError) as error:
            self._fail(error)
        else:
            rank.recorded = event.seq
        return True

    def flush(self) -> None:
        self.flush_soon = False
        if self.write_error is None and any(rank.recorded > rank.acknowledged for rank in self.ranks.values()):
            try:
                self.writer.flush()
            except (OSError, OffloopError) as error:
                self._fail(error)
            else:
                for rank in self.ranks.values():
                    rank.acknowledged = rank.recorded

    def retry_write(self, now: float) -> bool:
        """Try to record again after a write error, at most once in a while; return whether it succeeded."""
        if self.write_error is None or now < self._retry_at:
            return False
        self._retry_at = now + RETRY_WRITE_SECONDS
        try:
            self.writer.recover()
        except (OSError, OffloopError):
            return False
        self.write_error = None
        self._back_to_disk()
        _log.warning("run %s is recorded again, continuing at its last event on disk", self.name)
        return True

    def close_recording(self) -> None:
        """Close the recording. If the disk works again, it gets at least the ends of the ranks."""
        self.retry_write(self._retry_at)
        if self.write_error is None:
            for rank in self.ranks.values():
                if rank.end is not None and rank.end[1].seq > rank.recorded:
                    self.lost += rank.end[1].seq - 1 - rank.recorded
                    rank.recorded = rank.end[1].seq - 1
                    self.record(rank, *rank.end)
        try:
            self.writer.close()
        except (OSError, OffloopError) as error:
            self._fail(error)
        else:
            if self.write_error is None:
                for rank in self.ranks.values():
                    rank.acknowledged = rank.recorded

    def summarize(self, until: float, *, is_over: bool = False) -> None:
        """Update the summary of a long recording, until a time of ``time.monotonic``."""
        if not self._is_summarized or self.writer.size < MIN_BYTES:
            return
        try:
            if self._summarizer is None:
                run_id = self.directory.run_id
                self._summarizer = Summarizer(self.writer.path, self.name, self.attempt, run_id)
            self._summarizer.work(until)
            if is_over:
                self._summarizer.save()
        except (OSError, OffloopError) as error:
            self._is_summarized = False
            _log.info("run %s: its summary is not kept up any more: %s", self.name, error)
        if self._summarizer is not None and (is_over or not self._is_summarized):
            self._is_summarized = False
            self._summarizer.close()

    def _back_to_disk(self) -> None:
        for number, position in self.writer.positions.items():
            rank = self.ranks[number]
            rank.recorded = rank.acknowledged = position.seq

    def _fail(self, error: Exception) -> None:
        if self.write_error is None:
            self.write_error = str(error)
            for rank in self.ranks.values():
                rank.recorded = rank.acknowledged
            _log.error("run %s is not recorded at the moment: %s", self.name, error)


def _refuse_if_away(directory: RunDirectory, pid: int | None) -> None:
    """Refuse a new attempt while a trainer without a broker is alive: it continues the previous attempt."""
    entry = directory.resumable()
    for publisher in (entry or {}).get("publishers", ()):
        other = publisher.get("pid")
        here = publisher.get("host") == socket.gethostname() and "role" not in publisher
        if here and other != pid and processes.is_running(other, publisher.get("started")):
            raise RunIsLiveError(
                f"run {directory.name!r} is live already: its trainer, process {other}, continues and finds this "
                "broker again; choose another run name, or end that process",
                run=directory.name,
            )
