"""Writes the events in the rings of a flight recorder to a file."""

import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from offloop.bus.broker.rank import LiveRank
from offloop.bus.errors import OffloopError, ProtocolError
from offloop.bus.files import sync
from offloop.bus.protocol.flight_ring import FlightRingReader, RingCopy
from offloop.bus.protocol.frames import (
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
from offloop.bus.protocol.numbering import BASE_STEPS
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.runs.directory import new_run_id
from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.bus.types.phases import BEGINS, BETWEEN, ENDS, MAX_SPANS

_log = logging.getLogger("offloop.broker")

_SLICE = 32
_AT_REST = frozenset(
    {Event.INIT, Event.AFTER_LOAD, Event.FIT_END, Event.EVAL_AFTER_ALL, Event.EVAL_STANDALONE_END, Event.PREDICT_END}
)
"""After these, outside of a training, the user's program may do anything."""
_Record: TypeAlias = tuple[int, int, bytes, int, int, bytes]
_DEMAND = Demand(
    {event: EventDemand(1, {"phases": 1}) if event is Event.BATCH_END else EventDemand() for event in Event}
).to_wire()


@dataclass
class RankRing:
    """The ring of a rank, and what the broker has seen of the rank."""

    rank: LiveRank
    reader: FlightRingReader
    losses: dict[int, float] = field(default_factory=dict)
    """By batch: a loss that was still on a GPU when its event was put into the ring is added from here."""
    position: object = None
    since: float = field(default_factory=time.monotonic)
    """Since when the position has not changed."""
    is_stalled: bool = False
    is_fitting: bool = False

    @property
    def is_at_work(self) -> bool:
        """Whether the rank trains, evaluates or predicts. Raises ProtocolError for malformed memory."""
        if self.is_fitting:
            return True
        newest = self.reader.newest()
        topic = None if newest is None else split_frame(newest)[0]
        return topic is not None and topic.name not in _AT_REST

    @property
    def batch(self) -> int:
        """The batches that the rank has trained."""
        return 0 if self.rank.last is None else self.rank.last.timestamp.batch


class Dump(NamedTuple):
    """A recording of what rings hold when it begins, the attempt's newest batches."""

    path: Path
    run: str
    attempt: int
    about: dict[str, str]
    """Further metadata of the recording."""
    rings: Mapping[int, RankRing]
    """By rank."""

    def write(self) -> Generator[None, None, str]:
        """Write it in slices: each turn is one. Return in words what is in it.

        Raises:
            OSError, OffloopError: it cannot be written, and nothing is left of it.
        """
        draft = self.path.with_name(f".{self.path.name}.tmp")
        kept: list[_Kept] = []
        writer = None
        try:
            draft.unlink(missing_ok=True)
            yield from self._copy(kept)
            about = dict(self.about)
            short = [f"rank {one.number}: {one.batches} of {one.requested_batches}" for one in kept if one.is_short]
            if short:
                about["flight_short"] = f"batches that the memory had room for: {', '.join(short)}"
                _log.warning("run %s, %s: %s", self.run, self.path.name, about["flight_short"])
            writer = RecordingWriter(draft, self.run, self.attempt, new_run_id(), about)
            streams = [self._records(one) for one in kept]
            for count, (time_ns, _, topic, seq, base_seq, body) in enumerate(heapq.merge(*streams)):
                writer.append(topic, seq, base_seq, time_ns, body)
                if not count % _SLICE:
                    yield
            # The disk may take its time for that.
            failed: list[Exception] = []
            closing = threading.Thread(target=_close, args=(writer, draft, self.path, failed), daemon=True)
            closing.start()
            while closing.is_alive():
                closing.join(0.001)
                yield
            if failed:
                raise failed[0]
        except BaseException:
            if writer is not None:
                with suppress(OSError, OffloopError):
                    writer.close()
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
        finally:
            for one in kept:
                one.copy.close()
        batches, events = max((one.batches for one in kept), default=0), sum(one.events for one in kept)
        ranks = f"{len(kept)} rank{'s' if len(kept) != 1 else ''}"
        return f"{events:,} events of {ranks}, {batches:,} whole batches"

    def _copy(self, kept: "list[_Kept]") -> Generator[None, None, None]:
        # Of all ranks before anything is looked for, so that they are of about one moment.
        for number, ring in self.rings.items():
            try:
                copy = yield from ring.reader.copy()
            except ProtocolError as error:
                _log.warning("run %s: %s", self.run, error)
            else:
                kept.append(_Kept(number, ring, copy))
        for one in kept:
            yield from one.find(Topic(self.run, Event.BATCH_END.value, one.number).encode())

    def _records(self, kept: "_Kept") -> Iterator[_Record]:
        """The events of a rank for the file, with the marks before and after them."""
        phases, is_damaged = _Phases(), False
        last: EventBody | None = None
        if kept.before is not None:
            with suppress(ProtocolError):
                phases.follow(Event.BATCH_END, decode_whole_event(split_frame(kept.before)[1]))
        for frame in kept.frames():
            try:
                topic, body = split_frame(frame)
                event = decode_whole_event(body)
                if topic is None or (topic.run, topic.rank) != (self.run, kept.number) or event.attempt != self.attempt:
                    raise ProtocolError("an event of something else")
                if last is not None and not last.seq < event.seq:
                    raise ProtocolError("an event out of order")
            except ProtocolError as error:
                if not is_damaged:
                    _log.warning("run %s, flight recorder of rank %d: %s", self.run, kept.number, error)
                is_damaged = True
                continue
            if last is None:
                base_seq = event.base_seq - BASE_STEPS.get(topic.name, 0)
                # Number 1 of a ring is never given to an event.
                if event.seq > 2:
                    left_out = {"first": 1, "base_first": 1}
                    yield self._mark(CUT, kept, event.seq - 2, base_seq - 1, event, left_out, {})
                yield self._mark(DEMAND, kept, event.seq - 1, base_seq, event, {"demand": _DEMAND}, event.context)
            found = phases.follow(topic.name, event)
            if topic.name == Event.BATCH_END and (added := kept.missing(event, found)):
                event = event.replace(fields={**event.fields, **added})
                body = _encode(topic, event)
            last = event
            yield event.time, kept.number, topic.encode()[:-1], event.seq, event.base_seq, body
        end = kept.ring.rank.end
        if last is not None and end is not None:
            yield self._mark(END, kept, last.seq + 1, last.base_seq + 1, last, end[1].fields, end[1].context)

    def _mark(
        self,
        name: str,
        kept: "_Kept",
        seq: int,
        base_seq: int,
        beside: EventBody,
        fields: dict[str, Any],
        context: dict[str, Any],
    ) -> _Record:
        topic = Topic(self.run, name, kept.number)
        mark = EventBody(1, self.attempt, seq, base_seq, beside.time, beside.timestamp, None, fields, context)
        return mark.time, kept.number, topic.encode()[:-1], seq, base_seq, _encode(topic, mark)


class _Kept:
    """The part of a rank's ring that is written: the last batches that it was to hold."""

    def __init__(self, number: int, ring: RankRing, copy: RingCopy) -> None:
        self.number = number
        self.ring = ring
        self.copy = copy
        self.requested_batches = ring.reader.batches
        self.batches = self.events = 0
        self.before: bytes | None = None
        """The end of the batch before the first one that is kept."""
        self._begin = 0, 0

    def find(self, end: bytes) -> Iterator[None]:
        """Find where that begins; ``end`` is the beginning of frames that end a batch."""
        for block in reversed(range(len(self.copy))):
            frames = list(self.copy.frames(block))
            for at in reversed(range(len(frames))):
                if frames[at].startswith(end):
                    if self.batches == self.requested_batches:
                        self._begin, self.before = (block, at + 1), frames[at]
                        return
                    self.batches += 1
                self.events += 1
            yield

    def frames(self) -> Iterator[bytes]:
        first, left_out = self._begin
        for block in range(first, len(self.copy)):
            frames = self.copy.frames(block)
            yield from itertools.islice(frames, left_out if block == first else 0, None)

    @property
    def is_short(self) -> bool:
        first = next(self.frames(), None)
        return self.batches < self.requested_batches and first is not None and not _is_first(first)

    def missing(self, event: EventBody, phases: dict[str, Any] | None) -> dict[str, Any]:
        """The fields that the end of a batch lacks and that are known by now."""
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
        """Add the next event; return the phases of the batch that it ends, if all of that was seen."""
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


def _close(writer: RecordingWriter, draft: Path, path: Path, failed: list[Exception]) -> None:
    try:
        writer.close()
        os.rename(draft, path)
        sync(path.parent)
    except Exception as error:  # noqa: BLE001  raised again by who waits for it
        failed.append(error)
