"""Streams for tests of consumers: snapshots of a made-up training, and recordings of them; no trainer, no broker."""

import json
from collections.abc import Collection, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from offloop.bus.protocol.frames import END, Topic, event_encoder, pack_map
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.types.demand import BASE_EVENTS
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers import LoggerDestination
from offloop.consumers.api.logger import Row, RunContext

BATCH_NS = 250_000_000
SAMPLES = 8


class Collector(LoggerDestination):
    """A destination that keeps what it is given."""

    def __init__(self) -> None:
        self.context: RunContext | None = None
        self.rows: list[Row] = []
        self.hyperparameters: dict[str, Any] = {}
        self.closed = False

    def open(self, context: RunContext) -> None:
        self.context = context

    def log_rows(self, rows: Iterable[Row], state: Snapshot) -> None:
        self.rows += rows

    def log_hyperparameters(self, hyperparameters: Any, state: Snapshot) -> None:
        self.hyperparameters |= hyperparameters

    def close(self) -> None:
        self.closed = True


def batch_end(batch: int, **fields: Any) -> Snapshot:
    """The end of the batch that makes the counter ``batch``; 4 batches a second, 8 samples each, 4 batches an epoch."""
    return _snapshot(Event.BATCH_END, batch, seq=batch, previous=batch - 1, **fields)


def snapshots_of_training(batches: int = 8, batches_per_epoch: int = 4, **fields: Any) -> list[Snapshot]:
    """The base events of a run with one evaluation, in order, with a loss that falls and a learning rate that stays;
    all with further ``fields``."""
    plan: list[tuple[Event, int, int | None]] = [(Event.INIT, 0, None), (Event.FIT_START, 0, None)]
    for batch in range(1, batches + 1):
        if batch % batches_per_epoch == 1:
            plan.append((Event.EPOCH_START, batch - 1, None))
        plan.append((Event.BATCH_END, batch, batch - 1))
        if batch % batches_per_epoch == 0:
            plan.append((Event.EPOCH_END, batch, batch))
    plan += [(Event.EVAL_END, batches, None), (Event.FIT_END, batches, None)]
    return [_snapshot(event, batch, seq, previous, **fields) for seq, (event, batch, previous) in enumerate(plan, 1)]


def _snapshot(event: Event, batch: int, seq: int, previous: int | None, **fields: Any) -> Snapshot:
    label = "eval" if event.is_eval else "train"
    published = {"loss": 1 / batch if batch else None, "lr": {"SGD": [0.1]}, "dataloader_label": label}
    if event is Event.EVAL_END:
        published["eval_metrics"] = {"eval": {"accuracy": 0.75}}
    return Snapshot.build(
        event,
        seq=seq,
        time_ns=1_700_000_000_000_000_000 + batch * BATCH_NS,
        timestamp=_timestamp(batch),
        previous_timestamp=None if previous is None else _timestamp(previous),
        **(published | fields),
    )


def _timestamp(batch: int) -> Timestamp:
    wct = timedelta(microseconds=batch * BATCH_NS // 1000)
    epoch, in_epoch = divmod(batch, 4)
    return Timestamp(epoch=epoch, batch=batch, sample=batch * SAMPLES, batch_in_epoch=in_epoch, total_wct=wct)


def record_run(
    runs: Path,
    name: str,
    snapshots: Iterable[Snapshot],
    status: str | None = "finished",
    error: str | None = None,
    without: Collection[int] = (),
) -> Path:
    """Makes the directory of a run that is over, with its recording; ``status=None`` for one that was lost.

    Events whose ``seq`` is in ``without`` were published, and never reached the recording."""
    directory = runs / name
    directory.mkdir(parents=True)
    writer = RecordingWriter(directory / "recording-1.mcap", name, 1)
    seq = base_seq = 0
    for seq, snapshot in enumerate(snapshots, 1):
        base_seq += snapshot.event in BASE_EVENTS
        if seq not in without:
            numbers, fields = (seq, base_seq), dict(snapshot.fields)
            _append(writer, name, snapshot.event.value, numbers, snapshot.time_ns, _values(snapshot), fields)
        if snapshot.event is Event.EPOCH_END:
            writer.flush()
    if status is not None:
        _append(writer, name, END, (seq + 1, base_seq + 1), 0, ([0] * 14, None), {"status": status, "error": error})
    writer.close()
    attempt = {"attempt": 1, "recording": "recording-1.mcap", "started": 1.7e9, "ended": 1.7e9 + 1, "info": {}}
    attempt |= {"status": status or "running", "error": error}
    (directory / "run.json").write_text(json.dumps({"name": name, "attempts": [attempt]}))
    return directory


def _values(snapshot: Snapshot) -> tuple[list[int], list[int] | None]:
    previous = snapshot.previous_timestamp
    return list(snapshot.timestamp.values), None if previous is None else list(previous.values)


def _append(
    writer: RecordingWriter,
    run: str,
    name: str,
    numbers: tuple[int, int],
    time: int,
    values: Any,
    fields: dict[str, Any],
) -> None:
    frame = event_encoder(Topic(run, name, 0), 1)(*numbers, time, *values, fields, pack_map({}))
    topic, _, body = frame.partition(b"\0")
    writer.append(topic, *numbers, time, body)
