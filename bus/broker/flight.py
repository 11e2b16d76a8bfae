"""Flight recorder of a live run: on a trigger it records all events of the ranks' newest batches."""

import heapq
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from offloop.bus.broker.rank import LiveRank
from offloop.bus.broker.stacks import write_stacks
from offloop.bus.errors import BrokerError, OffloopError, ProtocolError
from offloop.bus.files import atomic_replace
from offloop.bus.protocol import frames
from offloop.bus.protocol.flight_ring import FlightRingReader
from offloop.bus.protocol.frames import EventBody, Topic, decode_whole_event, split_frame
from offloop.bus.protocol.order import base_step
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.runs.alerts import FIRING, RunAlert, note_alert
from offloop.bus.runs.directory import new_run_id
from offloop.bus.runs.flight import DUMPS, MOST_DUMPS, STACKS, free_path
from offloop.bus.runs.writing import RunDirectory
from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.bus.types.phases import BEGINS, BETWEEN, ENDS, MAX_SPANS

_log = logging.getLogger("offloop.broker")

ASKED, FAILED, LOST, NAN, STALLED = "asked", "failed", "lost", "nan", "stalled"
ALERT_PAUSE = 60.0  # seconds between two dumps because of alerts
STALLED_SECONDS = 300.0  # a training rank without an event for this long counts as stalled
# After these events the user's program may do anything.
_AT_REST = frozenset(
    (Event.INIT, Event.AFTER_LOAD, Event.FIT_END, Event.EVAL_AFTER_ALL, Event.EVAL_STANDALONE_END, Event.PREDICT_END)
)
_MOST_DETAIL = 1000

Answer = Callable[[str | None, str | None], object]  # receives the result, or the reason why nothing was written
_Work = Callable[[Path], str]  # writes a file, and returns its description
_Record: TypeAlias = tuple[int, int, bytes, int, int, bytes]
_DEMAND = Demand(
    {event: EventDemand(1, {"phases": 1}) if event is Event.BATCH_END else EventDemand() for event in Event}
).to_wire()


@dataclass
class RankRing:
    """Ring of a rank, and the time of its last change."""

    rank: LiveRank
    reader: FlightRingReader
    newest: bytes | None = None
    since: float = 0.0

    @property
    def is_at_work(self) -> bool:
        topic = None if self.newest is None else split_frame(self.newest)[0]
        return not self.rank.ended and topic is not None and topic.name not in _AT_REST


class FlightRecorder:
    """Writes the rings of one attempt's ranks, and their stacks, to files. Only its thread writes files and alerts."""

    def __init__(self, directory: RunDirectory, attempt: int) -> None:
        self.rings: dict[int, RankRing] = {}
        self._directory = directory
        self._run = directory.name
        self._attempt = attempt
        self._alerted = -math.inf
        self._met: set[str] = set()
        self._looked = -math.inf
        self._stalled: set[int] = set()
        self._thread = ThreadPoolExecutor(1, "offloop-flight")
        self._writing: dict[Path, tuple[Future[tuple[str | None, str | None]], Answer | None]] = {}
        """Files that are being written."""

    def attach(self, rank: LiveRank, wire: dict[str, Any]) -> str | None:
        """Open the ring named in a rank's ``hello``; return why that failed, if it did."""
        if rank.rank in self.rings:
            return None
        where = f"the flight recorder of rank {rank.rank} is not kept"
        if rank.pid is None:
            return f"{where}: the broker is on another machine; let each host have a broker of its own"
        try:
            reader = FlightRingReader(rank.pid, wire)
        except (OSError, ProtocolError) as error:
            return f"{where}: its memory cannot be read by the broker ({error})"
        self.rings[rank.rank] = RankRing(rank, reader)
        return None

    def note_loss(self, rank: LiveRank, event: EventBody) -> None:
        loss, batch = event.fields.get("loss"), event.timestamp.batch
        if not isinstance(loss, float) or math.isfinite(loss) or NAN in self._met:
            return
        text, now = f"the loss of rank {rank.rank} is {loss} at batch {batch}", time.time()
        name = f"flight-{self._attempt}-{NAN}-{now:.3f}"
        alert = RunAlert(name, FIRING, NAN, text, now, self._attempt, batch)
        # In the thread: it may wait for a consumer that writes an alert.
        self._thread.submit(note_alert, self._directory.path, alert)
        self._dump(NAN, text)

    def note_end(self, rank: LiveRank, fields: dict[str, Any]) -> None:
        status = fields.get("status")
        if status in (FAILED, LOST) and status not in self._met:
            self._dump(status, f"rank {rank.rank}: {fields.get('error') or status}")

    def look(self, now: float) -> None:
        """Look for stalled ranks: ranks that train, are not paused, and publish nothing."""
        if now - self._looked < STALLED_SECONDS / 20:
            return
        # If this process was suspended, the ranks probably were too.
        was_suspended, self._looked = now - self._looked > STALLED_SECONDS / 2, now
        for number, ring in self.rings.items():
            with suppress(ProtocolError):
                newest = ring.reader.newest()
                # A paused rank still sends reports.
                if newest != ring.newest or ring.rank.reported_at > ring.since or was_suspended:
                    ring.newest, ring.since = newest, now
                    self._stalled.discard(number)
                    if not self._stalled:
                        self._met.discard(STALLED)
                elif now - ring.since >= STALLED_SECONDS and number not in self._stalled and ring.is_at_work:
                    self._stalled.add(number)
                    # Synchronized ranks stall together: one dump is enough.
                    if STALLED not in self._met:
                        why = f"rank {number} has done nothing for {STALLED_SECONDS:g} s"
                        self._dump(STALLED, why)
                        self._start(STACKS, self._stacks_of([one.rank for one in self.rings.values()], why))

    def ask(self, reason: str, detail: str, answer: Answer) -> None:
        """Write the rings for a peer's request, or raise BrokerError if that is impossible."""
        if not self.rings:
            raise BrokerError(
                f"run {self._run!r} has no flight recorder: start the training with flight_recorder='200ba', or "
                "'trainer --flight-recorder 200ba'"
            )
        now = time.monotonic()
        if reason == "alert" and now - self._alerted < ALERT_PAUSE:
            answer(None, f"it was written for another alert less than {ALERT_PAUSE:g} s ago")
            return
        if (problem := self._dump(reason, detail, answer)) is not None:
            raise BrokerError(problem)
        if reason == "alert":
            self._alerted = now

    def ask_stacks(self, ranks: list[LiveRank], detail: str, answer: Answer) -> None:
        """Write the stacks of ranks for a peer's request, or raise BrokerError if that is impossible."""
        if (problem := self._start(STACKS, self._stacks_of(ranks, detail), answer)) is not None:
            raise BrokerError(problem)

    def _stacks_of(self, ranks: list[LiveRank], detail: str) -> _Work:
        head = f"run {self._run}, attempt {self._attempt}"
        return lambda path: write_stacks(path, head, detail[:_MOST_DETAIL], ranks)

    @property
    def is_writing(self) -> bool:
        """A file is being written, or its answer is pending."""
        return bool(self._writing)

    def _dump(self, reason: str, detail: str, answer: Answer | None = None) -> str | None:
        """Start a dump, or return why it is not allowed."""
        if not self.rings:
            return None
        self._met.add(reason)
        about = {"flight": reason, "flight_detail": detail[:_MOST_DETAIL], "flight_time": str(time.time_ns())}
        rings = dict(self.rings)
        return self._start(DUMPS, lambda path: write_dump(path, self._run, self._attempt, about, rings), answer)

    def _start(self, kind: str, write: _Work, answer: Answer | None = None) -> str | None:
        """Start to write a file, or return why it is not allowed."""
        path = free_path(self._directory.path, kind, self._attempt, self._writing)
        if path is None:
            files = kind.format(self._attempt, "N")
            problem = f"run {self._run!r} has {MOST_DUMPS} files {files}, the maximum: remove some"
            _log.warning("%s", problem)
            return problem
        self._writing[path] = self._thread.submit(self._write, path, write), answer
        return None

    def _write(self, path: Path, write: _Work) -> tuple[str | None, str | None]:
        """Write a file, in the thread; return the result and the error."""
        try:
            done = f"{path.name}: {write(path)}"
        except Exception as error:  # noqa: BLE001  any error ends only this file
            why = error if isinstance(error, OSError | OffloopError) else repr(error)
            failure = f"{path.name} cannot be written: {why}"
            _log.error("run %s: %s", self._run, failure)
            return None, failure
        _log.info("run %s: %s", self._run, done)
        return done, None

    def report(self) -> None:
        for path, (writing, answer) in tuple(self._writing.items()):
            if writing.done():
                del self._writing[path]
                if answer is not None:
                    answer(*writing.result())

    def finish(self) -> None:
        self._thread.shutdown()
        self.report()
        for ring in self.rings.values():
            ring.reader.close()
        self.rings.clear()


def write_dump(path: Path, run: str, attempt: int, about: Mapping[str, str], rings: Mapping[int, RankRing]) -> str:
    """Write a recording of the rings' present contents, with ``about`` as metadata; return a description."""
    kept = []
    for number, ring in rings.items():
        try:
            # Copy all ranks first, so that they show about the same moment.
            kept.append((number, ring, ring.reader.copy()))
        except ProtocolError as error:
            _log.warning("run %s: %s", run, error)
    streams = [_RankEvents(run, attempt, *one) for one in kept]
    if short := [one for one in streams if one.is_short]:
        had_room = ", ".join(f"rank {one.number}: {one.batches} of {one.ring.reader.batches}" for one in short)
        about = {**about, "flight_short": f"batches that the memory had room for: {had_room}"}
        _log.warning("run %s, %s: %s", run, path.name, about["flight_short"])
    with atomic_replace(path) as draft, closing(RecordingWriter(draft, run, attempt, new_run_id(), about)) as writer:
        for time_ns, _, topic, seq, base_seq, body in heapq.merge(*streams):
            writer.append(topic, seq, base_seq, time_ns, body)
    batches, events = max((one.batches for one in streams), default=0), sum(len(one.frames) for one in streams)
    ranks = f"{len(streams)} rank{'s' if len(streams) != 1 else ''}"
    return f"{events:,} events of {ranks}, {batches:,} whole batches"


class _RankEvents:
    """Events of a rank for a dump: the ring's last batches, with the marks before and after them."""

    def __init__(self, run: str, attempt: int, number: int, ring: RankRing, frames: list[bytes]) -> None:
        self._run = run
        self._attempt = attempt
        self.number = number
        self.ring = ring
        end = Topic(run, Event.BATCH_END.value, number).encode()
        # One more, if available: it ends the batch before the first complete one.
        ends = [at for at, frame in enumerate(frames) if frame.startswith(end)][-ring.reader.batches - 1 :]
        self._before = frames[ends[0]] if len(ends) > ring.reader.batches else None
        self.batches = len(ends) - (self._before is not None)
        self.frames = frames if self._before is None else frames[ends[0] + 1 :]

    @property
    def is_short(self) -> bool:
        """The ring was too small for all batches that it should hold."""
        return self.batches < self.ring.reader.batches and bool(self.frames) and not _is_first(self.frames[0])

    def __iter__(self) -> Iterator[_Record]:
        phases, is_damaged = _Phases(), False
        last: EventBody | None = None
        if self._before is not None:
            with suppress(ProtocolError):
                phases.follow(Event.BATCH_END, decode_whole_event(split_frame(self._before)[1]))
        for frame in self.frames:
            try:
                topic, body = split_frame(frame)
                event = decode_whole_event(body)
                own = self._run, self.number, self._attempt
                if topic is None or (topic.run, topic.rank, event.attempt) != own:
                    raise ProtocolError("an event of something else")
                if last is not None and not last.seq < event.seq:
                    raise ProtocolError("an event out of order")
            except ProtocolError as error:
                if not is_damaged:
                    _log.warning("run %s, flight recorder of rank %d: %s", self._run, self.number, error)
                is_damaged = True
                continue
            if last is None:
                base_seq = event.base_seq - (base_step(topic.name) or 0)
                # Rings assign no event the number 1.
                if event.seq > 2:
                    left_out = {"first": 1, "base_first": 1}
                    yield self._mark(frames.CUT, event.seq - 2, base_seq - 1, event, left_out, {})
                yield self._mark(frames.DEMAND, event.seq - 1, base_seq, event, {"demand": _DEMAND}, event.context)
            found = phases.follow(topic.name, event)
            if topic.name == Event.BATCH_END and found is not None and event.fields.get("phases", found) is None:
                event = msgspec.structs.replace(event, fields={**event.fields, "phases": found})
                body = frames.encode_body(event)
            last = event
            yield event.time, self.number, topic.encode()[:-1], event.seq, event.base_seq, body
        end = self.ring.rank.end
        if last is not None and end is not None:
            yield self._mark(frames.END, last.seq + 1, last.base_seq + 1, last, end[1].fields, end[1].context)

    def _mark(
        self, name: str, seq: int, base_seq: int, beside: EventBody, fields: dict[str, Any], context: dict[str, Any]
    ) -> _Record:
        topic = Topic(self._run, name, self.number)
        mark = EventBody(1, self._attempt, seq, base_seq, beside.time, beside.timestamp, None, fields, context)
        return mark.time, self.number, topic.encode()[:-1], seq, base_seq, frames.encode_body(mark)


class _Phases:
    """Computes the phases of a rank's batches from the times of its events."""

    def __init__(self) -> None:
        self._began: int | None = None
        self._open: tuple[str, int] | None = None
        self._spans: list[list[Any]] = []

    def follow(self, name: str, event: EventBody) -> dict[str, Any] | None:
        """Add the next event; return the phases of a batch that it ends, if the whole batch was seen."""
        found, began, now = None, self._began, event.time
        if self._open is not None and self._open[0] in ENDS.get(name, ()):  # type: ignore[call-overload]
            phase, start = self._open
            self._open = None
            if began is not None and (len(self._spans) < MAX_SPANS or phase == "optimizer"):
                self._spans.append([phase, start - began, now - start])
        if name == Event.BATCH_END and began is not None:
            found = {"began": began, "spans": self._spans, "device": False}
        if name in BETWEEN:
            self._began, self._open, self._spans = now, None, []
        phase = BEGINS.get(name)  # type: ignore[call-overload]
        if phase is not None and (name == Event.EPOCH_START or self._open is None or self._open[0] != "data"):
            self._open = phase, now
        return found


def _is_first(frame: bytes) -> bool:
    try:
        return decode_whole_event(split_frame(frame)[1]).seq == 2
    except ProtocolError:
        return False
