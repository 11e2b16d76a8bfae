"""What a trainer refuses, before anything is started; and how it ends."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gold import CrossEntropy, GoldMLP, gold_loader
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from training import Act, fitted, gold_trainer

from offloop.bus.errors import ConfigurationError, OffloopError
from offloop.bus.recording.recording import Recording
from offloop.bus.runs.directory import list_runs, read_run
from offloop.bus.types.event import Event
from offloop.trainer import Evaluator, State
from offloop.trainer.schedulers import StepScheduler

OTHER = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
LBFGS = torch.optim.LBFGS([torch.nn.Parameter(torch.zeros(1))])

REFUSED: list[dict[str, Any]] = [
    {"max_duration": "5"},
    {"optimizers": torch.optim.SGD},
    {"optimizers": LBFGS},
    {"optimizers": [OTHER, OTHER]},
    {"schedulers": StepLR(OTHER, 1)},
    {"schedulers": [StepScheduler("1ep"), StepScheduler("2ep")]},
    {"schedulers": ReduceLROnPlateau(OTHER)},
    {"device": "tpu"},
    {"seed": -1},
    {"precision": "fp8"},
    {"record": ["batch_strat"]},
    {"train_dataloader": 5},
    {"train_dataloader": (batch for batch in [1])},
    {"run_name": "a/b"},
    {"compile_config": {"backend": "foo"}},
    {"save_folder": 5},
    {"save_overwrite": "yes"},
    {"save_interval": "soon"},
    {"stream_to": "nats://x", "publish": False},
]


@pytest.mark.parametrize("arguments", REFUSED, ids=[f"{number}-{next(iter(a))}" for number, a in enumerate(REFUSED)])
def test_bad_arguments_are_refused_before_a_run_is_started(arguments: dict[str, Any], runs_dir: Path) -> None:
    with pytest.raises(OffloopError):
        gold_trainer(**{"publish": True, **arguments})
    assert list_runs(runs_dir) == []


def test_a_plain_module_is_refused_as_a_model(runs_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match="Classifier"):
        gold_trainer(publish=True, model=torch.nn.Linear(8, 4), optimizers=None)
    assert list_runs(runs_dir) == []


def test_a_scheduler_may_be_of_an_optimizer_that_a_function_gives_later() -> None:
    model = GoldMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fitted(model=model, optimizers=lambda model: optimizer, schedulers=StepLR(optimizer, 1, gamma=0.5))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 4)
    with pytest.raises(ConfigurationError):
        gold_trainer(
            optimizers=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), schedulers=StepLR(optimizer, 1)
        )


@pytest.mark.parametrize("later", [False, True])
def test_optimizers_are_of_the_model_as_algorithms_leave_it(later: bool) -> None:
    model = GoldMLP()
    both = [*model.parameters(), torch.nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(both, lr=0.1)
    with pytest.raises(ConfigurationError):
        gold_trainer(model=model, optimizers=(lambda model: optimizer) if later else optimizer)

    def take_in(event: Event, state: State, logger: object) -> None:
        state.model.added = both[-1]

    fitted(model=model, optimizers=optimizer, algorithms=Act(take_in, Event.INIT))


def test_devices_of_torch_and_seeds_of_numpy_are_taken() -> None:
    state = gold_trainer(device=torch.device("cpu"), seed=np.int64(3)).state
    assert (state.device.name, type(state.seed), state.seed) == ("cpu", int, 3)


def test_methods_refuse_bad_arguments_and_the_trainer_goes_on(tmp_path: Path) -> None:
    data = gold_loader("predict", 6, 3)
    with gold_trainer() as trainer:
        for path in (5, ""):
            with pytest.raises(ConfigurationError):
                trainer.save_checkpoint(path)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError):
            trainer.predict(data, on_outputs=5)  # type: ignore[arg-type]
        trainer.save_checkpoint(tmp_path / "a.safetensors")
        assert len(trainer.predict(data)) == 2


def test_a_model_that_cannot_be_evaluated_is_refused_only_with_an_evaluator() -> None:
    class TrainOnly(torch.nn.Module):
        def loss(self, outputs: Any, batch: Any) -> Any:
            return outputs

    with gold_trainer(model=TrainOnly(), optimizers=None):
        pass
    with pytest.raises(ConfigurationError, match="eval_forward"):
        gold_trainer(model=TrainOnly(), optimizers=None, eval_dataloader=gold_loader("eval_a", 12, 5))


@pytest.mark.parametrize("missing", ["train_dataloader", "optimizers", "max_duration"])
def test_fit_needs_data_optimizers_and_a_duration(missing: str) -> None:
    with pytest.raises(ConfigurationError):
        fitted(**{missing: None})


def test_the_seed_is_recorded_also_when_none_is_given(runs_dir: Path) -> None:
    trainer = fitted(publish=True, run_name="seeded", seed=None, config={"colour": "blue"})
    info = read_run(runs_dir / "seeded").last.info
    assert info["seed"] == trainer.state.seed
    assert info["max_duration"] == "2ep"
    assert info["config"] == {"colour": "blue"}
    assert gold_trainer(seed=None).state.seed != gold_trainer(seed=None).state.seed


def test_an_exception_around_fit_ends_the_run_as_failed(runs_dir: Path) -> None:
    with pytest.raises(KeyError), gold_trainer(publish=True, run_name="around"):
        raise KeyError("x")
    assert ending_of(runs_dir / "around") == ("failed", "KeyError: 'x'")


def ending_of(run: Path) -> tuple[str, str | None]:
    recording = Recording(run)
    list(recording)
    assert recording.ending is not None
    return recording.ending.status, recording.ending.error


@pytest.mark.parametrize("label", [None, "train"])
def test_labels_of_evaluators_name_something_of_their_own(label: Any) -> None:
    with pytest.raises(ConfigurationError, match="label"):
        Evaluator(label, gold_loader("eval_a", 12, 5))


@pytest.mark.parametrize("is_train", [False, True])
@pytest.mark.parametrize("metrics", [[CrossEntropy()], {"a": 5}, {5: CrossEntropy()}], ids=["list", "5", "name"])
def test_metrics_of_a_model_go_by_names(metrics: Any, is_train: bool, runs_dir: Path) -> None:
    model = GoldMLP()
    model._metrics[is_train] = metrics
    with pytest.raises(ConfigurationError, match="get_metrics"):
        gold_trainer(model=model, eval_dataloader=gold_loader("eval_a", 12, 5), publish=True)
    assert list_runs(runs_dir) == []


class Losing(GoldMLP):
    """Changes the loss."""

    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._change = change

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        return self._change(super().loss(outputs, batch))


@pytest.mark.parametrize(
    "change",
    [
        lambda loss: None,
        lambda loss: {},
        lambda loss: (loss, "x"),
        lambda loss: loss * torch.ones(6),
        lambda loss: loss.detach(),
    ],
    ids=["none", "empty", "text", "vector", "detached"],
)
@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
def test_losses_are_tensors_with_a_gradient(change: Callable[[torch.Tensor], Any], precision: str) -> None:
    trainer = gold_trainer(model=Losing(change), precision=precision)
    with trainer, pytest.raises(ConfigurationError, match="loss of model Losing"):
        trainer.fit()


def test_other_errors_of_the_backward_pass_stay_what_they_are() -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("boom in backward")

    def with_hook(loss: torch.Tensor) -> torch.Tensor:
        loss.register_hook(fail)
        return loss

    with pytest.raises(RuntimeError, match="boom in backward"):
        fitted(model=Losing(with_hook))


def optimizers_of_both_layers(model: GoldMLP) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.net[0].parameters(), lr=0.1), torch.optim.SGD(model.net[2].parameters(), lr=0.1)]


def test_an_optimizer_of_a_frozen_part_makes_no_difference_to_gradient_scaling() -> None:
    def trained(optimizers: Callable[[GoldMLP], Any]) -> dict[str, torch.Tensor]:
        model = GoldMLP()
        model.net[0].requires_grad_(False)
        trainer = fitted(model=model, optimizers=optimizers, precision="amp_fp16")
        assert trainer.state.scaler is not None
        assert trainer.state.scaler.get_scale() == 2.0**16
        return model.net.state_dict()

    both = trained(optimizers_of_both_layers)
    assert torch.equal(both["0.weight"], GoldMLP().net[0].weight)
    assert not torch.equal(both["2.weight"], GoldMLP().net[2].weight)
    alone = trained(lambda model: optimizers_of_both_layers(model)[1])
    assert all(torch.equal(value, alone[name]) for name, value in both.items())


def test_a_compiled_model_is_compiled_once_and_trains_to_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert trainer.state.model is model
    with gold_trainer(max_duration="3ep") as plain:
        plain.fit()
    for name, value in plain.state.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
