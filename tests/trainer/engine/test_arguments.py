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
from training import Act, gold_trainer

from offloop.bus.errors import ClosedError, ConfigurationError, OffloopError
from offloop.bus.recording.recording import Recording
from offloop.bus.runs.directory import list_runs, read_run
from offloop.bus.types.event import Event
from offloop.trainer import Evaluator, State
from offloop.trainer.schedulers import StepScheduler

OTHER = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
LBFGS = torch.optim.LBFGS([torch.nn.Parameter(torch.zeros(1))])

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": torch.nn.Linear(8, 4)}, r"Linear has no loss: wrap a plain module in offloop.trainer.Classifier"),
    ({"max_duration": "5"}, r"invalid duration '5'"),
    ({"max_duration": "0.5dur"}, r"max_duration '0.5dur' is not allowed"),
    ({"max_duration": -1}, r"max_duration '-1ep' is not allowed"),
    ({"eval_interval": "-1ep"}, r"interval '-1ep' is not allowed"),
    ({"optimizers": "adam"}, r"optimizers has a str: give one Optimizer or a list of them"),
    ({"schedulers": [object()]}, r"schedulers has a object"),
    ({"algorithms": [print]}, r"algorithms has a builtin_function_or_method: give one Algorithm"),
    ({"device": "tpu"}, r"device 'tpu' is unknown: use auto, cpu or gpu"),
    ({"seed": -1}, r"seed -1 is not allowed"),
    ({"device_train_microbatch_size": "all"}, r"device_train_microbatch_size 'all' is not allowed: use a number"),
    ({"record": ["batch_strat"]}, r"'batch_strat' is not an event: did you mean"),
    ({"record": 5}, r"record 5 is not allowed: use 'all' or a list of events"),
    ({"train_dataloader": 5}, r"train_dataloader is a int"),
    ({"run_name": "a/b", "publish": True}, r"'a/b' cannot be a run name"),
    ({"device": None}, r"device None is unknown: use auto, cpu or gpu"),
    ({"seed": True}, r"seed True is not allowed: use a whole number"),
    ({"scale_schedule_ratio": True}, r"scale_schedule_ratio True is not allowed"),
    ({"step_schedulers_every_batch": "no"}, r"step_schedulers_every_batch is 'no': use True or False"),
    ({"save_overwrite": "yes"}, r"save_overwrite is 'yes': use True or False"),
    ({"compile_config": 5}, r"compile_config is 5: give a dict of arguments of torch.compile"),
    (
        {"compile_config": {"bogus": 1}},
        r"compile_config {'bogus': 1} is not allowed: .* unexpected keyword",
    ),
    ({"compile_config": {"backend": "foo"}}, r"compile_config {'backend': 'foo'} is not allowed: Invalid backend"),
    ({"save_folder": 5}, r"save_folder is 5: give a path, as a text or a pathlib.Path"),
    ({"save_filename": None}, r"save_filename is None: give a text"),
    ({"load_path": 5}, r"load_path is 5: give a path"),
    ({"clock": 5}, r"clock is 5: give a function that is called with \(\)"),
    ({"max_delay": "x"}, r"max_delay is 'x'; it is in seconds: use 0 to 1"),
    ({"config": 5}, r"config is 5: give a dict of names and values"),
    ({"optimizers": torch.optim.SGD}, r"optimizers has the class SGD: give one Optimizer"),
    ({"optimizers": LBFGS}, r"optimizers has a LBFGS, whose step needs a closure that computes the loss"),
    ({"optimizers": [OTHER, OTHER]}, r"optimizers has the same SGD twice"),
    ({"schedulers": StepLR(OTHER, 1)}, r"schedulers has a StepLR of a SGD that is not in optimizers"),
    ({"schedulers": [StepScheduler("1ep"), StepScheduler("2ep")]}, r"2 schedulers, of which one follows"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[f"{next(iter(a))}={m[:12]}" for a, m in REFUSED])
def test_bad_arguments_are_refused_before_a_run_is_started(
    arguments: dict[str, Any], message: str, runs_dir: Path
) -> None:
    if "model" in arguments:
        arguments = {**arguments, "optimizers": None}
    with pytest.raises(OffloopError, match=message) as caught:
        gold_trainer(**{"publish": True, **arguments})
    assert "\n" not in str(caught.value)
    assert list_runs(runs_dir) == []


def test_a_scheduler_may_be_of_an_optimizer_that_a_function_gives_later() -> None:
    model = GoldMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gold_trainer(
        model=model, optimizers=lambda model: optimizer, schedulers=StepLR(optimizer, 1, gamma=0.5)
    ) as trainer:
        trainer.fit()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 4)
    with pytest.raises(ConfigurationError, match="schedulers has a StepLR of a SGD that is not in optimizers"):
        gold_trainer(
            optimizers=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), schedulers=StepLR(optimizer, 1)
        )


@pytest.mark.parametrize("later", [False, True])
def test_optimizers_are_of_the_model_as_algorithms_leave_it(later: bool) -> None:
    model = GoldMLP()
    both = [*model.parameters(), torch.nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(both, lr=0.1)
    with pytest.raises(ConfigurationError, match="a SGD of 5 parameters, of which 1 are not those of model GoldMLP"):
        gold_trainer(model=model, optimizers=(lambda model: optimizer) if later else optimizer)

    def take_in(event: Event, state: State, logger: object) -> None:
        state.model.added = both[-1]

    with gold_trainer(model=model, optimizers=optimizer, algorithms=Act(take_in, Event.INIT)) as trainer:
        trainer.fit()


@pytest.mark.parametrize("given", [torch.device("cpu"), "cpu"])
def test_devices_are_those_of_torch_too(given: Any) -> None:
    assert gold_trainer(device=given).state.device.name == "cpu"


def test_numpy_has_seeds_too() -> None:
    seed = gold_trainer(seed=np.int64(3)).state.seed
    assert (type(seed), seed) == (int, 3)


@pytest.mark.parametrize("path", [5, "", b"x", None])
def test_a_checkpoint_needs_a_path(path: Any, tmp_path: Path) -> None:
    with gold_trainer() as trainer:
        with pytest.raises(ConfigurationError, match=f"path is {path!r}: give a path"):
            trainer.save_checkpoint(path)
        trainer.save_checkpoint(tmp_path / "a.safetensors")


def test_predictions_are_handed_to_a_function_only() -> None:
    data = gold_loader("predict", 6, 3)
    with gold_trainer() as trainer:
        with pytest.raises(ConfigurationError, match=r"on_outputs is 5: give a function .* with \(batch, outputs\)"):
            trainer.predict(data, on_outputs=5)  # type: ignore[arg-type]
        assert len(trainer.predict(data)) == 2


def test_a_plateau_scheduler_is_refused() -> None:
    model = GoldMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="ReduceLROnPlateau, which needs a metric"):
        gold_trainer(model=model, optimizers=optimizer, schedulers=ReduceLROnPlateau(optimizer))


def test_a_model_that_cannot_be_evaluated_is_refused_only_with_an_evaluator() -> None:
    class TrainOnly(torch.nn.Module):
        def loss(self, outputs: Any, batch: Any) -> Any:
            return outputs

    with gold_trainer(model=TrainOnly(), optimizers=None):
        pass
    with pytest.raises(ConfigurationError, match="TrainOnly has no eval_forward, get_metrics, update_metric"):
        gold_trainer(model=TrainOnly(), optimizers=None, eval_dataloader=gold_loader("eval_a", 12, 5))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("train_dataloader", "fit\\(\\) needs a train_dataloader"),
        ("optimizers", "fit\\(\\) needs optimizers"),
        ("max_duration", "fit\\(\\) needs to know how long to train"),
    ],
)
def test_fit_says_what_it_needs(missing: str, message: str) -> None:
    with gold_trainer(**{missing: None}) as trainer, pytest.raises(ConfigurationError, match=message):
        trainer.fit()


def test_the_seed_is_recorded_also_when_none_is_given(runs_dir: Path) -> None:
    with gold_trainer(publish=True, run_name="seeded", seed=None, config={"colour": "blue"}) as trainer:
        trainer.fit()
    info = read_run(runs_dir / "seeded").last.info
    assert info["seed"] == trainer.state.seed
    assert info["max_duration"] == "2ep"
    assert info["config"] == {"colour": "blue"}
    assert gold_trainer(seed=None).state.seed != gold_trainer(seed=None).state.seed


def test_a_run_finishes(runs_dir: Path) -> None:
    with gold_trainer(publish=True, run_name="whole") as trainer:
        trainer.fit()
        assert trainer.run_dir == runs_dir / "whole"
    assert ending_of(runs_dir / "whole") == ("finished", None)
    assert trainer.recording == read_run(runs_dir / "whole").recording
    trainer.close()
    with pytest.raises(ClosedError, match="trainer of run 'whole' is closed"):
        trainer.fit()


def test_a_failing_loop_ends_the_run_as_failed_and_its_exception_arrives_unchanged(runs_dir: Path) -> None:
    boom = ValueError("boom in forward")

    def fail(event: Event, state: State, logger: object) -> None:
        raise boom

    act = Act(lambda event, state, logger: state.timestamp.batch == 2 and fail(event, state, logger))
    trainer = gold_trainer(publish=True, run_name="broken", algorithms=act)
    with pytest.raises(ValueError, match="boom in forward") as caught:
        trainer.fit()
    assert caught.value is boom
    assert ending_of(runs_dir / "broken") == ("failed", "ValueError: boom in forward")
    trainer.close()
    assert read_run(runs_dir / "broken").status == "failed"


def test_a_trainer_that_cannot_be_made_ends_its_run_as_failed(runs_dir: Path) -> None:
    def fail(event: Event, state: State, logger: object) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        gold_trainer(publish=True, run_name="unmade", algorithms=Act(fail, Event.INIT))
    assert ending_of(runs_dir / "unmade") == ("failed", "RuntimeError: no")


def test_an_exception_around_fit_ends_the_run_as_failed(runs_dir: Path) -> None:
    with pytest.raises(KeyError), gold_trainer(publish=True, run_name="around"):
        raise KeyError("x")
    assert ending_of(runs_dir / "around") == ("failed", "KeyError: 'x'")


def test_stopping_and_interrupting_end_the_run_as_stopped(runs_dir: Path) -> None:
    act = Act(lambda event, state, logger: state.stop_training(), Event.AFTER_LOSS)
    with gold_trainer(publish=True, run_name="stopped", algorithms=act) as trainer:
        trainer.fit()
    assert trainer.state.timestamp.batch == 1
    assert ending_of(runs_dir / "stopped") == ("stopped", None)

    def interrupt(event: Event, state: State, logger: object) -> None:
        raise KeyboardInterrupt

    trainer = gold_trainer(publish=True, run_name="interrupted", algorithms=Act(interrupt, Event.AFTER_LOSS))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert ending_of(runs_dir / "interrupted") == ("stopped", None)


def test_a_trainer_that_is_dropped_ends_its_stream(runs_dir: Path) -> None:
    trainer = gold_trainer(publish=True, run_name="dropped")
    trainer.fit()
    assert read_run(runs_dir / "dropped").live
    del trainer
    assert ending_of(runs_dir / "dropped") == ("finished", None)


def ending_of(run: Path) -> tuple[str, str | None]:
    recording = Recording(run)
    list(recording)
    assert recording.ending is not None
    return recording.ending.status, recording.ending.error


@pytest.mark.parametrize("label", [5, None, "", "train", "predict"])
def test_labels_of_evaluators_name_something_of_their_own(label: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"the label of an evaluator is {label!r}: use a text"):
        Evaluator(label, gold_loader("eval_a", 12, 5))


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
