"""Writes what the rings of a flight recorder hold to a file."""

import heapq
import itertools
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
_DEMAND = Demand(
    {event: EventDemand(1, {"phases": 1}) if event is Event.BATCH_END else EventDemand() for event in Event}
).to_wire()


@dataclass
class Ring:
    """The memory of a rank, and what else its dumps take."""

    rank: LiveRank
    reader: FlightRingReader
    losses: "OrderedDict[int, float]"
    """By batch: those that were on a GPU still when their event was put there are added."""


class Dump:
    """A recording of what rings hold when it begins, the attempt's newest batches.

    It is written in slices: each turn of :meth:`write` is one.

    Args:
        path: the file.
        run: the run's name.
        attempt: its number.
        reason: why it is written.
        detail: the same in words.
        time_ns: when it was decided on, nanoseconds since 1970.
        rings: the rings by rank.
    """

    def __init__(
        self, path: Path, run: str, attempt: int, reason: str, detail: str, time_ns: int, rings: Mapping[int, Ring]
    ) -> None:
        self._path = path
        self._run = run
        self._attempt = attempt
        self._about = {"flight": reason, "flight_detail": detail, "flight_time": str(time_ns)}
        self._rings = rings

    def write(self) -> Generator[None, None, str]:
        """Writes it; returns in words what is in it.

        Raises:
            OSError, OffloopError: it cannot be written, and nothing is left of it.
        """
        draft = self._path.with_name(f".{self._path.name}.tmp")
        kept: list[_Kept] = []
        writer = None
        try:
            draft.unlink(missing_ok=True)
            yield from self._copy(kept)
            about = self._about
            short = [f"rank {one.number}: {one.batches} of {one.requested_batches}" for one in kept if one.is_short]
            if short:
                about["flight_short"] = f"batches that the memory had room for: {', '.join(short)}"
                _log.warning("run %s, %s: %s", self._run, self._path.name, about["flight_short"])
            writer = RecordingWriter(draft, self._run, self._attempt, new_run_id(), about)
            streams = [self._records(one) for one in kept]
            for count, (time_ns, _, topic, seq, base_seq, body) in enumerate(heapq.merge(*streams)):
                writer.append(topic, seq, base_seq, time_ns, body)
                if not count % _SLICE:
                    yield
            # The disk may take its time for that.
            failed: list[Exception] = []
            closing = threading.Thread(target=_close, args=(writer, draft, self._path, failed), daemon=True)
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
        for number, ring in self._rings.items():
            try:
                copy = yield from ring.reader.copy()
            except ProtocolError as error:
                _log.warning("run %s: %s", self._run, error)
            else:
                kept.append(_Kept(number, ring, copy))
        for one in kept:
            yield from one.find(Topic(self._run, Event.BATCH_END.value, one.number).encode())

    def _records(self, kept: "_Kept") -> Iterator[tuple[int, int, bytes, int, int, bytes]]:
        """The events of a rank for the file, with the marks before and after them."""
        number, phases, is_damaged = kept.number, _Phases(), False
        last: EventBody | None = None
        if kept.before is not None:
            with suppress(ProtocolError):
                phases.follow(Event.BATCH_END, decode_whole_event(split_frame(kept.before)[1]))
        for frame in kept.frames():
            try:
                topic, body = split_frame(frame)
                event = decode_whole_event(body)
                if topic is None or (topic.run, topic.rank) != (self._run, number) or event.attempt != self._attempt:
                    raise ProtocolError("an event of something else")
                if last is not None and not last.seq < event.seq:
                    raise ProtocolError("an event out of order")
            except ProtocolError as error:
                if not is_damaged:
                    _log.warning("run %s, flight recorder of rank %d: %s", self._run, number, error)
                is_damaged = True
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


class _Kept:
    """What is kept of a rank: the last batches that its ring was to hold."""

    def __init__(self, number: int, ring: Ring, copy: RingCopy) -> None:
        self.number = number
        self.ring = ring
        self.copy = copy
        self.requested_batches = ring.reader.batches
        self.batches = self.events = 0
        self.before: bytes | None = None
        """The end of the batch before the first one that is kept."""
        self._begin = 0, 0

    def find(self, end: bytes) -> Iterator[None]:
        """Finds where that begins; ``end`` is how the frames begin that end a batch."""
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
        """The frames of its events, oldest first."""
        first, left_out = self._begin
        for block in range(first, len(self.copy)):
            frames = self.copy.frames(block)
            yield from itertools.islice(frames, left_out if block == first else 0, None)

    @property
    def is_short(self) -> bool:
        """Whether older events had no room."""
        first = next(self.frames(), None)
        return self.batches < self.requested_batches and first is not None and not _is_first(first)

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


def _close(writer: RecordingWriter, draft: Path, path: Path, failed: list[Exception]) -> None:
    try:
        writer.close()
        os.rename(draft, path)
        sync(path.parent)
    except Exception as error:  # noqa: BLE001  raised again by who waits for it
        failed.append(error)
