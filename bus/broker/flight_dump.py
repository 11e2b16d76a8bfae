"""Writes the events in the rings of a flight recorder to a file."""

import heapq
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from offloop.bus.broker.rank import LiveRank
from offloop.bus.errors import ProtocolError
from offloop.bus.files import sync
from offloop.bus.protocol.flight_ring import FlightRingReader
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
from offloop.bus.protocol.order import BASE_STEPS
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.runs.directory import new_run_id
from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.bus.types.phases import BEGINS, BETWEEN, ENDS, MAX_SPANS

_log = logging.getLogger("offloop.broker")

_Record: TypeAlias = tuple[int, int, bytes, int, int, bytes]
_DEMAND = Demand(
    {event: EventDemand(1, {"phases": 1}) if event is Event.BATCH_END else EventDemand() for event in Event}
).to_wire()


class RankRing(NamedTuple):
    """The ring of a rank."""

    rank: LiveRank
    reader: FlightRingReader


def write_dump(path: Path, run: str, attempt: int, about: Mapping[str, str], rings: Mapping[int, RankRing]) -> str:
    """Write a recording of what rings hold now, the attempt's newest batches; return in words what is in it.

    ``about`` is further metadata of the recording; the rings are given by rank.

    Raises:
        OSError, OffloopError: it cannot be written, and nothing is left of it.
    """
    kept = []
    for number, ring in rings.items():
        try:
            # Of all ranks before anything is looked for, so that they are of about one moment.
            kept.append((number, ring, ring.reader.copy()))
        except ProtocolError as error:
            _log.warning("run %s: %s", run, error)
    streams = [_RankEvents(run, attempt, *one) for one in kept]
    if short := [one for one in streams if one.is_short]:
        had_room = ", ".join(f"rank {one.number}: {one.batches} of {one.ring.reader.batches}" for one in short)
        about = {**about, "flight_short": f"batches that the memory had room for: {had_room}"}
        _log.warning("run %s, %s: %s", run, path.name, about["flight_short"])
    draft = path.with_name(f".{path.name}.tmp")
    try:
        draft.unlink(missing_ok=True)
        with closing(RecordingWriter(draft, run, attempt, new_run_id(), about)) as writer:
            for time_ns, _, topic, seq, base_seq, body in heapq.merge(*streams):
                writer.append(topic, seq, base_seq, time_ns, body)
        os.rename(draft, path)
        sync(path.parent)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    batches, events = max((one.batches for one in streams), default=0), sum(len(one.frames) for one in streams)
    ranks = f"{len(streams)} rank{'s' if len(streams) != 1 else ''}"
    return f"{events:,} events of {ranks}, {batches:,} whole batches"


class _RankEvents:
    """The events of a rank for a dump, with the marks before and after them: those of the last batches that its ring
    was to hold."""

    def __init__(self, run: str, attempt: int, number: int, ring: RankRing, frames: list[bytes]) -> None:
        self._run = run
        self._attempt = attempt
        self.number = number
        self.ring = ring
        end = Topic(run, Event.BATCH_END.value, number).encode()
        # One more, if it is there, ends the batch before the first one that is kept.
        ends = [at for at, frame in enumerate(frames) if frame.startswith(end)][-ring.reader.batches - 1 :]
        self._before = frames[ends[0]] if len(ends) > ring.reader.batches else None
        self.batches = len(ends) - (self._before is not None)
        self.frames = frames if self._before is None else frames[ends[0] + 1 :]

    @property
    def is_short(self) -> bool:
        """The ring had no room for all batches that it was to hold."""
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
                base_seq = event.base_seq - BASE_STEPS.get(topic.name, 0)
                # Number 1 of a ring is never given to an event.
                if event.seq > 2:
                    left_out = {"first": 1, "base_first": 1}
                    yield self._mark(CUT, event.seq - 2, base_seq - 1, event, left_out, {})
                yield self._mark(DEMAND, event.seq - 1, base_seq, event, {"demand": _DEMAND}, event.context)
            found = phases.follow(topic.name, event)
            if topic.name == Event.BATCH_END and found is not None and event.fields.get("phases", found) is None:
                event = msgspec.structs.replace(event, fields_={**event.fields, "phases": found})
                body = _encode(topic, event)
            last = event
            yield event.time, self.number, topic.encode()[:-1], event.seq, event.base_seq, body
        end = self.ring.rank.end
        if last is not None and end is not None:
            yield self._mark(END, last.seq + 1, last.base_seq + 1, last, end[1].fields, end[1].context)

    def _mark(
        self, name: str, seq: int, base_seq: int, beside: EventBody, fields: dict[str, Any], context: dict[str, Any]
    ) -> _Record:
        topic = Topic(self._run, name, self.number)
        mark = EventBody(1, self._attempt, seq, base_seq, beside.time, beside.timestamp, None, fields, context)
        return mark.time, self.number, topic.encode()[:-1], seq, base_seq, _encode(topic, mark)


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
