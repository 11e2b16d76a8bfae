"""Fields on demand: computed when somebody asks, as often as that, and never in the way of the training."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fake_gpu import FakeGpu, reads
from field_stream import Stream, asking, train
from gold import GoldMLP, gold_loader
from training import gold_trainer

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.trainer import AlgorithmLogger, State
from offloop.trainer.device.device import CpuDevice, Device
from offloop.trainer.fields.registry import BUILT_IN, check_fields
from offloop.trainer.stream.publishing import StatePublisher

BATCH_END, AFTER_TRAIN_BATCH = Event.BATCH_END, Event.AFTER_TRAIN_BATCH


class Counting:
    """A field that counts how often it was computed, and when."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, state: State) -> int:
        self.calls.append(int(state.timestamp.batch))
        return len(self.calls)


@pytest.mark.parametrize(
    ("demands", "expected"),
    [
        ([Demand.of(Event)], []),
        ([asking(10), asking(15)], [10, 15, 20, 30, 40, 45, 50, 60, 70, 75, 80, 90]),
        ([asking(1, field="gradient_norm"), asking(50)], [50]),
        ([asking(10, Event.EPOCH_END)], list(range(5, 96, 5))),
    ],
    ids=["only events", "10 and 15", "with another", "not of a batch"],
)
def test_a_field_is_computed_only_when_requested(
    monkeypatch: pytest.MonkeyPatch, demands: list[Demand], expected: list[int]
) -> None:
    count, stream = Counting(), Stream(Demand.merge(demands))
    train(monkeypatch, stream, fields={"count": count})
    assert count.calls == expected
    sent = [(batch, fields["count"]) for _, batch, fields in stream.sent if "count" in fields]
    assert sent == [(batch, number) for number, batch in enumerate(expected, 1)]


def test_an_inner_event_is_published_as_often_as_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    demand = Demand(
        {AFTER_TRAIN_BATCH: EventDemand(4), Event.BATCH_START: EventDemand(), Event.EVAL_BATCH_END: EventDemand(3)}
    )
    stream = Stream(demand)
    train(monkeypatch, stream, 10, eval_dataloader=gold_loader("eval_a", 24, 4), eval_interval="5ba")
    numbers = {event: [batch + 1 for one, batch, _ in stream.sent if one is event] for event in demand.events}
    assert numbers[AFTER_TRAIN_BATCH] == [4, 8]
    assert numbers[Event.BATCH_START] == list(range(1, 11))
    # Each of two evaluations has six batches, numbered anew.
    assert len(numbers[Event.EVAL_BATCH_END]) == 2 * 2


# -- when a demand changes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", range(5, 10))
def test_a_demand_takes_effect_with_the_next_batch_and_never_within_one(
    monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    events = (Event.BATCH_START, AFTER_TRAIN_BATCH, BATCH_END, Event.BATCH_CHECKPOINT)
    stream = Stream(Demand({AFTER_TRAIN_BATCH: EventDemand()}))
    stream.after_sending = {sent: asking(1, *events)}
    train(monkeypatch, stream, 20, fields={"count": Counting()})
    with_count = {event: stream.batches_with("count", event) for event in events}
    # BATCH_CHECKPOINT comes when its batch is counted already.
    with_count[Event.BATCH_CHECKPOINT] = [number - 1 for number in with_count[Event.BATCH_CHECKPOINT]]
    first = with_count[BATCH_END][0]
    event, batch, _ = stream.sent[sent - 1]
    within = {AFTER_TRAIN_BATCH: batch + 1, BATCH_END: batch}
    assert first == within.get(event, batch) + 1
    assert all(numbers == list(range(first, 21)) for numbers in with_count.values())
    [(before, _)] = stream.in_effect
    assert not any("count" in fields for _, _, fields in stream.sent[:before])
    assert all("count" in fields for event, _, fields in stream.sent[before:] if event in events)


# -- what is built in -------------------------------------------------------------------------------------------------


def test_computing_fields_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(demand: Demand) -> tuple[list[torch.Tensor], list[float], torch.Tensor]:
        stream = Stream(demand)
        trainer = train(monkeypatch, stream, 20)
        parameters = list(trainer.state.model.parameters())
        tensors = [*parameters, *(one.grad for one in parameters if one.grad is not None)]
        losses = [fields["loss"] for event, _, fields in stream.sent if event is BATCH_END]
        return tensors, losses, torch.get_rng_state()

    plain, asked = (
        outcome(demand)
        for demand in (Demand(), Demand(dict.fromkeys(Event, EventDemand(1, dict.fromkeys(BUILT_IN, 1)))))
    )
    assert all(torch.equal(one, other) for one, other in zip(plain[0], asked[0], strict=True))
    assert plain[1] == asked[1]
    assert torch.equal(plain[2], asked[2])


# -- the user's own ---------------------------------------------------------------------------------------------------


def test_a_field_that_raises_is_left_out_and_the_training_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(state: State) -> float:
        raise ZeroDivisionError("no queue")

    stream = Stream(Demand.merge([asking(5, field="broken"), asking(5, field="gradient_norm")]))
    with caplog.at_level(logging.WARNING, "offloop"):
        train(monkeypatch, stream, 20, fields={"broken": broken})
    sent = [fields for event, _, fields in stream.sent if event is BATCH_END]
    assert len(sent) == 20
    assert stream.batches_with("gradient_norm") == stream.batches_with("not_sent") == [5, 10, 15, 20]
    assert sent[4]["not_sent"] == "broken: ZeroDivisionError('no queue')"
    assert sent[4]["on_demand"] == ["gradient_norm"]
    assert len(caplog.records) == 1


def test_an_unknown_field_is_warned_about_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Stream(asking(1, field="gradent_norm"))
    with caplog.at_level(logging.WARNING, "offloop"):
        train(monkeypatch, stream, 5, fields={"queue": Counting()})
    [record] = caplog.records
    assert "did you mean gradient_norm" in record.message
    assert stream.batches_with("on_demand") == []


def published(value: Callable[[], Any], device: Device) -> dict[str, Any]:
    state = State(model=GoldMLP(), device=device, seed=1, run_name="r")
    stream = Stream(asking(1, Event.FIT_END, field="own"))
    fields = check_fields({"own": lambda _: value()})
    StatePublisher(state, AlgorithmLogger(state), stream, fields=fields).publish(Event.FIT_END)
    [(_, _, sent)] = stream.sent
    return sent


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("text", "text"),
        (torch.tensor([[2.5]], requires_grad=True), 2.5),
        (np.float32(0.5), 0.5),
        (np.arange(2), [0, 1]),
        ({"a": torch.tensor(1.5), "b": [1, (2, 3)]}, {"a": 1.5, "b": [1, [2, 3]]}),
    ],
    ids=str,
)
def test_numbers_text_tensors_lists_and_maps_can_be_sent(value: Any, expected: Any) -> None:
    sent = published(lambda: value, CpuDevice())
    assert sent["own"] == expected
    assert sent["on_demand"] == ["own"]


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1, 2}, "set"),
        (2**70, "OverflowError"),
        ("\ud800", "UnicodeEncodeError"),
        (nested(20), "16"),
        (bytes(1024 * 1024), "1,048,576"),
        ({"a": [torch.ones(3, device="meta")]}, "meta"),
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_unsupported_values_of_fields_are_left_out(value: Any, message: str) -> None:
    sent = published(lambda: value, CpuDevice())
    assert "own" not in sent
    assert message in sent["not_sent"]


def test_numbers_on_a_gpu_are_read_later_all_in_one_copy() -> None:
    gpu = FakeGpu()
    one = published(lambda: torch.tensor([2.5]), gpu)["own"]
    value = {
        "a": torch.tensor(1.5),
        "b": 2,
        "c": [torch.arange(4).reshape(2, 2), "text", None],
        "big": torch.tensor(2**40 + 1),
        "is": torch.tensor([True, False]),
        "empty": torch.zeros(0),
        "half": torch.tensor(0.5, dtype=torch.float16, requires_grad=True),
    }
    with reads() as found:
        many = published(lambda: value, gpu)["own"]
    assert (found, gpu.issued, gpu.waits) == ([], 2, 0)
    assert not many.ready()
    gpu.run()
    assert (one.value(), gpu.waits) == (2.5, 0)
    assert many.value() == {
        "a": 1.5,
        "b": 2,
        "c": [[[0, 1], [2, 3]], "text", None],
        "big": 2**40 + 1,
        "is": [True, False],
        "empty": [],
        "half": 0.5,
    }
    assert isinstance(many.value()["b"], int)


def test_it_is_computed_without_a_graph() -> None:
    assert published(torch.is_grad_enabled, CpuDevice())["own"] is False


@pytest.mark.parametrize(
    "fields", [[len], {"own": 3}, {"my field": len}, {"x" * 101: len}, {"loss": len}, {"weights": len}, {"_own": len}]
)
def test_a_field_that_cannot_be_is_refused_before_anything_is_started(fields: Any) -> None:
    with pytest.raises(ConfigurationError):
        gold_trainer(fields=fields)
