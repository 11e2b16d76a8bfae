"""When evaluators run, and what they measure."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from gold import GoldMLP, gold_data, gold_loader
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from training import Act, fitted, gold_evaluators, gold_trainer

from offloop.bus.errors import ConfigurationError, InvalidTimeError
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Time, Timestamp
from offloop.trainer import Classifier, DataSpec, Evaluator, LanguageModel, State
from offloop.trainer.arguments.durations import Interval, check_interval

EVAL_B = {"eval_b": {"n": 8, "batch_size": 4}}


@pytest.mark.parametrize("interval", ["-1ep", "1.5dur", "often"])
def test_invalid_intervals_are_refused(interval: str) -> None:
    with pytest.raises((ConfigurationError, InvalidTimeError)):
        check_interval(interval)


def test_a_share_of_an_unknown_number_of_batches_is_rounded_up_to_epochs() -> None:
    interval = Interval(Time(0.3, "dur"), Time(5, "ep"), None)
    ends = [Timestamp(epoch=epoch) for epoch in range(6)]
    due = [after.epoch for before, after in pairwise(ends) if _due(interval, before, after)]
    assert due == [2, 4]


def _due(interval: Interval, before: Timestamp, after: Timestamp) -> bool:
    return interval.is_due(Event.EPOCH_END, after, before)


def test_a_share_that_is_a_whole_number_is_not_rounded_up() -> None:
    # 0.07 x 100 is 7.000000000000001 in floating point.
    interval = Interval(Time(0.07, "dur"), Time(100, "ba"), None)
    assert interval.is_due(Event.BATCH_END, Timestamp(batch=7), Timestamp(batch=6))


def test_metrics_are_those_of_the_whole_evaluator() -> None:
    evaluators = gold_evaluators({"eval_a": {"n": 12, "batch_size": 5}, "eval_b": {"n": 8, "batch_size": 4}})
    model = Classifier(GoldMLP().net)
    # The second evaluation starts from nothing.
    trainer = fitted(model=model, eval_dataloader=evaluators, max_duration="2ep")
    for label, rows in (("eval_a", 12), ("eval_b", 8)):
        inputs, targets = gold_data(label, rows)
        scores = model.module(inputs).detach()
        values = trainer.state.eval_metric_values[label]
        assert values["MulticlassAccuracy"] == pytest.approx((scores.argmax(1) == targets).float().mean().item())
        assert values["CrossEntropy"] == pytest.approx(cross_entropy(scores, targets).item())


def test_models_are_evaluated_without_dropout_and_gradients_and_trained_with_them() -> None:
    seen = set()

    def note(event: Event, state: State, logger: object) -> None:
        seen.add((event.name, state.model.training, torch.is_grad_enabled()))

    act = Act(note, Event.EVAL_AFTER_FORWARD, Event.AFTER_FORWARD)
    fitted(eval_dataloader=gold_loader("eval_a", 12, 5), eval_interval="1ba", algorithms=act)
    assert seen == {("EVAL_AFTER_FORWARD", False, False), ("AFTER_FORWARD", True, True)}


def test_an_evaluator_may_have_its_own_interval_and_choice_of_metrics() -> None:
    often = Evaluator("often", gold_loader("eval_a", 12, 5), metric_names=["CrossEntropy"], eval_interval="1ba")
    seldom = Evaluator("seldom", gold_loader("eval_b", 8, 4))
    labels: list[str | None] = []
    act = Act(lambda event, state, logger: labels.append(state.dataloader_label), Event.EVAL_START)
    trainer = fitted(eval_dataloader=[often, seldom], max_duration="1ep", algorithms=act)
    assert labels == ["often"] * 4 + ["seldom"]
    assert set(trainer.state.eval_metric_values["often"]) == {"CrossEntropy"}


@pytest.mark.parametrize(
    "evaluators",
    [
        [Evaluator("a", []), Evaluator("a", [])],
        Evaluator("a", gold_loader("eval_a", 12, 5), metric_names=["F1"]),
        Evaluator("nothing", []),
    ],
)
def test_evaluators_with_the_same_label_an_unknown_metric_or_no_batch_are_refused(evaluators: Any) -> None:
    with pytest.raises(ConfigurationError):
        fitted(eval_dataloader=evaluators, max_duration="1ep")


def test_a_language_model_is_measured_in_bits() -> None:
    class Even(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(8))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.bias.expand(*tokens.shape, 8)

    tokens = torch.zeros(2, 5, dtype=torch.int64)
    model = LanguageModel(Even())
    batches = DataLoader([(tokens[0], tokens[0])] * 4, batch_size=2)
    losses = []
    act = Act(lambda event, state, logger: losses.append(state.loss.item()), Event.AFTER_LOSS)
    counted = DataSpec(batches, get_num_tokens_in_batch=lambda batch: batch[0].numel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = fitted(
        model=model,
        train_dataloader=counted,
        eval_dataloader=batches,
        optimizers=optimizer,
        max_duration="20tok",
        algorithms=act,
    )
    assert losses == [pytest.approx(3.0)] * 2
    assert trainer.state.eval_metric_values == {"eval": {"BitsPerToken": pytest.approx(3.0)}}
    assert trainer.state.timestamp.token == 20


def test_a_training_that_is_stopped_before_its_first_batch_is_not_evaluated() -> None:
    events: list[Event] = []

    def note(event: Event, state: State, logger: object) -> None:
        events.append(event)
        if event is Event.FIT_START:
            state.stop_training()

    fitted(eval_dataloader=gold_evaluators(EVAL_B), algorithms=Act(note))
    assert events[-2:] == [Event.FIT_START, Event.FIT_END]


def test_evaluators_that_take_the_place_of_others_have_not_run_yet() -> None:
    with gold_trainer(eval_dataloader=gold_evaluators(EVAL_B), max_duration="2ep") as trainer:
        trainer.fit(duration="1ep")
        assert set(trainer.state.evaluated_at.values()) == {4}
        trainer.fit(duration="1ba", eval_dataloader=Evaluator("other", gold_loader("eval_a", 12, 5)), eval_interval=0)
    assert trainer.state.evaluated_at == {}
