"""The flight recorder of a live run: the newest batches of its ranks with all of their events, which are recorded only
when there is a reason to."""

import heapq
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bus.broker.rank import LiveRank
from bus.errors import BrokerError, OffloopError, ProtocolError
from bus.files import sync
from bus.protocol.flight_ring import FlightRingReader, frames_in
from bus.protocol.frames import (
    CUT,
    DEMAND,
    END,
    EventBody,
    Topic,
    decode_whole_event,
    event_encoder,
    pack_map,
    split_frame,
)
from bus.protocol.numbering import BASE_STEPS
from bus.recording.writer import RecordingWriter
from bus.runs.alerts import FIRING, RESOLVED, RunAlert, note_alert
from bus.runs.directory import RunDirectory, new_run_id
from bus.runs.flight import MOST_DUMPS, AnnouncedDump, announce_dump, dump_path
from bus.types.demand import Demand, Want
from bus.types.event import Event
from bus.types.phases import BEGINS, BETWEEN, ENDS, MAX_SPANS

_log = logging.getLogger("offloop.broker")

ASKED, FAILED, LOST, NAN, STALLED = "asked", "failed", "lost", "nan", "stalled"
_ONCE = (FAILED, LOST, NAN)
"""Reasons that count once in an attempt."""
ALERT_PAUSE = 60.0
"""Seconds between two dumps because of alerts."""
_SLICE = 32
_MOST_PENDING = 4
_LOSSES = 64
_DEMAND = Demand({event: Want(1, {"phases": 1}) if event is Event.BATCH_END else Want() for event in Event}).to_wire()

Answer = Callable[[str | None, str | None], object]
"""Takes what was done, or why nothing was."""


class _Dump(NamedTuple):
    """What is to be written."""

    number: int
    reason: str
    detail: str
    time_ns: int
    answer: Answer | None


@dataclass
class _Ring:
    """A rank's memory, and since when it is as it is."""

    rank: LiveRank
    reader: FlightRingReader
    position: object = None
    since: float = field(default_factory=time.monotonic)
    is_stalled: bool = False
    losses: dict[int, float] = field(default_factory=dict)
    """By batch, of as many batches as are kept: those that were on a GPU still when their event was put there."""


class FlightRecorder:
    """Writes what the ranks of one attempt have left in their rings, each time to a file of its own beside the
    recording. Without rings it does nothing.

    Times are seconds on a steady clock. A file is written in slices, see :meth:`work`, so that the broker does
    everything else in between.

    Args:
        stalled: how long a rank publishes nothing before that is a reason.
    """

    def __init__(self, directory: RunDirectory, attempt: int, stalled: float) -> None:
        self.rings: dict[int, _Ring] = {}
        """By rank."""
        self.is_paused = False
        """Whether the training is: then it does not stall."""
        self._directory = directory
        self._run = directory.name
        self._attempt = attempt
        self._stalled = stalled
        self._looked = self._alerted = -math.inf
        self._met: set[str] = set()
        self._is_full = False
        self._pending: deque[_Dump] = deque()
        self._writing: Iterator[None] | None = None
        self._current: _Dump | None = None
        # Replaced while a dump reads them.
        self._replaced: list[FlightRingReader] = []

    def attach(self, rank: LiveRank, wire: dict[str, Any]) -> str | None:
        """Opens the ring of a rank, which has said in ``hello`` where it is; returns why that is not possible."""
        known = self.rings.get(rank.rank)
        if known is not None and known.reader.token == wire.get("token"):
            return None
        where = f"the flight recorder of rank {rank.rank} is not kept"
        if rank.pid is None:
            return f"{where}: the broker is on another machine; let each host have a broker of its own"
        try:
            reader = FlightRingReader(rank.pid, wire)
        except (OSError, ProtocolError) as error:
            return f"{where}: its memory cannot be read by the broker ({error})"
        if known is not None:
            self._replaced.append(known.reader)
            self._close_replaced()
        self.rings[rank.rank] = _Ring(rank, reader)
        return None

    # -- reasons ------------------------------------------------------------------------------------------------------

    def note_batch(self, rank: LiveRank, event: EventBody) -> None:
        """Looks at the loss of a batch that has ended."""
        ring, loss = self.rings.get(rank.rank), event.fields.get("loss")
        if ring is None or not isinstance(loss, float):
            return
        batch = event.timestamp.batch
        ring.losses[batch] = loss
        if len(ring.losses) > ring.reader.batches + _LOSSES:
            del ring.losses[next(iter(ring.losses))]
        if not math.isfinite(loss) and NAN not in self._met:
            text = f"the loss of rank {rank.rank} is {loss} at batch {batch}"
            self._dump(NAN, text)
            self._alert(NAN, FIRING, text, batch)

    def note_end(self, rank: LiveRank, fields: dict[str, Any]) -> None:
        """Looks at how a rank has ended."""
        status = fields.get("status")
        if status in (FAILED, LOST) and status not in self._met:
            self._dump(status, f"rank {rank.rank}: {fields.get('error') or status}")

    def look(self, now: float) -> None:
        """Finds the ranks that do nothing any more."""
        if not self.rings or now - self._looked < self._stalled / 20:
            return
        self._looked = now
        for number, ring in self.rings.items():
            try:
                position = ring.rank.seq, ring.reader.position()
            except ProtocolError:
                continue
            about = f"{STALLED} {number}"
            if position != ring.position or self.is_paused or ring.rank.ended:
                if ring.is_stalled:
                    self._alert(about, RESOLVED, f"rank {number} continues", self._batch(ring))
                ring.position, ring.since, ring.is_stalled = position, now, False
            elif not ring.is_stalled and now - ring.since >= self._stalled:
                text = f"rank {number} has published nothing for {self._stalled:g} s"
                self._alert(about, FIRING, text, self._batch(ring))
                if not any(one.is_stalled for one in self.rings.values()):
                    # Ranks that train together stall together.
                    self._dump(STALLED, text)
                ring.is_stalled = True

    @staticmethod
    def _batch(ring: _Ring) -> int:
        return 0 if ring.rank.last is None else ring.rank.last.timestamp.batch

    def ask(self, reason: str, detail: str, answer: Answer, identity: str | None = None) -> None:
        """Writes what the rings hold because a peer asks for it, whose request has that ``identity``.

        Raises:
            BrokerError: there is nothing to be written, or too much was.
        """
        if not self.rings:
            raise BrokerError(
                f"run {self._run!r} has no flight recorder: start the training with flight_recorder='200ba', or "
                "'trainer --flight-recorder 200ba'"
            )
        now = time.monotonic()
        if reason == "alert" and now - self._alerted < ALERT_PAUSE:
            answer(None, f"another alert had it written less than {ALERT_PAUSE:g} s ago")
            return
        if reason == "alert":
            self._alerted = now
        if reason in _ONCE and reason in self._met:
            answer(None, f"it was written because of {reason!r} already")
            return
        if len(self._pending) >= _MOST_PENDING:
            raise BrokerError(f"{_MOST_PENDING} dumps are waiting to be written: ask again later")
        self._dump(reason, detail, answer, identity)
        if self._is_full:
            raise BrokerError(self._full)

    # -- writing ------------------------------------------------------------------------------------------------------

    @property
    def is_writing(self) -> bool:
        """Whether :meth:`work` has something to do."""
        return self._writing is not None or bool(self._pending)

    @property
    def _full(self) -> str:
        return (
            f"attempt {self._attempt} of run {self._run!r} has {MOST_DUMPS} dumps of its flight recorder, which is as "
            "many as are written: remove some"
        )

    def _dump(self, reason: str, detail: str, answer: Answer | None = None, identity: str | None = None) -> None:
        if not self.rings:
            return
        self._met.add(reason)
        number = self._next_number()
        was_full, self._is_full = self._is_full, number is None
        if number is None:
            if not was_full:
                _log.warning("%s", self._full)
            return
        self._announce(reason, detail, identity or new_run_id())
        self._pending.append(_Dump(number, reason, detail, time.time_ns(), answer))

    def _next_number(self) -> int | None:
        for number in range(1, MOST_DUMPS + 1):
            waits = any(one is not None and one.number == number for one in (*self._pending, self._current))
            if not waits and not dump_path(self._directory.path, self._attempt, number).exists():
                return number
        return None

    def _announce(self, reason: str, detail: str, identity: str) -> None:
        try:
            announce_dump(self._directory.path, AnnouncedDump(identity, self._attempt, reason, detail, time.time()))
        except (OSError, OffloopError) as error:
            _log.warning("run %s: other hosts do not learn of a dump: %s", self._run, error)

    def _alert(self, about: str, status: str, text: str, batch: int) -> None:
        now = time.time()
        name = f"flight-{self._attempt}-{about}-{status}-{now:.3f}"
        note_alert(self._directory.path, RunAlert(name, status, about, text, now, self._attempt, batch))

    def work(self, until: float) -> None:
        """Continues writing until that time of ``time.monotonic``."""
        while time.monotonic() < until and self.is_writing:
            if self._writing is None:
                self._current = dump = self._pending.popleft()
                self._writing = self._write(dump)
            try:
                next(self._writing)
            except StopIteration:
                self._writing = self._current = None
                self._close_replaced()

    def _close_replaced(self) -> None:
        if self._writing is None:
            while self._replaced:
                self._replaced.pop().close()

    def finish(self) -> None:
        """Writes everything that is to be written, and lets go of the rings."""
        while self.is_writing:
            self.work(math.inf)
        for ring in self.rings.values():
            ring.reader.close()
        self.rings.clear()

    def _write(self, dump: _Dump) -> Iterator[None]:
        path = dump_path(self._directory.path, self._attempt, dump.number)
        draft = path.with_name(f".{path.name}.tmp")
        writer = None
        try:
            draft.unlink(missing_ok=True)
            found = yield from self._copy()
            about = {"flight": dump.reason, "flight_detail": dump.detail, "flight_time": str(dump.time_ns)}
            short = [f"rank {number}: {one.batches} of {one.wanted}" for number, one in found.items() if one.is_short]
            if short:
                about["flight_short"] = f"batches that the memory had room for: {', '.join(short)}"
                _log.warning("run %s, %s: %s", self._run, path.name, about["flight_short"])
            writer = RecordingWriter(draft, self._run, self._attempt, new_run_id(), about)
            yield from self._append(writer, found)
            # The disk may take its time for that.
            failed: list[Exception] = []
            closing = threading.Thread(target=_close, args=(writer, failed), daemon=True)
            closing.start()
            while closing.is_alive():
                closing.join(0.001)
                yield
            if failed:
                raise failed[0]
            os.rename(draft, path)
            sync(self._directory.path)
        # Whatever it is, it ends this dump alone: the broker serves other runs, too.
        except Exception as error:  # noqa: BLE001
            why = (
                f"{path.name} cannot be written: {error if isinstance(error, OSError | OffloopError) else repr(error)}"
            )
            _log.error("run %s: %s", self._run, why)
            if writer is not None:
                with suppress(OSError, OffloopError):
                    writer.close()
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            if dump.answer is not None:
                dump.answer(None, why)
        else:
            said = f"{path.name}: {_in_words(found)}"
            _log.info("run %s, %s: %s", self._run, dump.reason, said)
            if dump.answer is not None:
                dump.answer(said, None)

    def _copy(self) -> "Generator[None, None, dict[int, _Kept]]":
        """Copies what is in the rings now; returns it by rank."""
        copied: dict[int, list[tuple[int, bytes]]] = {}
        # Ranks come and are replaced between two slices.
        rings = dict(self.rings)
        for number, ring in rings.items():
            copied[number] = []
            try:
                for one in ring.reader.blocks():
                    copied[number].append(one)
                    if not len(copied[number]) % _SLICE:
                        yield
            except ProtocolError as error:
                _log.warning("run %s: %s", self._run, error)
        found: dict[int, _Kept] = {}
        for number, blocks in copied.items():
            ring = rings[number]
            kept = found[number] = _Kept(ring, ring.reader.batches)
            end = Topic(self._run, Event.BATCH_END.value, number).encode()
            for _, block in sorted(blocks, reverse=True):
                if not kept.take(list(frames_in(block)), end):
                    break
                yield
            kept.frames.reverse()
        return found

    def _append(self, writer: RecordingWriter, found: "dict[int, _Kept]") -> Iterator[None]:
        streams = [self._records(number, kept) for number, kept in found.items()]
        for count, (time_ns, _, topic, seq, base_seq, body) in enumerate(heapq.merge(*streams)):
            writer.append(topic, seq, base_seq, time_ns, body)
            if not count % _SLICE:
                yield

    def _records(self, number: int, kept: "_Kept") -> Iterator[tuple[int, int, bytes, int, int, bytes]]:
        """The events of a rank for the file, with the marks before and after them."""
        last, phases = None, _Phases()
        for frame in kept.frames:
            try:
                topic, body = split_frame(frame)
                event = decode_whole_event(body)
                if topic is None or (topic.run, topic.rank) != (self._run, number) or event.attempt != self._attempt:
                    raise ProtocolError("an event of something else")
                if last is not None and not last.seq < event.seq:
                    raise ProtocolError("an event out of order")
            except ProtocolError as error:
                _log.warning("run %s, flight recorder of rank %d: %s", self._run, number, error)
                continue
            if last is None:
                yield from self._begin(number, event, event.base_seq - BASE_STEPS.get(topic.name, 0))
            found = phases.follow(topic.name, event)
            if topic.name == Event.BATCH_END and (added := kept.missing(event, found)):
                event = event.replace(fields={**event.fields, **added})
                body = _encode(topic, event)
            last = event
            yield event.time, number, topic.encode()[:-1], event.seq, event.base_seq, body
        end = kept.ring.rank.end
        if last is not None and end is not None:
            fields = end[1].fields
            yield self._mark(END, number, last.seq + 1, last.base_seq + 1, last, fields, end[1].context)

    def _begin(self, number: int, first: EventBody, base_seq: int) -> Iterator[tuple[int, int, bytes, int, int, bytes]]:
        # Number 1 of a ring is never given to an event.
        if first.seq > 2:
            left_out = {"first": 1, "base_first": 1}
            yield self._mark(CUT, number, first.seq - 2, base_seq - 1, first, left_out, {})
        yield self._mark(DEMAND, number, first.seq - 1, base_seq, first, {"demand": _DEMAND}, first.context)

    def _mark(
        self,
        name: str,
        number: int,
        seq: int,
        base_seq: int,
        beside: EventBody,
        fields: dict[str, Any],
        context: dict[str, Any],
    ) -> tuple[int, int, bytes, int, int, bytes]:
        topic = Topic(self._run, name, number)
        mark = EventBody(1, self._attempt, seq, base_seq, beside.time, beside.timestamp, None, fields, context)
        return mark.time, number, topic.encode()[:-1], seq, base_seq, _encode(topic, mark)


@dataclass
class _Kept:
    """What was found of a rank, the newest first until all is there."""

    ring: _Ring
    wanted: int
    frames: list[bytes] = field(default_factory=list)
    batches: int = 0

    def take(self, frames: list[bytes], end: bytes) -> bool:
        """Takes the events of a block; whether those before it are to be kept, too."""
        for frame in reversed(frames):
            if frame.startswith(end):
                if self.batches == self.wanted:
                    return False
                self.batches += 1
            self.frames.append(frame)
        return True

    @property
    def is_short(self) -> bool:
        """Whether older events had no room."""
        return self.batches < self.wanted and bool(self.frames) and not _is_first(self.frames[0])

    def missing(self, event: EventBody, phases: dict[str, Any] | None) -> dict[str, Any]:
        """What the end of a batch lacks of its fields, and is known by now."""
        added: dict[str, Any] = {}
        if event.fields.get("loss") is None and (loss := self.ring.losses.get(event.timestamp.batch)) is not None:
            added["loss"] = loss
        if phases is not None and "phases" in event.fields and event.fields["phases"] is None:
            added["phases"] = phases
        return added


class _Phases:
    """Finds the phases of each batch of a rank in the times of its events."""

    def __init__(self) -> None:
        self._began: int | None = None
        self._open: tuple[str, int] | None = None
        self._spans: list[list[Any]] = []

    def follow(self, name: str, event: EventBody) -> dict[str, Any] | None:
        """Takes the next event; returns the phases of the batch that it ends, if all of that was seen."""
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


def _encode(topic: Topic, event: EventBody) -> bytes:
    encode = event_encoder(topic, event.attempt)
    values = event.seq, event.base_seq, event.time, event.timestamp, event.previous
    return encode(*values, event.fields, pack_map(event.context))[len(topic.encode()) :]


def _close(writer: RecordingWriter, failed: list[Exception]) -> None:
    try:
        writer.close()
    except Exception as error:  # noqa: BLE001  raised again by who waits for it
        failed.append(error)


def _in_words(found: dict[int, _Kept]) -> str:
    batches = max((one.batches for one in found.values()), default=0)
    events = sum(len(one.frames) for one in found.values())
    ranks = f"{len(found)} rank{'s' if len(found) != 1 else ''}"
    return f"{events:,} events of {ranks}, {batches:,} whole batches"
