"""Summary of a recording: hyperparameters, thinned metrics, some events, and offsets of parts of the training.

A summary is a cache. It may be old, missing or damaged: it is continued, or built again."""

import contextlib
import logging
import math
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from offloop.bus.errors import ProtocolError, RecordingError
from offloop.bus.files import open_file, read_file
from offloop.bus.protocol.frames import CHECKPOINT, COMMAND, EventBody, decode_whole_event, parse_topic
from offloop.bus.recording.reader import RecordingReader
from offloop.bus.recording.records import FileSource
from offloop.bus.types.actor import is_actor
from offloop.bus.types.demand import BASE_EVENTS
from offloop.bus.types.event import Event
from offloop.bus.types.hyperparameters import EVENTS as WITH_HYPERPARAMETERS
from offloop.bus.types.hyperparameters import hyperparameters_in
from offloop.bus.types.metrics import Mode, is_of_evaluation
from offloop.bus.types.source import Source

_log = logging.getLogger("offloop.summary")

MIN_BYTES = 4 << 20  # shorter recordings are read quickly and have no summary
MAX_BUCKETS = 1024  # of one metric; with many metrics each has fewer, ``MAX_ALL`` in total
MAX_ALL = 32768
MAX_METRICS = 256  # further metrics are not kept
MAX_EVENTS = 256  # of one kind of event; from more, evenly spaced ones are kept
MAX_EVENT_BYTES = 4096  # larger events are not kept
FIRST_SAVE_SECONDS = 1.0
SAVE_SECONDS = 30.0
_VERSION = 4
_MAGIC = b"OFLSUM\r\n"
_MAX_BYTES = 16 << 20
_TRACE_BYTES = 64
_RECORDS_AT_ONCE = 16

_FIELDS = {"loss": "loss/train/total", "losses": "loss/train", "train_metrics": "metrics/train"}
Point: TypeAlias = tuple[float, float]  # step and value

_Width = Annotated[int, msgspec.Meta(ge=1)]

ODD = {"nan": 1, "inf": 2, "-inf": 4}


class MetricValues(msgspec.Struct, array_like=True, gc=False):
    """Last, lowest and highest value of a metric in a range of steps."""

    last: float
    """Value of the highest step."""
    last_step: int
    low: float = math.nan
    """Lowest finite value; without one ``low_step`` is negative."""
    low_step: int = -1
    high: float = math.nan
    high_step: int = -1
    odd: int = 0
    """Sum of :data:`ODD` for the values that are not finite."""

    def best(self, mode: Mode) -> float:
        """Return the lowest or the highest value."""
        return self.low if mode == "min" else self.high

    def best_step(self, mode: Mode) -> int:
        """Return the step of :meth:`best`."""
        return self.low_step if mode == "min" else self.high_step

    def add(self, step: int, value: float) -> None:
        if step >= self.last_step:
            self.last_step, self.last = step, value
        if value - value != 0.0:
            self.odd |= ODD[str(value)]
        else:
            if self.low_step < 0 or value < self.low:
                self.low_step, self.low = step, value
            if self.high_step < 0 or value > self.high:
                self.high_step, self.high = step, value

    def merge(self, later: "MetricValues") -> None:
        """Add the values of later steps."""
        odd = self.odd | later.odd
        for step, value in ((later.low_step, later.low), (later.high_step, later.high)):
            if step >= 0:
                self.add(step, value)
        self.last_step, self.last, self.odd = later.last_step, later.last, odd


class Metric(msgspec.Struct, array_like=True):
    """One metric, in buckets of ``width`` steps."""

    width: _Width = 1
    buckets: dict[int, MetricValues] = msgspec.field(default_factory=dict)  # buckets by ``step // width``

    def add(self, step: int, value: float) -> bool:
        """Add a value; return whether a bucket was added."""
        place = step // self.width
        bucket = self.buckets.get(place)
        if bucket is not None:
            bucket.add(step, value)
            return False
        bucket = self.buckets[place] = MetricValues(value, step)
        bucket.add(step, value)
        return True

    def widen(self, most: int) -> None:
        while len(self.buckets) > most:
            self.width *= 2
            narrow, self.buckets = self.buckets, {}
            for place in sorted(narrow):
                wide = self.buckets.setdefault(place // 2, narrow[place])
                if wide is not narrow[place]:
                    wide.merge(narrow[place])

    def points(self) -> list[Point]:
        """Return the kept steps and values, by step. Values that are not finite get fractional steps."""
        found: dict[float, float] = {}
        for place in sorted(self.buckets):
            bucket = self.buckets[place]
            for text, bit in ODD.items():
                if bucket.odd & bit and text != str(bucket.last):
                    found[place * self.width + bit / 8] = float(text)
            for step, value in ((bucket.low_step, bucket.low), (bucket.high_step, bucket.high)):
                if step >= 0:
                    found[step] = value
            found[bucket.last_step] = bucket.last
        return sorted(found.items())

    def whole(self) -> MetricValues | None:
        found: MetricValues | None = None
        for place in sorted(self.buckets):
            if found is None:
                found = msgspec.structs.replace(self.buckets[place])
            else:
                found.merge(self.buckets[place])
        return found


class Tick(NamedTuple):
    """Counts and times at the last batch of a bucket, to convert between batches, samples, epochs and times."""

    batch: int
    sample: int
    epoch: float
    time: int  # nanoseconds since 1970
    token: int
    total_wct: int  # microseconds of training
    flops: float  # FLOPs of the batch, or 0 if unknown
    offset: int  # offset of the file part with this batch, where a reader can start


_new_tick = tuple.__new__  # the implementation of Tick(...), at half the cost


class KeptEvent(NamedTuple):
    """A recorded event of the first rank."""

    offset: int  # offset of its file part
    body: bytes


class KeptEvents(msgspec.Struct, array_like=True):
    """Kept events of one kind: the last of each ``width`` numbers."""

    width: _Width = 1
    events: dict[int, KeptEvent] = msgspec.field(default_factory=dict)  # events by ``seq // width``

    def add(self, seq: int, event: KeptEvent) -> None:
        self.events[seq // self.width] = event
        if len(self.events) > MAX_EVENTS:
            self.width, self.events = 2 * self.width, _halved(self.events)


class Summary(msgspec.Struct, array_like=True):
    """Summary of a recording up to a position.

    Metrics have the names that callbacks log: ``loss/train/total``, ``loss/train/PART``, ``lr-OPTIMIZER/groupN``,
    ``metrics/train/NAME``, ``metrics/LABEL/NAME``, and names logged by algorithms. The step of a loss is the number of
    batches before its batch. The step of rates, evaluations and epoch ends is the number of finished batches. Readers
    convert steps with :func:`offloop.bus.types.metrics.shown_step`."""

    version: int
    run: str
    attempt: int
    id: str | None
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0  # end of a check record: everything before it is in the summary
    trace: int = 0  # CRC-32 of the 64 bytes before ``offset``
    began: int = 0  # time of the first event, in nanoseconds since 1970
    clock_width: _Width = 1
    clock: dict[int, Tick] = msgspec.field(default_factory=dict)  # ticks by ``batch // clock_width``
    metrics: dict[str, Metric] = msgspec.field(default_factory=dict)
    last: bytes = b""  # the newest recorded ``batch_end``
    hyperparameters: dict[str, Any] = msgspec.field(default_factory=dict)
    """By name, see :func:`offloop.bus.types.hyperparameters.hyperparameters_in`."""
    is_imported: bool = False
    events: dict[str, KeptEvents] = msgspec.field(default_factory=dict)
    """By name: events and marks with times. A ``batch_end`` is kept if it has ``phases``."""

    def take(self, event: str, body: EventBody, recorded: bytes) -> None:
        """Add an event or mark of the first rank. A repeated one changes nothing."""
        if event in _MARKS:
            self._keep(event, body, recorded)
            return
        self.began = self.began or body.time
        timestamp, fields = body.timestamp, body.fields
        batch = timestamp.batch
        if event in _KEPT or "phases" in fields:
            self._keep(event, body, recorded)
        if event == Event.BATCH_END:
            step = batch if body.previous is None else body.previous.batch
            for field, name in _FIELDS.items():
                if field in fields:
                    self._add(name, step, fields[field])
            rates_of = fields.get("lr")
            for optimizer, rates in rates_of.items() if isinstance(rates_of, dict) else ():
                for group, rate in enumerate(rates) if isinstance(rates, list) else ():
                    self._add(f"lr-{optimizer}/group{group}", batch, rate)
            length = fields["dataloader_len"] if "dataloader_len" in fields else body.context.get("dataloader_len")
            part = timestamp.batch_in_epoch / length if length.__class__ is int and length > 0 else 0.0
            epoch = timestamp.epoch + part
            flops = fields.get("flops_per_batch")
            flops = 0.0 if flops is None or not isinstance(flops, float | int) else float(flops)
            place = epoch, body.time, timestamp.token, timestamp.total_wct, flops, self.offset
            tick = _new_tick(Tick, (batch, timestamp.sample, *place))
            self.clock[batch // self.clock_width] = tick
            if len(self.clock) > MAX_BUCKETS:
                self.clock_width, self.clock = 2 * self.clock_width, _halved(self.clock)
            self.last = recorded
        elif event == Event.EPOCH_END:
            self._add("metrics/train", batch, fields.get("train_metrics"))
        elif event == Event.EVAL_END:
            label = fields["dataloader_label"] if "dataloader_label" in fields else body.context.get("dataloader_label")
            evaluated = fields.get("eval_metrics")
            if isinstance(evaluated, dict) and label in evaluated:
                self._add(f"metrics/{label}", batch, evaluated[label])
        elif event in WITH_HYPERPARAMETERS:
            self.is_imported = self.is_imported or Source.of(fields).is_imported
            self.hyperparameters |= hyperparameters_in(fields)
        logged = fields.get("logged")
        for entry in logged if isinstance(logged, list) else ():
            if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], int):
                self._add("", entry[0], entry[1])

    def _keep(self, event: str, body: EventBody, recorded: bytes) -> None:
        if len(recorded) <= MAX_EVENT_BYTES:
            self.events.setdefault(event, KeptEvents()).add(body.seq, KeptEvent(self.offset, recorded))

    def _add(self, name: str, step: int, value: Any) -> None:
        kind = value.__class__
        if kind is float or kind is int or kind is bool:
            if self.is_imported and is_of_evaluation(name):
                # Shown at the log's own step.
                step += 1
            metric = self.metrics.get(name)
            if metric is None and len(self.metrics) < MAX_METRICS:
                metric = self.metrics[name] = Metric()
            if metric is not None and step >= 0 and metric.add(step, float(value)):
                metric.widen(min(MAX_BUCKETS, max(MAX_ALL // len(self.metrics), MAX_ALL // MAX_METRICS)))
        elif kind is dict:
            for key, one in value.items():
                self._add(f"{name}/{key}" if name else str(key), step, one)
        elif kind is list:
            for place, one in enumerate(value):
                self._add(f"{name}/{place}" if name else str(place), step, one)

    @classmethod
    def load(cls, recording: Path) -> "Summary | None":
        """Load the summary beside a recording; ``None`` if it is missing, damaged, or of another recording."""
        try:
            data = read_file(path_beside(recording), _MAX_BYTES)
        except OSError:
            return None
        content = data[len(_MAGIC) + 4 :]
        try:
            if data != _sealed(content):
                raise ValueError("it is damaged")
            found: Summary = _decode(content)
            if found.version != _VERSION or found.trace != _trace(recording, found.offset):
                raise ValueError("it is of another recording")
        except (ValueError, RecursionError) as error:
            _note_unused(recording, str(error))
            return None
        return found

    def save(self, recording: Path) -> None:
        """Write it beside the recording, atomically. Raise OSError on failure."""
        draft = path_beside(recording).with_suffix(".new")
        try:
            with open(open_file(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                file.write(_sealed(msgspec.msgpack.encode(self)))
            os.replace(draft, path_beside(recording))
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise


_decode = msgspec.msgpack.Decoder(Summary).decode
_Kept = TypeVar("_Kept")


def _halved(kept: dict[int, _Kept]) -> dict[int, _Kept]:
    return {place // 2: kept[place] for place in sorted(kept)}


def path_beside(recording: Path) -> Path:
    """Return the summary's path: ``summary-1.msgpack`` beside ``recording-1.mcap``."""
    return recording.with_name(f"summary-{recording.stem.removeprefix('recording-')}.msgpack")


def _sealed(content: bytes) -> bytes:
    return _MAGIC + zlib.crc32(content).to_bytes(4, "big") + content


def _note_unused(recording: Path, why: str) -> None:
    _log.info("the summary %s is not used: %s", path_beside(recording), why)


def _trace(recording: Path, offset: int) -> int:
    size = min(offset, _TRACE_BYTES)
    try:
        with contextlib.closing(FileSource(recording)) as file:
            found = file.read_at(offset - size, size)
    except RecordingError:
        return -1
    return zlib.crc32(found) if len(found) == size else -1


class Summarizer:
    """Updates the summary of a growing recording, a little at a time, from the end of the existing summary."""

    def __init__(self, recording: Path, run: str, attempt: int, run_id: str | None) -> None:
        self._recording = recording
        found = Summary.load(recording)
        if found is not None and (found.run, found.attempt, found.id) != (run, attempt, run_id):
            _note_unused(recording, "it is of another run")
            found = None
        self.summary = found or Summary(_VERSION, run, attempt, run_id)
        self._reader = RecordingReader(recording)
        self._reader.position = self.summary.offset
        self._steps = self._take_all()
        self._topics: dict[str, str | None] = {}
        self._saved = self.summary.offset
        self._save_at = time.monotonic() + FIRST_SAVE_SECONDS

    def work(self, until: float, *, saves: bool = True) -> bool:
        """Work until the summary is complete, or until a time of ``time.monotonic``; return whether it is complete.

        With ``saves`` it is saved from time to time, which may raise OSError."""
        is_at_end = False
        for is_at_end in self._steps:
            if is_at_end or time.monotonic() >= until:
                break
        if saves and time.monotonic() >= self._save_at:
            self.save()
        return is_at_end

    def save(self) -> None:
        """Write the summary if it has changed. Raise OSError on failure."""
        self._save_at = time.monotonic() + SAVE_SECONDS
        if self.summary.offset > self._saved:
            self.summary.trace = _trace(self._recording, self.summary.offset)
            self.summary.save(self._recording)
            self._saved = self.summary.offset

    def close(self) -> None:
        self._reader.close()

    def _take_all(self) -> Iterator[bool]:
        while True:
            for records in self._reader.read():
                # Earlier records are before a check record. Adding one again changes nothing.
                self.summary.offset = self._reader.position
                for number, record in enumerate(records, 1):
                    self._take(*record)
                    if number % _RECORDS_AT_ONCE == 0:
                        yield False
            self.summary.offset = self._reader.position
            yield True

    def _take(self, topic: str, recorded: bytes) -> None:
        if topic not in self._topics:
            self._topics[topic] = _event_of(topic, self.summary.run)
        event = self._topics[topic]
        if event is None or (event not in _TAKEN and b"logged" not in recorded and self.summary.began):
            return
        with contextlib.suppress(ProtocolError):
            self.summary.take(event, decode_whole_event(recorded), recorded)


_MARKS = frozenset((COMMAND, CHECKPOINT))
# The duration of an evaluation needs both events, and only one may be kept.
_KEPT = (BASE_EVENTS - {Event.BATCH_END, Event.EVAL_BEFORE_ALL, Event.EVAL_AFTER_ALL}) | _MARKS
_TAKEN = frozenset((Event.BATCH_END, Event.EPOCH_END, Event.EVAL_END, *WITH_HYPERPARAMETERS)) | _KEPT


_LOGGED = "logged"  # values of an actor


def _event_of(topic: str, run: str) -> str | None:
    try:
        parsed = parse_topic(topic.encode())
    except ProtocolError:
        return None
    if is_actor(parsed.rank):
        return _LOGGED if (parsed.run, parsed.name) == (run, Event.ITERATION_CHECKPOINT) else None
    is_taken = not parsed.name.startswith("$") or parsed.name in _MARKS
    return parsed.name if (parsed.run, parsed.rank) == (run, 0) and is_taken else None
