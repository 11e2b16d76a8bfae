"""Recordings for tests of replays: several ranks, marks, fields on demand, values of every kind, and holes."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from offloop.bus.protocol.frames import COMMAND, DEMAND, END, Topic, event_encoder, pack_map
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.types.demand import BASE_EVENTS
from offloop.bus.types.event import Event

BEGAN = 1_700_000_000_000_000_000
SECOND = 1_000_000_000
STEP = SECOND // 4
BATCHES = 4


class _Rank:
    def __init__(self, writer: RecordingWriter, rank: int, world_size: int, without: Collection[int]) -> None:
        self._writer, self._rank, self._without = writer, rank, without
        self._context = {"world_size": world_size, "max_duration": "3ep"}
        self._seq = self._base_seq = 0

    def append(self, name: str, time: int, timestamp: list[int], fields: dict[str, Any]) -> None:
        self._seq += 1
        self._base_seq += name.startswith("$") or Event(name) in BASE_EVENTS
        encode = event_encoder(Topic("r", name, self._rank), 1)
        frame = encode(self._seq, self._base_seq, time, timestamp, None, fields, pack_map(self._context))
        topic, _, body = frame.partition(b"\0")
        if self._seq not in self._without:
            self._writer.append(topic, self._seq, self._base_seq, time, body)


def record(
    path: Path, ranks: int = 1, status: str = "finished", without: Collection[int] = (), inner: bool = False
) -> None:
    """Write a recording of three epochs of four batches.

    ``without`` has the numbers of lost events, and ``inner`` adds an event within each batch."""
    writer = RecordingWriter(path, "r", 1)
    rank_writers = [_Rank(writer, rank, ranks, without) for rank in range(ranks)]
    time = BEGAN

    def append(name: str, epoch: int, in_epoch: int, **fields: Any) -> None:
        nonlocal time
        batch = epoch * BATCHES + in_epoch
        wct = batch * STEP // 1000
        timestamp = [0, epoch, batch, 8 * batch, 0, epoch, 0, in_epoch, 8 * in_epoch, 0, wct, wct, 0, 0]
        for rank, rank_writer in enumerate(rank_writers):
            time += 1000
            rank_writer.append(name, time + rank, [0] * 14 if name == END else timestamp, fields)

    append("init", 0, 0, system={"host": "h"})
    append("fit_start", 0, 0, seed=3)
    append(DEMAND, 0, 0, demand={})
    for epoch in range(3):
        append("epoch_start", epoch, 0)
        for batch in range(1, BATCHES + 1):
            if inner:
                append("batch_start", epoch, batch - 1)
            time += STEP
            number = epoch * BATCHES + batch
            fields: dict[str, Any] = {"loss": float("nan") if number == 3 else 1 / number, "lr": {"SGD": [0.1]}}
            if number % 2 == 0:
                fields |= {"gradient_norm": number / 7, "on_demand": ["gradient_norm"]}
            append("batch_end", epoch, batch, **fields)
        append("epoch_end", epoch + 1, 0)
        append("eval_end", epoch + 1, 0, eval_metrics={"eval": {"accuracy": 1 - 1 / (epoch + 2)}})
        if epoch == 0:
            append(COMMAND, epoch + 1, 0, command="set", arguments=["lr", 0.1], id="c", event="batch_end", error=None)
        writer.flush()
    append("fit_end", 3, 0)
    append(END, 3, 0, status=status, error="ValueError: boom" if status == "failed" else None)
    writer.close()
