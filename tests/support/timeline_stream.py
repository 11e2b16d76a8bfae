"""A made-up training whose batches say where their time went, and its recording."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp

MS = 1_000_000
BEGAN_NS = 1_700_000_000_000_000_000


class RankStream:
    """The events of one rank, by a clock that goes on as they say. Times are milliseconds."""

    def __init__(self, rank: int = 0, world_size: int = 1, offset_ns: int = 0, host: str | None = "node-0") -> None:
        self.rank = rank
        self._world_size = world_size
        self._offset = offset_ns
        self._host = host
        self.now = BEGAN_NS
        self._seq = 0
        self._batch = self._epoch = self._in_epoch = 0
        self._began = BEGAN_NS
        self._previous: Timestamp | None = None

    def event(self, event: Event, after: float = 0.0, trained: float = 0.0, **fields: Any) -> Snapshot:
        self.now += round(after * MS)
        self._seq += 1
        if event is Event.INIT and self._host is not None:
            fields["system"] = {"host": self._host}
        if event in (Event.FIT_START, Event.EVAL_AFTER_ALL):
            self._began = self.now
        if event is Event.EPOCH_END:
            self._epoch, self._in_epoch = self._epoch + 1, 0
        timestamp = Timestamp(
            epoch=self._epoch,
            batch=self._batch,
            sample=8 * self._batch,
            batch_in_epoch=self._in_epoch,
            batch_wct=timedelta(milliseconds=trained),
        )
        previous, self._previous = (self._previous, timestamp) if event is Event.BATCH_END else (None, self._previous)
        fields = {"lr": {"SGD": [0.1]}, "world_size": self._world_size, **fields}
        return Snapshot.build(
            event,
            rank=self.rank,
            seq=self._seq,
            time_ns=self.now + self._offset,
            timestamp=timestamp,
            previous_timestamp=previous,
            **fields,
        )

    def batch(self, spans: Sequence[tuple[str, float]], rest: float = 1.0, **fields: Any) -> Snapshot:
        began, start = self._began, 0
        told = []
        for phase, length in spans:
            told.append([phase, start, round(length * MS)])
            start += round(length * MS)
        self.now = began + start
        self._batch, self._in_epoch = self._batch + 1, self._in_epoch + 1
        fields.setdefault("loss", 1 / self._batch)
        phases = {"began": began + self._offset, "spans": told, "device": False}
        snapshot = self.event(Event.BATCH_END, rest, **{"phases": phases, "on_demand": ["phases"], **fields})
        self._began = self.now
        return snapshot


def training_of(batches: int = 4, batches_per_epoch: int = 2, **options: Any) -> Iterator[Snapshot]:
    stream = RankStream(**options)
    yield stream.event(Event.INIT)
    yield stream.event(Event.FIT_START, 5)
    for batch in range(1, batches + 1):
        if batch % batches_per_epoch == 1:
            yield stream.event(Event.EPOCH_START)
        yield stream.batch([("data", 2), ("forward", 3), ("loss", 0.5), ("backward", 2.5), ("optimizer", 1)])
        if batch % batches_per_epoch == 0:
            yield stream.event(Event.EPOCH_END)
            yield stream.event(Event.EVAL_BEFORE_ALL)
            yield stream.event(Event.EVAL_START, dataloader_label="eval")
            metrics = {"eval": {"accuracy": 0.75}}
            yield stream.event(Event.EVAL_END, 20, dataloader_label="eval", eval_metrics=metrics)
            yield stream.event(Event.EVAL_AFTER_ALL)
            yield stream.event(Event.EPOCH_CHECKPOINT)
    yield stream.event(Event.FIT_END)
