"""Good messages, which the fuzzers spoil."""

from typing import Any

from bus.protocol.frames import Topic, event_encoder, pack_map
from bus.types.demand import Demand
from bus.types.event import Event

EVENT_FIELDS = {"loss": 0.5, "lr": {"SGD": [0.1]}, "batch_size": 32, "train_metrics": {"accuracy": 0.5}}
CONTEXT = {"max_duration": "5ep", "dataloader_label": "train", "dataloader_len": 45, "world_size": 1}


def event_frame(
    seq: int,
    name: str = "batch_end",
    fields: dict[str, Any] | None = None,
    *,
    run: str = "r",
    rank: int = 0,
    attempt: int = 1,
    base_seq: int | None = None,
) -> bytes:
    """A good event."""
    counters = [0, 1, seq, seq, 0, 1, 0, seq, seq, 0, seq, seq, seq, 1]
    encode = event_encoder(Topic(run, name, rank), attempt)
    number = seq if base_seq is None else base_seq
    return encode(seq, number, seq, counters, counters, EVENT_FIELDS if fields is None else fields, pack_map(CONTEXT))


DEMAND = Demand.of([Event.BATCH_START]).to_wire() | {
    "batch_end": {"every": [1], "fields": {"gradient_norm": [10, 15], "images": [100]}}
}
