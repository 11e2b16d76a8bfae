"""Trainers of the recorded job, and stand-ins for what surrounds a trainer."""

from collections.abc import Callable
from typing import Any

from gold import GoldMLP, gold_loader, gold_optimizer

from offloop.bus.types.demand import Demand
from offloop.bus.types.event import Event
from offloop.trainer import Algorithm, AlgorithmLogger, Evaluator, State, Trainer


def gold_evaluators(loaders: dict[str, dict[str, Any]]) -> list[Evaluator]:
    """Make evaluators as a trace's configuration lists them."""
    return [Evaluator(label, gold_loader(label, one["n"], one["batch_size"])) for label, one in loaders.items()]


def gold_trainer(n_train: int = 24, batch_size: int = 6, **arguments: Any) -> Trainer:
    """Return a trainer of the recorded job, without a stream unless asked for one."""
    model = arguments.pop("model", None) or GoldMLP()
    settings: dict[str, Any] = {
        "train_dataloader": gold_loader("train", n_train, batch_size),
        "max_duration": "2ep",
        "seed": 17,
        "device": "cpu",
        "publish": False,
        "progress_bar": False,
    }
    if "optimizers" not in arguments:
        settings["optimizers"] = gold_optimizer(model)
    return Trainer(model, **(settings | arguments))


def fitted(n_train: int = 24, batch_size: int = 6, **arguments: Any) -> Trainer:
    """Train the recorded job, and return its trainer, closed."""
    with gold_trainer(n_train, batch_size, **arguments) as trainer:
        trainer.fit()
    return trainer


class Act(Algorithm):
    """Calls a function with (event, state, logger) at every event, or at the given ones."""

    def __init__(self, do: Callable[[Event, State, AlgorithmLogger], object], *events: Event) -> None:
        self._do = do
        self._events = events

    def match(self, event: Event, state: State) -> bool:
        return not self._events or event in self._events

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        self._do(event, state, logger)


class FakeClock:
    """Nanoseconds that pass only when they are told to."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self) -> int:
        return round(self.seconds * 1e9)


class FakeStream:
    """Keeps what is sent; no consumer wants anything."""

    demand = Demand()
    demand_version = 0

    def __init__(self) -> None:
        self.sent: list[tuple[Event, dict[str, Any], bytes]] = []

    def send(
        self,
        event: Event,
        timestamp: Any,
        previous: Any,
        fields: dict[str, Any],
        context: bytes,
        has_deferred: bool = False,
        time: int | None = None,
    ) -> None:
        # Not copied: an event that waits to be sent must not change under the stream's hands.
        self.sent.append((event, fields, context))

    def demand_in_effect(self, timestamp: Any) -> None:
        raise AssertionError("nobody asked for anything")
