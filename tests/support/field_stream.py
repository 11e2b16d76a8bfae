"""A training whose consumers the test plays: it says what they ask for, and looks at what is sent."""

from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
from training import gold_trainer

from offloop.bus.types.deferred import LeftOut
from offloop.bus.types.demand import BASE_EVENTS, Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.trainer import Trainer
from offloop.trainer.stream.run_stream import TrainingStream

BATCH_END = Event.BATCH_END


class Stream:
    """A publisher in whose place the test decides what consumers want."""

    run_dir = None
    recording = None
    attempt = 1
    info: ClassVar[dict[str, Any]] = {}
    left_out = LeftOut("w")
    run_name = "a-run"
    gathers_until = 0
    closed = True

    def __init__(self, demand: Demand | None = None, always: Iterable[Event] = BASE_EVENTS) -> None:
        self.always = frozenset(always)
        self.requested_events: set[Event] = set()
        self.demand_version = 0
        self.sent: list[tuple[Event, int, dict[str, Any]]] = []
        self.in_effect: list[tuple[int, int]] = []
        self.after_sending: dict[int, Demand] = {}
        self.request(demand or Demand())

    def request(self, demand: Demand) -> None:
        self.demand = demand
        self.demand_version += 1
        self.requested_events &= self.always | demand.events
        self.requested_events |= self.always | demand.events

    next_seq = 1

    def is_handled(self, seq: int, field: str) -> bool:
        return True

    def wait(self) -> None:
        """Nobody is waited for."""

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
        self.sent.append((event, timestamp[2], fields))
        if (demand := self.after_sending.pop(len(self.sent), None)) is not None:
            self.request(demand)

    def demand_in_effect(self, timestamp: tuple[int, ...]) -> None:
        self.in_effect.append((len(self.sent), timestamp[2]))

    def mark_checkpoint(self, action: str, timestamp: tuple[int, ...], run: str | None = None) -> None:
        """No state is kept for it."""

    def close(self, status: str, error: str | None, reason: str | None) -> None:
        assert error is None

    def batches_with(self, name: str, event: Event = BATCH_END) -> list[int]:
        """Return the number of each batch with whose event the field was sent."""
        return [batch + (event is not BATCH_END) for one, batch, fields in self.sent if one is event and name in fields]


def train(monkeypatch: pytest.MonkeyPatch, stream: Stream, batches: int = 95, **arguments: Any) -> Trainer:
    monkeypatch.setattr(TrainingStream, "_start_publisher", lambda *_: stream)
    settings = {"publish": True, "max_duration": f"{batches}ba", "n_train": 30, "batch_size": 6}
    with gold_trainer(**(settings | arguments)) as trainer:
        trainer.fit()
    return trainer


def asking(every: int, *events: Event, field: str = "count") -> Demand:
    return Demand(dict.fromkeys(events or (BATCH_END,), EventDemand(every, {field: every})))
