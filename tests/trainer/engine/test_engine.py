"""Who is called at an event, in which order, and what is published."""

import json
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
from gold import GoldMLP, gold_optimizer
from helpers import REFERENCE
from training import Act, FakeStream, gold_trainer

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer import Algorithm, AlgorithmLogger, Engine, State
from offloop.trainer.algorithms import SAM, CutMix, GradientClipping, MixUp, SelectiveBackprop
from offloop.trainer.device.device import CpuDevice
from offloop.trainer.engine.engine import default_passes
from offloop.trainer.stream.publishing import StatePublisher, optimizer_names

ORDERS = json.loads((REFERENCE / "engine_order.json").read_text())["per_event"]


def make_state(**arguments: Any) -> State:
    model = arguments.pop("model", None) or GoldMLP()
    settings = {"model": model, "device": CpuDevice(), "seed": 1, "run_name": "r"}
    return State(**(settings | arguments))


class Noting(Algorithm):
    def __init__(self, name: str, calls: list[str], matches: bool = True) -> None:
        self._name, self._calls, self._matches = name, calls, matches

    def match(self, event: Event, state: State) -> bool:
        self._calls.append(f"match:{self._name}")
        return self._matches

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        self._calls.append(f"apply:{self._name}")


@pytest.mark.parametrize("case", ORDERS, ids=[case["event"] for case in ORDERS])
def test_algorithms_are_asked_in_order_and_applied_as_the_reference_does(case: dict[str, Any]) -> None:
    calls: list[str] = []
    state = make_state(algorithms=[Noting("alg_A", calls), Noting("alg_B", calls)])
    if case["event"] in Event.__members__:
        Engine(state, AlgorithmLogger(state)).run_event(Event(case["event"]))
    assert calls == [call for call in case["order"] if call.startswith(("match", "apply"))]


@pytest.mark.parametrize("given", list(permutations([GradientClipping("norm", 1.0), SelectiveBackprop(), SAM()])))
def test_gradients_are_clipped_last_and_rows_are_selected_first(given: tuple[Algorithm, ...]) -> None:
    for event, place, kind in (
        (Event.AFTER_TRAIN_BATCH, -1, GradientClipping),
        (Event.AFTER_DATALOADER, 0, SelectiveBackprop),
    ):
        applied: Sequence[Algorithm] = given
        for one in default_passes:
            applied = one(applied, event)
        assert isinstance(applied[place], kind)
        rest = [one for one in given if not isinstance(one, kind)]
        assert [one for one in applied if one in rest] == rest[::-1]


def test_two_mixtures_of_losses_are_refused() -> None:
    gold_trainer(algorithms=[MixUp(interpolate_loss=True), CutMix(), SAM()])
    with pytest.raises(ConfigurationError, match="MixUp and CutMix cannot both interpolate the loss"):
        gold_trainer(algorithms=[MixUp(interpolate_loss=True), SAM(), CutMix(interpolate_loss=True)])


def test_an_event_is_published_after_the_algorithms_and_only_while_requested() -> None:
    calls: list[str] = []
    requested = {Event.BATCH_END}
    state = make_state(algorithms=[Noting("a", calls)])
    engine = Engine(state, AlgorithmLogger(state), requested, lambda event: calls.append(f"publish:{event.value}"))
    engine.run_event(Event.BATCH_START)
    engine.run_event(Event.BATCH_END)
    requested.add(Event.BATCH_START)
    requested.discard(Event.BATCH_END)
    engine.run_event(Event.BATCH_START)
    engine.run_event(Event.BATCH_END)
    published = [call for call in calls if call.startswith("publish")]
    assert published == ["publish:batch_end", "publish:batch_start"]
    assert calls.index("publish:batch_end") > calls.index("apply:a")


def publisher_of(state: State, logger: AlgorithmLogger | None = None) -> tuple[StatePublisher, FakeStream]:
    stream = FakeStream()
    return StatePublisher(state, logger or AlgorithmLogger(state), stream), stream


def test_metrics_logged_by_algorithms_come_with_the_next_published_event() -> None:
    state = make_state()
    logger = AlgorithmLogger(state)
    publisher, stream = publisher_of(state, logger)
    logger.log_metrics({"norm": torch.tensor(2.5), "count": 3})
    state.timestamp = state.timestamp.advance_batch(6, 0, 10)
    logger.log_metrics({"rate": 0.5})
    logger.log_metrics({"rate": 0.25}, step=7)
    publisher.publish(Event.BATCH_END)
    publisher.publish(Event.BATCH_END)
    first, second = (fields for _, fields, _ in stream.sent)
    assert first["logged"] == [[0, {"norm": 2.5, "count": 3}], [1, {"rate": 0.5}], [7, {"rate": 0.25}]]
    assert "logged" not in second


def test_logged_values_that_cannot_be_sent_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    logger = AlgorithmLogger(make_state())
    logger.log_metrics({"x": {1, 2}, "y": 1.5}, step=3)
    assert logger.take() == [[3, {"y": 1.5}]]
    assert "x is left out, all else is published: a set cannot be logged" in caplog.text


def test_learning_rates_go_by_the_names_of_their_optimizers() -> None:
    first, second = GoldMLP(), GoldMLP()
    groups = [{"params": first.net[0].parameters()}, {"params": first.net[2].parameters(), "lr": torch.tensor(0.25)}]
    state = make_state(optimizers=[torch.optim.SGD(groups, lr=0.5), gold_optimizer(second)])
    publisher, stream = publisher_of(state)
    publisher.publish(Event.BATCH_END)
    state.optimizers.append(torch.optim.Adam(second.parameters(), lr=1.0))
    publisher.publish(Event.BATCH_END)
    assert stream.sent[0][1]["lr"] == {"SGD": [0.5, 0.25], "SGD-1": [0.1]}
    assert stream.sent[1][1]["lr"] == {"SGD": [0.5, 0.25], "SGD-1": [0.1], "Adam": [1.0]}
    assert optimizer_names([state.optimizers[0]] * 3) == ["SGD", "SGD-1", "SGD-2"]


def test_flops_are_published_at_batch_end_where_the_model_has_them() -> None:
    model = GoldMLP()
    model.flops_per_batch = lambda batch: 10 * len(batch)
    state = make_state(model=model)
    state.batch = [0] * 10
    publisher, stream = publisher_of(state)
    publisher.publish(Event.BATCH_END)
    publisher.publish(Event.EPOCH_END)
    assert stream.sent[0][1]["flops_per_batch"] == 100.0
    assert "flops_per_batch" not in stream.sent[1][1]


def test_metrics_are_published_where_they_are_new_and_at_every_pause_after_it() -> None:
    state = make_state()
    publisher, stream = publisher_of(state)
    state.eval_metric_values = {"eval": {"accuracy": 0.5}}
    for event in (Event.BATCH_END, Event.EVAL_END, Event.EPOCH_END, Event.FIT_END):
        publisher.publish(event)
    assert [fields.get("eval_metrics") for _, fields, _ in stream.sent] == [None, *[{"eval": {"accuracy": 0.5}}] * 3]


def test_a_pass_of_ones_own_reorders_and_leaves_out_algorithms() -> None:
    events = (Event.EPOCH_START, Event.AFTER_LOSS, Event.EPOCH_END)
    seen: list[str] = []

    def named(name: str) -> Act:
        return Act(lambda event, state, logger: seen.append(f"{name} {event.value}"), *events)

    first, second = named("first"), named("second")
    with gold_trainer(algorithms=[first, second]) as trainer:
        trainer.engine.run_event(Event.AFTER_LOSS)
        trainer.engine.register_pass(lambda algorithms, event: algorithms[::-1])
        trainer.engine.register_pass(
            lambda algorithms, event: algorithms if event is not Event.EPOCH_END else [first], index=0
        )
        for event in events:
            trainer.engine.run_event(event)
    assert seen == [
        *("second after_loss", "first after_loss"),
        *("second epoch_start", "first epoch_start"),
        # Reversed twice.
        *("first after_loss", "second after_loss"),
        "first epoch_end",
    ]
