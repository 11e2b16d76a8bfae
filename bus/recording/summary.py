"""Summary of a recording: hyperparameters, thinned metrics, some events, and offsets of parts of the training.

A summary is a cache. It may be old, missing or damaged: it is continued, or built again."""

import contextlib
import logging
import math
import os
import struct
import time
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from offloop.bus.errors import ProtocolError, RecordingError
from offloop.bus.files import open_file
from offloop.bus.protocol.frames import (
    CHECKPOINT,
    COMMAND,
    EventBody,
    EventHead,
    Topic,
    decode_head,
    decode_whole_event,
    parse_topic,
)
from offloop.bus.recording.reader import RecordingReader
from offloop.bus.recording.records import FileSource
from offloop.bus.types.actor import is_actor
from offloop.bus.types.demand import BASE_EVENTS
from offloop.bus.types.event import OWN, TABLE, Event
from offloop.bus.types.health import HEALTH
from offloop.bus.types.hyperparameters import EVENTS as WITH_HYPERPARAMETERS
from offloop.bus.types.hyperparameters import hyperparameters_in
from offloop.bus.types.metrics import Mode, is_of_evaluation, logged_in, logged_name
from offloop.bus.types.source import Source

_log = logging.getLogger("offloop.summary")

MIN_BYTES = 4 << 20  # shorter recordings are read quickly and have no summary
MAX_BUCKETS = 1024  # of one metric; with many metrics each has fewer, ``MAX_ALL`` in total
MAX_ALL = 32768
MIN_BUCKETS = 16  # of one metric, however many there are
MAX_METRICS = 20_000  # further metrics are left out
MAX_LEFT_OUT = 1000  # names of metrics that are left out, and counted
MAX_EVENTS = 256  # of one kind of event; from more, evenly spaced ones are kept
MAX_EVENT_BYTES = 4096  # larger events are not kept
FIRST_SAVE_SECONDS = 1.0
SAVE_SECONDS = 30.0
MAX_OWN = 256  # names of events of the training's own, and of tables
_VERSION = 7
_MAGIC = b"OFLSUM\r\n"
_PLACE = struct.Struct("<8sQI")  # start of the file: magic, offset and CRC-32 of the head
_MAX_BYTES = 16 << 20
_TRACE_BYTES = 64
_BYTES_AT_ONCE = 16 << 10
_FEW = 4  # fewer values of a metric are added one by one
_MANY = 256  # so many values of an event are gathered
_MOST_GATHERED = 64  # events
_METRICS_AT_ONCE = 64
_RESTS = 100  # saving takes at most one part in this number of a processor
_BYTES_OF_RECORD = 1 << 10  # a small record takes as long as so many bytes of a large one

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
        if later.low_step >= 0 and (self.low_step < 0 or later.low < self.low):
            self.low, self.low_step = later.low, later.low_step
        if later.high_step >= 0 and (self.high_step < 0 or later.high > self.high):
            self.high, self.high_step = later.high, later.high_step
        self.last, self.last_step, self.odd = later.last, later.last_step, self.odd | later.odd


class _SummaryFile:
    """The file of a loaded summary, open until no metric reads from it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, offset: int, size: int) -> bytes:
        """Return at most so many bytes; none if the disk fails."""
        try:
            return os.pread(self._descriptor, size, offset)
        except OSError:
            return b""

    def __del__(self) -> None:
        os.close(self._descriptor)


class Rows:
    """Buckets as rows of seven numbers, see :class:`MetricValues`. Those of a loaded summary are read when used."""

    __slots__ = ("_numbers", "_stored")

    def __init__(
        self, buckets: Iterable[MetricValues] = (), stored: "tuple[_SummaryFile, int, int, int] | None" = None
    ):
        self._numbers = array("d", chain.from_iterable(map(msgspec.structs.astuple, buckets)))
        self._stored = stored  # file, offset, size and CRC-32 of the earlier ones

    def __len__(self) -> int:
        return (len(self._numbers) + (0 if self._stored is None else self._stored[2] // 8)) // _IN_ROW

    def __getitem__(self, row: int) -> MetricValues:
        return _bucket(self._numbers[_IN_ROW * row : _IN_ROW * (row + 1)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and self.packed() == other.packed()

    def packed(self) -> bytes:
        if self._stored is None:
            return self._numbers.tobytes()
        file, offset, size, check = self._stored
        stored = file.read(offset, size)
        return (stored if zlib.crc32(stored) == check else b"") + self._numbers.tobytes()

    def add(self, bucket: MetricValues) -> None:
        self._numbers.extend(msgspec.structs.astuple(bucket))

    def add_late(self, place: int, width: int, step: int, value: float) -> bool:
        """Add a value to the bucket of its place; return whether a bucket was added."""
        if self._stored is not None:
            self._numbers, self._stored = array("d", self.packed()), None
        numbers = self._numbers
        row = bisect_left(range(len(self)), place, key=lambda row: int(numbers[_IN_ROW * row + 1]) // width)
        begin, end = _IN_ROW * row, _IN_ROW * (row + 1)
        is_new = row == len(self) or numbers[begin + 1] // width != place
        bucket = MetricValues(value, step) if is_new else _bucket(numbers[begin:end])
        bucket.add(step, value)
        numbers[begin : begin if is_new else end] = array("d", msgspec.structs.astuple(bucket))
        return is_new

    def __iter__(self) -> Iterator[MetricValues]:
        return map(_bucket, struct.iter_unpack(f"{_IN_ROW}d", self.packed()))


_IN_ROW = len(MetricValues.__struct_fields__)


def _bucket(row: Iterable[float]) -> MetricValues:
    last, last_step, low, low_step, high, high_step, odd = row
    return MetricValues(last, int(last_step), low, int(low_step), high, int(high_step), int(odd))


class Metric(msgspec.Struct, array_like=True):
    """One metric, in buckets of ``width`` steps."""

    width: _Width = 1
    newest: MetricValues | None = None  # the last bucket
    before: MetricValues | None = None  # all values of the earlier buckets
    rows: Rows = msgspec.field(default_factory=Rows)  # the earlier buckets

    def add(self, step: int, value: float) -> bool:
        """Add a value; return whether a bucket was added."""
        newest, place = self.newest, step // self.width
        if newest is not None:
            last = newest.last_step // self.width
            if place == last:
                newest.add(step, value)
                return False
            if place < last:
                before = self.before = self.before or MetricValues(value, step)
                before.add(step, value)
                return self.rows.add_late(place, self.width, step, value)
        self._begin(MetricValues(value, step))
        self.newest.add(step, value)  # type: ignore[union-attr]  # it has just begun
        return True

    def extend(self, steps: list[int], values: "array[float]", most: int) -> None:
        """Add values of increasing steps, in at most so many buckets."""
        total, newest = sum(values), self.newest
        if total - total or len(steps) < _FEW or (newest is not None and steps[0] <= newest.last_step):
            for step, value in zip(steps, values, strict=True):
                if self.add(step, value):
                    self.widen(most)
            return
        self.widen(most, len(steps), steps[-1] - (steps[0] if newest is None else newest.last_step))
        begin = 0
        while begin < len(steps):
            end = bisect_left(steps, (steps[begin] // self.width + 1) * self.width, begin)
            part = values[begin:end]
            low, high = min(part), max(part)
            bucket = MetricValues(
                *(part[-1], steps[end - 1], low, steps[begin + part.index(low)], high, steps[begin + part.index(high)])
            )
            if self.newest is not None and self.newest.last_step // self.width == steps[begin] // self.width:
                self.newest.merge(bucket)
            else:
                self._begin(bucket)
            begin = end

    def _begin(self, bucket: MetricValues) -> None:
        if self.newest is not None:
            self.rows.add(self.newest)
            if self.before is None:
                self.before = self.newest
            else:
                self.before.merge(self.newest)
        self.newest = bucket

    @property
    def buckets(self) -> dict[int, MetricValues]:
        """All buckets by ``step // width``."""
        found = [*self.rows, *(() if self.newest is None else (self.newest,))]
        return {bucket.last_step // self.width: bucket for bucket in found}

    def widen(self, most: int, more: int = 0, steps: int = 0) -> None:
        """Make buckets wider until there is room for ``more`` values, in as many steps as follow."""
        if len(self.rows) + 1 + min(more, steps // self.width) <= most:
            return
        buckets = list(self.buckets.values())
        while len(buckets) + min(more, steps // self.width) > most:
            self.width *= 2
            wide = buckets[:1]
            for before, bucket in pairwise(buckets):
                if bucket.last_step // self.width == before.last_step // self.width:
                    wide[-1].merge(bucket)
                else:
                    wide.append(bucket)
            buckets = wide
        if buckets:
            *earlier, self.newest = buckets
            self.rows, self.before = Rows(earlier), _merged(earlier)

    def points(self) -> list[Point]:
        """Return the kept steps and values, by step. Values that are not finite get fractional steps."""
        found: dict[float, float] = {}
        for place, bucket in self.buckets.items():
            for text, bit in ODD.items():
                if bucket.odd & bit and text != str(bucket.last):
                    found[place * self.width + bit / 8] = float(text)
            for step, value in ((bucket.low_step, bucket.low), (bucket.high_step, bucket.high)):
                if step >= 0:
                    found[step] = value
            found[bucket.last_step] = bucket.last
        return sorted(found.items())

    @property
    def first_step(self) -> float:
        """The lowest kept step; infinity without a value."""
        first = next(iter(self.rows), self.newest)
        steps = () if first is None else (first.last_step, first.low_step, first.high_step)
        return min((step for step in steps if step >= 0), default=math.inf)

    def whole(self, until: float = math.inf) -> MetricValues | None:
        """Return all values together. Lowest and highest are those of the steps before ``until``, as far as kept."""
        whole = _merged(one for one in (self.before, self.newest) if one is not None)
        if whole is None or max(whole.low_step, whole.high_step) < until:
            return whole
        found = MetricValues(whole.last, whole.last_step)
        for one in self.buckets.values():
            for step, value in ((one.low_step, one.low), (one.high_step, one.high), (one.last_step, one.last)):
                if 0 <= step < until:
                    found.add(step, value)
        return found


def _merged(buckets: Iterable[MetricValues]) -> MetricValues | None:
    found: MetricValues | None = None
    for bucket in buckets:
        if found is None:
            found = msgspec.structs.replace(bucket)
        else:
            found.merge(bucket)
    return found


def most_buckets(name: str, metrics: int) -> int:
    """Return the limit of buckets of a metric among so many."""
    most = min(MAX_BUCKETS, MAX_ALL // max(metrics, 1))
    # Of many, not all are to be widened at the same step.
    return most if most >= MIN_BUCKETS else MIN_BUCKETS + zlib.crc32(name.encode()) % MIN_BUCKETS


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
    left_out: set[str] = msgspec.field(default_factory=set)  # metrics beyond the limit, at most ``MAX_LEFT_OUT``
    own: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of each event of the training's own, such as ``@rollout_end``, and of rows of each table, such as
    ``#samples``, of all ranks."""
    counted: dict[int, int] = msgspec.field(default_factory=dict)  # rank to ``seq`` of the last one counted

    @property
    def rows(self) -> dict[str, int]:
        """Number of rows of each table."""
        return {name[1:]: count for name, count in self.own.items() if name[0] == TABLE}

    def count(self, topic: Topic, recorded: bytes) -> None:
        """Count an event of the training's own. A repeated one changes nothing."""
        name, seq, rows = topic.name, decode_head(recorded).seq, 1
        if name == HEALTH.value:
            return
        if name[0] == TABLE:
            rows = len(_decode_rows(recorded).fields.rows)
        if seq > self.counted.get(topic.rank, 0) and (name in self.own or len(self.own) < MAX_OWN):
            self.counted[topic.rank] = seq
            self.own[name] = self.own.get(name, 0) + rows

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

    def log(self, step: int, values: Any) -> None:
        self._add("", step, values, keeps_step=True)

    def _keep(self, event: str, body: EventBody, recorded: bytes) -> None:
        if len(recorded) <= MAX_EVENT_BYTES:
            self.events.setdefault(event, KeptEvents()).add(body.seq, KeptEvent(self.offset, recorded))

    def metric(self, name: str) -> Metric | None:
        """Return a metric, a new one if there is room for it."""
        metric = self.metrics.get(name) or self.metrics.get(name := logged_name(name))
        if metric is None and len(self.metrics) < MAX_METRICS:
            metric = self.metrics[name] = Metric()
        elif metric is None and len(self.left_out) < MAX_LEFT_OUT:
            self.left_out.add(name)
        return metric

    def _add(self, name: str, step: int, value: Any, *, keeps_step: bool = False) -> None:
        kind = value.__class__
        if kind is float or kind is int or kind is bool:
            if (keeps_step or self.is_imported) and is_of_evaluation(name):
                # Readers show it one step earlier, at the given step.
                step += 1
            metric = self.metric(name)
            if metric is not None and step >= 0 and metric.add(step, float(value)):
                metric.widen(most_buckets(name, len(self.metrics)))
        elif kind is dict:
            for key, one in value.items():
                self._add(f"{name}/{key}" if name else str(key), step, one, keeps_step=keeps_step)
        elif kind is list:
            for place, one in enumerate(value):
                self._add(f"{name}/{place}" if name else str(place), step, one, keeps_step=keeps_step)

    @classmethod
    def load(cls, recording: Path) -> "Summary | None":
        """Load the summary beside a recording; ``None`` if it is missing, damaged, or of another recording."""
        try:
            file = _SummaryFile(open_file(path_beside(recording)))
            _, offset, check = _PLACE.unpack(file.read(0, _PLACE.size))
            head = file.read(offset, _MAX_BYTES)
            if file.read(0, len(_MAGIC)) != _MAGIC or zlib.crc32(head) != check:
                raise ValueError("it is damaged")

            def rows_in_file(_: type, place: Any) -> Rows:
                return Rows(stored=(file, *msgspec.convert(place, _Stored)))

            found = msgspec.msgpack.decode(head, type=Summary, dec_hook=rows_in_file)
            if found.version != _VERSION or found.trace != _trace(recording, found.offset):
                raise ValueError("it is of another recording")
        except OSError:
            return None
        except (ValueError, OverflowError, RecursionError, struct.error) as error:
            _note_unused(recording, str(error))
            return None
        return found

    def save(self, recording: Path) -> None:
        """Write it beside the recording, atomically. Raise OSError on failure."""
        draft = path_beside(recording).with_suffix(".new")
        try:
            with open(open_file(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                file.write(bytes(_PLACE.size))

                def write_rows(rows: Rows) -> tuple[int, int, int]:
                    packed, offset = rows.packed(), file.tell()
                    file.write(packed)
                    return offset, len(packed), zlib.crc32(packed)

                head, offset = msgspec.msgpack.encode(self, enc_hook=write_rows), file.tell()
                file.write(head)
                file.seek(0)
                file.write(_PLACE.pack(_MAGIC, offset, zlib.crc32(head)))
            os.replace(draft, path_beside(recording))
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise


_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
_Stored: TypeAlias = tuple[_Count, _Count, _Count]
_Kept = TypeVar("_Kept")


class _Rows(msgspec.Struct, gc=False):
    rows: list[msgspec.Raw] = []


class _WithRows(EventHead, array_like=True, eq=False, gc=False):
    timestamp: msgspec.Raw
    previous: msgspec.Raw
    fields: _Rows


_decode_rows = msgspec.msgpack.Decoder(_WithRows).decode


def _halved(kept: dict[int, _Kept]) -> dict[int, _Kept]:
    return {place // 2: kept[place] for place in sorted(kept)}


def path_beside(recording: Path) -> Path:
    """Return the summary's path: ``summary-1.msgpack`` beside ``recording-1.mcap``."""
    return recording.with_name(f"summary-{recording.stem.removeprefix('recording-')}.msgpack")


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


class _Gathered:
    """Values of the same names at several steps, which are added together: that takes a fifth of the time."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.steps: list[int] = []
        self._values = array("d")  # a row for each step
        self._added = 0  # metrics that a flush has added

    @property
    def is_full(self) -> bool:
        return len(self.steps) >= _MOST_GATHERED

    def take(self, step: int, values: dict[str, Any]) -> bool:
        """Take values; return whether it can."""
        names = list(values)
        if self.steps and (step <= self.steps[-1] or self.is_full or self._added or names != self.names):
            return False
        try:
            self._values.extend(array("d", values.values()))
        except (TypeError, OverflowError):
            return False
        self.names = names
        self.steps.append(step)
        return True

    def flush(self, summary: Summary) -> Iterator[None]:
        """Add the values to a summary, some of the metrics with each step."""
        if not self.steps:
            return
        while self._added < len(self.names):
            name, column = self.names[self._added], self._values[self._added :: len(self.names)]
            self._added += 1
            metric = summary.metric(name)
            if metric is not None:
                steps = [step + 1 for step in self.steps] if is_of_evaluation(name) else self.steps
                metric.extend(steps, column, most_buckets(name, len(summary.metrics)))
            if self._added % _METRICS_AT_ONCE == 0:
                yield
        self.steps, self._values, self._added = [], array("d"), 0


class Summarizer:
    """Updates the summary of a growing recording, a little at a time, from the end of the existing summary.

    That is the one beside the recording, or a ``known`` one."""

    def __init__(
        self, recording: Path, run: str, attempt: int, run_id: str | None, known: Summary | None = None
    ) -> None:
        self._recording = recording
        found = Summary.load(recording) if known is None else known
        if found is not None and (found.run, found.attempt, found.id) != (run, attempt, run_id):
            _note_unused(recording, "it is of another run")
            found = None
        self._summary = found or Summary(_VERSION, run, attempt, run_id)
        self._gathered = _Gathered()
        self._reader = RecordingReader(recording)
        self._reader.position = self._summary.offset
        self._steps = self._take_all()
        self._topics: dict[str, Topic | None] = {}
        self._saved = self._summary.offset
        self._save_at = time.monotonic() + FIRST_SAVE_SECONDS

    @property
    def summary(self) -> Summary:
        """The summary up to here."""
        for _ in self._gathered.flush(self._summary):
            pass
        return self._summary

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
        began, summary = time.monotonic(), self._summary
        if summary.offset > self._saved:
            summary.trace = _trace(self._recording, summary.offset)
            self.summary.save(self._recording)
            self._saved = summary.offset
        took = time.monotonic() - began
        self._save_at = began + max(SAVE_SECONDS, _RESTS * took)

    def close(self) -> None:
        self._reader.close()

    def _take_all(self) -> Iterator[bool]:
        read = 0
        while True:
            for records in self._reader.read():
                # Earlier records are before a check record. Adding one again changes nothing.
                self._summary.offset = self._reader.position
                for topic, recorded in records:
                    self._take(topic, recorded)
                    read += len(recorded) + _BYTES_OF_RECORD
                    if read >= _BYTES_AT_ONCE:
                        read = 0
                        yield False
                    if self._gathered.is_full:
                        for _ in self._gathered.flush(self._summary):
                            yield False
            self._summary.offset = self._reader.position
            yield True

    def _take(self, topic: str, recorded: bytes) -> None:
        if topic not in self._topics:
            self._topics[topic] = _topic_of(topic, self._summary.run)
        taken = self._topics[topic]
        if taken is None:
            return
        event = taken.name
        if event.startswith(OWN):
            with contextlib.suppress(ProtocolError, ValueError, RecursionError):
                self._summary.count(taken, recorded)
            return
        if event not in _TAKEN and b"logged" not in recorded and self._summary.began:
            return
        with contextlib.suppress(ProtocolError):
            body = decode_whole_event(recorded)
            self._summary.take(event, body, recorded)
            for step, values in logged_in(body.fields):
                self._log(step, values)

    def _log(self, step: int, values: Any) -> None:
        is_many = values.__class__ is dict and len(values) >= _MANY and step >= 0 and not self._summary.is_imported
        if is_many and self._gathered.take(step, values):
            return
        # In order: of several values for a step, the last one counts.
        summary = self.summary
        if not (is_many and self._gathered.take(step, values)):
            summary.log(step, values)


_MARKS = frozenset((COMMAND, CHECKPOINT))
# The duration of an evaluation needs both events, and only one may be kept.
_KEPT = (BASE_EVENTS - {Event.BATCH_END, Event.EVAL_BEFORE_ALL, Event.EVAL_AFTER_ALL}) | _MARKS
_TAKEN = frozenset((Event.BATCH_END, Event.EPOCH_END, Event.EVAL_END, *WITH_HYPERPARAMETERS)) | _KEPT


_LOGGED = "logged"  # values of an actor


def _topic_of(topic: str, run: str) -> Topic | None:
    try:
        parsed = parse_topic(topic.encode())
    except ProtocolError:
        return None
    if parsed.run != run:
        return None
    if parsed.name.startswith(OWN):
        return parsed
    if is_actor(parsed.rank):
        return parsed._replace(name=_LOGGED) if parsed.name == Event.ITERATION_CHECKPOINT else None
    is_taken = not parsed.name.startswith("$") or parsed.name in _MARKS
    return parsed if parsed.rank == 0 and is_taken else None
