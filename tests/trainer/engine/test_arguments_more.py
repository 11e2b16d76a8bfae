"""Mistakes in evaluators and models, which the trainer names; and parts of a model that are not trained."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gold import CrossEntropy, GoldMLP, gold_loader
from torchmetrics import MetricCollection
from training import Act, gold_trainer

from bus.errors import ConfigurationError
from bus.runs.directory import list_runs
from bus.types.event import Event
from trainer import Evaluator


@pytest.mark.parametrize("label", [5, None, "", "train", "predict"])
def test_labels_of_evaluators_name_something_of_their_own(label: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"the label of an evaluator is {label!r}: use a text"):
        Evaluator(label, gold_loader("eval_a", 12, 5))


@pytest.mark.parametrize("names", [5, [5], {"CrossEntropy"}])
def test_metric_names_are_texts(names: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"metric_names of evaluator 'a' is .*: use a list of names"):
        Evaluator("a", gold_loader("eval_a", 12, 5), metric_names=names)


def test_one_metric_name_stands_for_a_list_of_it() -> None:
    evaluator = Evaluator("a", gold_loader("eval_a", 12, 5), metric_names="CrossEntropy")
    with gold_trainer(eval_dataloader=evaluator) as trainer:
        assert set(trainer.eval()["a"]) == {"CrossEntropy"}


METRICS: list[tuple[Any, str]] = [
    ([CrossEntropy()], "returned a list: return a dict of names and torchmetrics.Metric objects"),
    (CrossEntropy(), "returned a CrossEntropy: return a dict"),
    (None, "returned None: return a dict"),
    ({"a": 5}, "returned 5 under 'a': use texts for names, and torchmetrics.Metric objects"),
    ({5: CrossEntropy()}, "returned a CrossEntropy under 5: use texts for names"),
]


@pytest.mark.parametrize("is_train", [False, True])
@pytest.mark.parametrize(("metrics", "message"), METRICS, ids=[message[:22] for _, message in METRICS])
def test_metrics_of_a_model_go_by_names(metrics: Any, message: str, is_train: bool, runs_dir: Path) -> None:
    model = GoldMLP()
    model._metrics[is_train] = metrics
    with pytest.raises(ConfigurationError, match=rf"get_metrics\(is_train={is_train}\) of model GoldMLP {message}"):
        gold_trainer(model=model, eval_dataloader=gold_loader("eval_a", 12, 5), publish=True)
    assert list_runs(runs_dir) == []


def test_a_collection_of_metrics_has_names() -> None:
    model = GoldMLP()
    model._metrics[True] = MetricCollection([CrossEntropy()])  # type: ignore[assignment]
    with gold_trainer(model=model) as trainer:
        trainer.fit()
    assert set(trainer.state.train_metrics) == {"CrossEntropy"}


def test_metrics_of_the_training_need_the_methods_that_update_them(runs_dir: Path) -> None:
    class Counting(torch.nn.Linear):
        def loss(self, outputs: Any, batch: Any) -> Any:
            return outputs.mean()

        def get_metrics(self, is_train: bool) -> Any:
            return {"CrossEntropy": CrossEntropy()}

    with pytest.raises(ConfigurationError, match="model Counting has no eval_forward, update_metric"):
        gold_trainer(model=Counting(8, 4), optimizers=None, publish=True)
    assert list_runs(runs_dir) == []


class Losing(GoldMLP):
    """Changes the loss."""

    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._change = change

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        return self._change(super().loss(outputs, batch))


LOSSES: list[tuple[Callable[[torch.Tensor], Any], str]] = [
    (lambda loss: None, r"is None: return a tensor with one element from loss\(outputs, batch\)"),
    (lambda loss: 0.5, "is 0.5: return"),
    (lambda loss: (), r"is \(\): return"),
    (lambda loss: {}, "is {}: return"),
    (lambda loss: [0.5], "is a list: return"),
    (lambda loss: {"total": None}, "is a dict: return"),
    (lambda loss: (loss, "x"), "is a tuple: return"),
    (lambda loss: loss * torch.ones(6), r"is a tensor of shape \(6,\): return"),
    (lambda loss: loss.detach(), r"is a tensor of shape \(\) that no parameter has a gradient from: return"),
]


@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
@pytest.mark.parametrize(("change", "message"), LOSSES, ids=[message[:22] for _, message in LOSSES])
def test_losses_are_tensors_with_a_gradient(
    change: Callable[[torch.Tensor], Any], message: str, precision: str
) -> None:
    trainer = gold_trainer(model=Losing(change), precision=precision)
    with trainer, pytest.raises(ConfigurationError, match=f"the loss of model Losing {message}") as caught:
        trainer.fit()
    assert "\n" not in str(caught.value)


def test_other_errors_of_the_backward_pass_stay_what_they_are() -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("boom in backward")

    def with_hook(loss: torch.Tensor) -> torch.Tensor:
        loss.register_hook(fail)
        return loss

    with gold_trainer(model=Losing(with_hook)) as trainer, pytest.raises(RuntimeError, match="boom in backward"):
        trainer.fit()


def optimizers_of_both_layers(model: GoldMLP) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.net[0].parameters(), lr=0.1), torch.optim.SGD(model.net[2].parameters(), lr=0.1)]


def test_an_optimizer_of_a_frozen_part_makes_no_difference_to_gradient_scaling() -> None:
    def trained(optimizers: Callable[[GoldMLP], Any]) -> dict[str, torch.Tensor]:
        model = GoldMLP()
        model.net[0].requires_grad_(False)
        with gold_trainer(model=model, optimizers=optimizers, precision="amp_fp16") as trainer:
            trainer.fit()
        assert trainer.state.scaler is not None
        assert trainer.state.scaler.get_scale() == 2.0**16
        return model.net.state_dict()

    both = trained(optimizers_of_both_layers)
    assert torch.equal(both["0.weight"], GoldMLP().net[0].weight)
    assert not torch.equal(both["2.weight"], GoldMLP().net[2].weight)
    alone = trained(lambda model: optimizers_of_both_layers(model)[1])
    assert all(torch.equal(value, alone[name]) for name, value in both.items())


@pytest.mark.parametrize("microbatch", [None, 3])
def test_gradients_that_no_optimizer_uses_are_those_of_one_batch(microbatch: int | None) -> None:
    model = GoldMLP()
    gradients: list[torch.Tensor] = []
    note = Act(
        lambda event, state, logger: gradients.append(state.model.net[0].weight.grad.clone()), Event.AFTER_TRAIN_BATCH
    )
    with gold_trainer(
        n_train=6,
        model=model,
        optimizers=torch.optim.SGD(model.net[2].parameters(), lr=0.0),
        device_train_microbatch_size=microbatch,
        algorithms=note,
    ) as trainer:
        trainer.fit()
    first, second = gradients
    assert torch.equal(first, second)
    assert first.any()


def test_a_model_is_compiled_once_for_all_of_its_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_model, compiled = torch.compile, []

    @functools.wraps(compile_model)
    def note(model: Any, **config: Any) -> Any:
        compiled.append(model)
        return compile_model(model, **config)

    monkeypatch.setattr(torch, "compile", note)
    model = GoldMLP()
    with gold_trainer(model=model, compile_config={"backend": "eager"}) as trainer:
        trainer.fit()
        trainer.fit(duration="1ep")
    assert sum(one is model for one in compiled) == 1
