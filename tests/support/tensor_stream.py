"""A training whose consumers are callbacks in the same process, each handled before the training goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import torch
from field_stream import Stream
from gold import GoldMLP

from offloop.bus.errors import OffloopError
from offloop.bus.protocol.frames import PROTOCOL_VERSION, EventBody
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import TrainingTime
from offloop.consumers.api.callback import Callback, demand_of
from offloop.consumers.api.logger import Logger, RunContext, Upload
from offloop.consumers.api.view import view_for


class TensorStream(Stream):
    """Hands what is sent to callbacks, as it would travel. ``uploads`` are given to ``on_upload`` as a destination is,
    after the event; ``after_event`` is called at its end."""

    def __init__(self, *callbacks: Callback, run_name: str = "r", run_dir: Path | None = None) -> None:
        super().__init__(demand_of(callbacks))
        self.callbacks = callbacks
        self.logger = Logger(RunContext(run_name, 1, run_dir))
        self.run_name = run_name
        self.seq = 0
        self.snapshots: list[Snapshot] = []
        self.is_all_handled = True
        """What the trainer is told of its consumers."""
        self.waits = 0
        self.errors: list[OffloopError] = []
        """What callbacks raised, which are given further events all the same."""
        self.on_upload: Callable[[Upload], object] = lambda upload: None
        self.after_event: Callable[[Snapshot], object] = lambda snapshot: None

    @property
    def next_seq(self) -> int:
        return self.seq + 1

    def is_handled(self, seq: int, field: str) -> bool:
        return self.is_all_handled and seq <= self.seq

    def wait(self) -> None:
        self.waits += 1
        self.is_all_handled = True

    def send(
        self,
        event: Event,
        timestamp: tuple[int, ...],
        previous: Any,
        fields: dict[str, Any],
        context: bytes,
        has_deferred: bool = False,
        time: int | None = None,
    ) -> None:
        super().send(event, timestamp, previous, fields, context, has_deferred)
        self.seq += 1
        told = msgpack.unpackb(msgpack.packb(fields), strict_map_key=False)
        body = EventBody(
            PROTOCOL_VERSION, 1, self.seq, self.seq, self.seq, TrainingTime(*timestamp),
            previous and TrainingTime(*previous), told, msgpack.unpackb(context),
        )  # fmt: skip
        snapshot = Snapshot(event, self.run_name, 0, body)
        self.snapshots.append(snapshot)
        for callback in self.callbacks:
            seen = view_for(callback.demand(), snapshot)
            if seen is not None:
                self.logger.begin(seen)
                try:
                    callback.run_event(event, seen, self.logger)
                except OffloopError as error:
                    self.errors.append(error)
                seen.release()
        self.logger.take_rows(snapshot)
        others = self.logger.take_non_metrics(snapshot)
        for entry in others.entries if others else ():
            if isinstance(entry, Upload):
                self.on_upload(entry)
        self.after_event(snapshot)

    def close(self, status: str, error: str | None, reason: str | None) -> None:
        for callback in self.callbacks:
            callback.close(self.snapshots[-1], self.logger)
            callback.post_close()


class Wide(GoldMLP):
    """Its state is too large for an event."""

    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Parameter(torch.arange(400_000, dtype=torch.float32).reshape(1000, 400).T)
        self.register_buffer("tied", self.more.detach()[3])
