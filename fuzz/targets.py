"""The fuzzed decoders, as functions that take bytes and raise when something is wrong.

Errors that a decoder is documented to raise are right. Any other exception is a finding, and so is a value that changes
when it is written and read again. ``decoders.py`` has the limits of time and memory."""

import contextlib
import json
import os
import pickle
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mcap.records
import zstandard
from hypothesis.strategies import SearchStrategy
from inputs import (
    DEMAND,
    EVENT_FIELDS,
    Target,
    event_frame,
    packed,
    spoiled_bytes,
    spoiled_frame,
    spoiled_json,
    spoiled_packed,
)

from offloop.bus.broker.consumers import Consumers
from offloop.bus.errors import (
    BrokerError,
    CheckpointError,
    ConfigurationError,
    FieldNotAvailableError,
    FrozenSnapshotError,
    InvalidTimeError,
    OffloopError,
    ProtocolError,
    RecordingError,
    RunDirectoryError,
)
from offloop.bus.protocol.frames import (
    END,
    EventBody,
    Topic,
    decode_body,
    decode_control,
    decode_event,
    decode_whole_event,
    encode_control,
    encode_frame_batch,
    encode_heartbeat,
    event_encoder,
    pack_map,
    parse_topic,
    split_frame,
)
from offloop.bus.protocol.order import CheckpointMark, Ending, StreamOrder
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording import records
from offloop.bus.recording.reader import Record, RecordingReader
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.runs.directory import BROKER_FILE, RUN_FILE, read_run
from offloop.bus.tools.convert import convert
from offloop.bus.types.demand import BASE_EVENTS, Demand
from offloop.bus.types.event import Event
from offloop.bus.types.intervals import batch_number
from offloop.bus.types.source import Source
from offloop.bus.types.timestamp import Time, Timestamp, TimeUnit, TrainingTime
from offloop.consumers.delivery.commit import CallbackState, Committed, DestinationState, unseal


def check(condition: object, what: str) -> None:
    if not condition:
        raise AssertionError(what)


# -- frames -----------------------------------------------------------------------------------------------------------


def _frames() -> list[bytes]:
    return [
        event_frame(1),
        event_frame(2, END, {"status": "failed", "error": "text"}),
        event_frame(3, "$demand", {"demand": DEMAND}),
        encode_heartbeat("r", 1, 5, {0: (3, 3)}, 4096, {0: (2, 2)}),
        encode_frame_batch([event_frame(1), event_frame(2)]),
        encode_control("lease", {"run": "r", "name": "speed", "demand": DEMAND, "report": {"given": 5}}),
        encode_control("hello", {"run": "r", "rank": 0, "world_size": 1, "publisher_id": "x", "info": {"command": []}}),
        encode_control("handled", {"run": "r", "handled": [[0, 5]], "id": "1"}),
        encode_control("fetch_segment", {"run": "r", "segment": {"pid": 1, "number": 1}, "offset": 0}),
        encode_control("resume", {"from": 2**62}),
    ]


def _frame(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        topic, body = split_frame(data)
        if topic is None:
            found = decode_control(body)
            again = decode_control(split_frame(encode_control(found.kind, found.content))[1])
            check(packed(again[:2]) == packed(found[:2]), "a control message came out differently")
            return
        check(parse_topic(topic.encode()[:-1]) == topic, "a topic came out differently")
        decode_body(body)
        try:
            event = decode_event(body)
            tuple(event)
        except ProtocolError:
            with contextlib.suppress(ProtocolError):
                decode_whole_event(body)
                raise AssertionError("a malformed event was read whole") from None
            raise
        check(repr(event) == repr(decode_whole_event(body)), "an event is another when it is read whole")
        _event_again(topic, event)


def _event_again(topic: Topic, event: EventBody) -> None:
    _, attempt, seq, base_seq, time, timestamp, previous, fields, context = event
    frame = event_encoder(topic, attempt)(seq, base_seq, time, timestamp, previous, fields, pack_map(context))
    found, body = split_frame(frame)
    check(found == topic, "the topic of an event came out differently")
    check(packed(list(decode_event(body))[1:]) == packed(list(event)[1:]), "an event came out differently")


# -- demand -----------------------------------------------------------------------------------------------------------


def _demand(data: bytes) -> None:
    try:
        demand = Demand.from_wire(decode_body(data)[1:][0])
    except (ProtocolError, IndexError):
        return
    check(Demand.from_wire(demand.to_wire()) == demand, "a demand came out differently")
    check(Demand.merge([demand, demand]) == demand, "a demand merged with itself is another")
    check(hash(demand) == hash(Demand.from_wire(demand.to_wire())), "equal demands have different hashes")
    repr(demand)
    for event in Event:
        for batch in (0, 1, 10, 2**31):
            number = batch_number(event, TrainingTime(batch=batch))
            check(
                demand.is_due(event, number) or not demand.due_fields(event, number),
                "a field is due at an event that is not",
            )
    leases = Consumers()
    with contextlib.suppress(BrokerError):
        leases.renew(b"one", demand, 0.0, "name")
        leases.renew(b"two", Demand.of(BASE_EVENTS), 0.0)
        Demand.from_wire(leases.merged(1.0).to_wire())
    check(not leases.merged(1e9), "a lease does not end")


def _demands() -> list[bytes]:
    whole = {event.value: {"every": [1, 7], "fields": {f"f{n}": [n + 1] for n in range(64)}} for event in Event}
    return [packed([1, demand]) for demand in ({}, DEMAND, whole, {"batch_end": {}}, {"from_the_future": 5})]


# -- the order of a stream --------------------------------------------------------------------------------------------

NAMES = (*(event.value for event in Event), END, "$demand", "$checkpoint", "from_the_future")


def _order(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        steps = decode_body(data)[1:]
        for events in (None, [Event.BATCH_START], [Event.BATCH_END, Event.FIT_END]):
            _follow(StreamOrder("r", 1, events), steps)


def _follow(order: StreamOrder, steps: list[Any]) -> None:
    numbers: dict[int, int] = {}
    for step in steps:
        for live, frame in _frames_of(step):
            with contextlib.suppress(ProtocolError):
                topic, body = split_frame(frame)
                if topic is None:
                    continue
                record = f"{topic.run}/{topic.name}/{topic.rank}", body
                given = next(iter(order.from_feed([frame]) if live else order.from_records([record])), None)
                if isinstance(given, list):
                    (snapshot,) = given
                    check(snapshot.seq > numbers.get(snapshot.rank, 0), "an event was given twice, or out of order")
                    numbers[snapshot.rank] = snapshot.seq
                    _look_at(snapshot)
                elif isinstance(given, CheckpointMark):
                    check(given.action in ("save", "load"), "a checkpoint is neither saved nor loaded")
                elif given is not None:
                    check(not order.is_filled(given), "what is missing is there")
                    order.accept_gap(given)
                    check(order.is_filled(given), "what was given up is still missing")
    for gap in order.gaps:
        check(gap.first <= gap.last, "a gap ends before it begins")
    check(order.ending is None or isinstance(order.ending, Ending), "an ending is none")
    str(order.ending)
    check(len(order.topics) >= 1, "nothing to subscribe to")


def _frames_of(step: Any) -> Iterator[tuple[bool, bytes]]:
    match step:
        case [bool() as live, bytes() as frame]:
            yield live, frame
        case [bool() as live, int() as seq, int() as name, int() as rank] if 0 < seq < 2**63 and rank >= 0:
            yield live, event_frame(seq, NAMES[name % len(NAMES)], rank=rank, base_seq=seq // 2 or 1)
        case [bool() as live, int() as seq, str() as name, dict() as fields] if 0 < seq < 2**63:
            yield live, event_frame(seq, name, fields)


def _orders() -> list[bytes]:
    batch, end, demand = NAMES.index("batch_end"), NAMES.index(END), NAMES.index("$demand")
    return [
        packed([1, [True, event_frame(1)], [True, event_frame(3)], [False, event_frame(2)]]),
        packed([1, [True, 2, batch, 0], [False, 4, batch, 1], [True, 4, batch, 0], [True, 5, end, 0]]),
        packed([1, [True, 1, "$demand", {"demand": DEMAND}], [False, 2, END, {"status": "failed", "error": "x"}]]),
        packed([1, [False, 2, demand, 0], [False, 2, end, 0], [False, 9, end, 1]]),
    ]


# -- snapshots --------------------------------------------------------------------------------------------------------

_PROPERTIES = [name for name, value in vars(Snapshot).items() if isinstance(value, property)]
_TIMES = [name for name, value in vars(Timestamp).items() if isinstance(value, property)]


def _snapshot(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        event = decode_event(data)
        for kind in (Event.BATCH_END, Event.EVAL_BATCH_END):
            _look_at(Snapshot(kind, "r", 0, event))
        Source.of(event.fields).describe()


def _look_at(snapshot: Snapshot) -> None:
    repr(snapshot)
    hash(snapshot)
    for name in (*_PROPERTIES, *map(str, snapshot.fields)):
        with contextlib.suppress(OffloopError):
            value = getattr(snapshot, name)
            repr(value)
            if isinstance(value, Timestamp):
                _look_at_time(value)
    with contextlib.suppress(OffloopError):
        repr(snapshot.get_elapsed_duration())
    with contextlib.suppress(FieldNotAvailableError):
        snapshot.no_such_field  # noqa: B018
    with contextlib.suppress(FrozenSnapshotError):
        snapshot.loss = 0.0  # type: ignore[misc]
    again = pickle.loads(pickle.dumps(snapshot))
    check(again.fields.keys() == snapshot.fields.keys(), "a snapshot came out of a pickle differently")


def _look_at_time(timestamp: Timestamp) -> None:
    for name in _TIMES:
        with contextlib.suppress(OffloopError):
            repr(getattr(timestamp, name))
    for unit in TimeUnit:
        with contextlib.suppress(OffloopError):
            timestamp.get(unit)


_SOURCE = {
    "framework": {"name": "Foo", "version": "1.2"},
    "unavailable": {"events": ["eval_end"], "fields": {"gradient_norm": "no gradients"}},
}


def _bodies() -> list[bytes]:
    everything = EVENT_FIELDS | {
        "eval_timestamp": [0] * 14,
        "predict_timestamp": [1] * 14,
        "eval_metrics": {"eval": {"accuracy": 0.5}},
        "logged": [[1, {"a": 1.0}]],
        **_SOURCE,
    }
    return [frame.partition(b"\0")[2] for frame in (event_frame(1), event_frame(2**40, fields=everything))]


# -- recordings -------------------------------------------------------------------------------------------------------


class _Memory:
    is_coming = False
    hole = None

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.largest = 0

    def read_at(self, offset: int, size: int) -> bytes:
        check(offset >= 0 and size >= 0, "a reader asks for what can not be")
        piece = self._data[offset : offset + size]
        self.largest = max(self.largest, len(piece))
        return piece

    def forget(self, offset: int) -> None:
        pass

    def close(self) -> None:
        pass


_MEMORY = "/dev/shm"  # waiting for a disk would take most of the time
_folder = tempfile.TemporaryDirectory(prefix="offloop-fuzz-", dir=_MEMORY if os.path.isdir(_MEMORY) else None)
FOLDER = Path(_folder.name)  # for decoders that read files

_DATA_END = records.HEAD.pack(records.OP_DATA_END, 4)


def _recording(data: bytes) -> None:
    kept = _read(data)
    path, output = FOLDER / "recording-1.mcap", FOLDER / "recovered.mcap"
    path.write_bytes(data)
    output.unlink(missing_ok=True)
    with contextlib.suppress(OffloopError):
        for snapshot in Recording(path):
            repr(snapshot)
    with contextlib.suppress(OffloopError):
        done = convert([path], output)
        check(path.read_bytes() == data, "the original was changed")
        check(0 <= done.events <= len(kept), "more was recovered than there is")
        recovered = [topic for topic, _ in _read(output.read_bytes()) if "/$" not in topic]
        check(len(recovered) == done.events, "what was recovered cannot be read")
    with contextlib.suppress(OffloopError):
        writer = RecordingWriter(path, "r", 1, resume=True)
        topic, _, body = event_frame(2**31).partition(b"\0")
        writer.append(topic, 2**31, 2**31, 1, body)
        writer.close()
        found = [recorded for _, recorded in _read(path.read_bytes())]
        # A writer puts nothing behind the end of the data, so either result is right.
        behind = data.partition(_DATA_END)[2]
        check(records.CHECK_SIGN in behind or found[-1:] == [body], "what was appended cannot be read")


def _read(data: bytes) -> list[Record]:
    source, found = _Memory(data), []
    with contextlib.suppress(RecordingError), RecordingReader(source, "recording") as reader:
        for _ in range(2):
            for chunk in reader.read():
                found += chunk
        check(reader.position <= len(data), "a reader is past the end")
        str(reader.damage), str(reader.cut), str(reader.lost), str(reader.positions)
    return found


def _records(data: bytes) -> None:
    with contextlib.suppress(ProtocolError, TypeError, ValueError, OverflowError, struct.error):
        whole = b"".join(map(_record, decode_body(data)[1:]))
        if len(whole) < 1 << 20:
            _recording(_front() + whole)


def _record(part: Any) -> bytes:
    match part:
        case bytes():
            return part
        case ["chunk", bytes() as content]:
            return records.encode_chunk(content, zstandard.compress(content), 0, 1)
        case ["mark", list() as values]:
            payload = packed(values)
            checksum = zlib.crc32(payload, zlib.crc32(struct.pack("<I", len(payload))))
            head = struct.pack(
                "<BQ8sII", records.OP_CHECK, 16 + len(payload), records.CHECK_SIGN, checksum, len(payload)
            )
            return head + payload
        case [int() as opcode, bytes() as content]:
            return records.HEAD.pack(opcode, len(content)) + content
    return b""


def _front() -> bytes:
    return records.MAGIC + records.encode(mcap.records.Header(profile="offloop", library="offloop"))


def _message(seq: int, channel: int = 1) -> bytes:
    body = event_frame(seq).partition(b"\0")[2]
    return records.MESSAGE.pack(records.OP_MESSAGE, 22 + len(body), channel, seq, seq, seq) + body


def _parts() -> list[bytes]:
    metadata = {"run": "r", "attempt": "1", "protocol_version": "1"}
    channel = records.encode(records.channel_record(1, "r/batch_end/0"))
    told = records.encode(mcap.records.Metadata(name="offloop", metadata=metadata))
    content = channel + _message(1) + _message(2)
    mark = ["mark", [0, 0, 2, 0, metadata, {1: "r/batch_end/0"}, {0: [2, 2, 2, False]}]]
    return [
        packed([1, told, ["chunk", content], mark]),
        packed([1, told, mark, ["chunk", content], mark, ["chunk", _message(3)], mark, [15, b"\0" * 4]]),
    ]


def _recordings() -> list[bytes]:
    seeds = []
    for chunks in ((2,), (2, 3, 1)):
        path = FOLDER / "seed.mcap"
        path.unlink(missing_ok=True)
        writer, seq = RecordingWriter(path, "r", 1), 0
        for count in chunks:
            for _ in range(count):
                seq += 1
                topic, _, body = event_frame(seq).partition(b"\0")
                writer.append(topic, seq, seq, seq, body)
            writer.flush()
        seeds.append(path.read_bytes())
        writer.close()
        seeds.append(path.read_bytes())
    return seeds


# -- time -------------------------------------------------------------------------------------------------------------


def _time(data: bytes) -> None:
    text = data.decode(errors="surrogateescape")
    with contextlib.suppress(InvalidTimeError):
        TimeUnit(text)
    with contextlib.suppress(InvalidTimeError):
        check(Timestamp() != text or Timestamp() == Time.from_timestring(text), "a text is another time than it says")
    with contextlib.suppress(InvalidTimeError):
        Time.from_timedelta(text)
    try:
        time = Time.from_timestring(text)
    except InvalidTimeError:
        return
    check(Time.from_timestring(str(time)) == time or time.value != time.value, "a time came out differently")
    repr(time), hash(time)
    for other in ("1ba", "0.5dur", 3, 0.25, -1, 0):
        for combine in (Time.__add__, Time.__sub__, Time.__mul__, Time.__truediv__, Time.__mod__, Time.__lt__):
            with contextlib.suppress(InvalidTimeError, ZeroDivisionError):
                combine(time, other)


def _times() -> list[bytes]:
    return [
        b"10ep",
        b"1e3ba",
        b"0.25dur",
        b"90sec",
        b"1h30m",
        b" 2 H 3 m 4s",
        b"-5sp",
        b"+7TOK",
        b"1_000iter",
        b"nandur",
    ]


# -- files ------------------------------------------------------------------------------------------------------------


def _run_file(data: bytes) -> None:
    folder = FOLDER / "run"
    folder.mkdir(exist_ok=True)
    (folder / RUN_FILE).write_bytes(data)
    (folder / BROKER_FILE).write_bytes(data)
    with contextlib.suppress(RunDirectoryError):
        run = read_run(folder)
        repr(run)
        str(run.status), str(run.recording), float(run.started), str(run.away)
        Source.of(run.last.info).describe()


def _run_files() -> list[bytes]:
    publisher = {"rank": 0, "pid": 1, "started": 5, "host": "h", "publisher_id": "abc"}
    attempt = {"attempt": 1, "recording": "recording-1.mcap", "started": 1.5, "ended": None, "status": "running"}
    attempt |= {"error": None, "world_size": 1, "publishers": [publisher], "info": {"command": ["train"], **_SOURCE}}
    over = attempt | {"status": "failed", "ended": 2.5, "error": "text"}
    return [json.dumps({"name": "r", "attempts": attempts}).encode() for attempts in ([attempt], [over, attempt])]


def _progress(data: bytes) -> None:
    for stored in (data, zlib.crc32(data).to_bytes(4) + data):
        try:
            committed = unseal(stored, Committed)
        except RecordingError:
            continue
        repr(committed)
        with contextlib.suppress(ConfigurationError):
            again = unseal(committed.pack(), Committed)
            check(again.pack() == committed.pack(), "what a consumer stored came out differently")


def _progresses() -> list[bytes]:
    committed = [
        Committed("r", 1, {}, None, 0, (), (), (), None, None),
        Committed(
            *("r", 2, {0: (7, 7), 1: (5, 3)}, event_frame(7), 7),
            (CallbackState("SpeedMonitor", 1, False, {"window": [1.5, 2.5]}),),
            (DestinationState("jsonl", {"offset": 512}),),
            *((), Ending("failed", "text"), "damaged at offset 5"),
        ),
    ]
    return [one.pack()[4:] for one in committed]


def _checkpoint(data: bytes) -> None:
    # Imported here, because torch takes seconds and the other targets need none.
    from safetensors.torch import save_file

    from offloop.trainer.checkpoints.file import read_checkpoint, read_part, read_weights

    path = FOLDER / "checkpoint.safetensors"
    path.write_bytes(data)
    _read_checkpoint(path, read_checkpoint, read_weights)
    with contextlib.suppress(UnicodeDecodeError):
        text = data.decode()
        path.unlink()
        save_file({}, path, {"offloop": text, "offloop_crc32": f"{zlib.crc32(data):08x}"})
        _read_checkpoint(path, read_checkpoint, read_weights, lambda path: read_part(path, "model"))


def _read_checkpoint(path: Path, *ways: Callable[[Path], Any]) -> None:
    for read in ways:
        with contextlib.suppress(CheckpointError):
            read(path)


def _checkpoints() -> list[bytes]:
    import torch

    from offloop.trainer.checkpoints.file import write_checkpoint

    tree = {"model": {"weight": torch.ones(2)}, "rest": [1, None, 2**70, float("inf"), b"x", (1, {2: "a"})]}
    write_checkpoint(FOLDER / "seed.safetensors", tree)
    packed = {"model": {}, "rest": [{"$tuple": [1]}, {"$int": "0x5"}, {"$float": "7ff0000000000000"}]}
    packed["rest"] += [{"$bytes": "model.weight"}, {"$dict": [[2, "a"]]}, {"$tensor": "model.weight"}]
    text = json.dumps({"version": 1, "tree": packed, "tensors": {}})
    return [(FOLDER / "seed.safetensors").read_bytes(), text.encode()]


def _spoiled_time(data: bytes) -> SearchStrategy[bytes]:
    return spoiled_bytes(data, [*_times(), b"e400", b"9" * 40, b"inf", b"h", b"m", b"s", b"iter"])


def _spoiled_lines(data: bytes) -> SearchStrategy[bytes]:
    return spoiled_bytes(data, [b"curve", b"public-key", b"secret-key", b"view ", b"\n", b"\r", b"\x0b", b'"', b"="])


TARGETS: dict[str, Target] = {
    "frame": Target(_frame, _frames, spoiled_frame),
    "demand": Target(_demand, _demands, spoiled_packed),
    "order": Target(_order, _orders, spoiled_packed),
    "snapshot": Target(_snapshot, _bodies, spoiled_packed),
    "recording": Target(_recording, _recordings, spoiled_bytes),
    "records": Target(_records, _parts, spoiled_packed),
    "time": Target(_time, _times, _spoiled_time),
    "run_file": Target(_run_file, _run_files, spoiled_json),
    "progress": Target(_progress, _progresses, spoiled_packed),
    "checkpoint": Target(_checkpoint, _checkpoints, spoiled_json),
}
"""Every target by name, which is also the name of its folder in ``corpus/``."""
