"""What a trainer refuses, before anything is started; and how it ends."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gold import GoldMLP, gold_loader
from torch.optim.lr_scheduler import ReduceLROnPlateau
from training import Act, gold_trainer

from bus.errors import ClosedError, ConfigurationError, OffloopError
from bus.event import Event
from bus.recording import Recording
from bus.runs import list_runs, read_run
from trainer import Classifier, State, Trainer

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": torch.nn.Linear(8, 4)}, r"Linear has no loss: wrap a plain module in trainer.Classifier"),
    ({"max_duration": "5"}, r"'5' is no time"),
    ({"max_duration": "0.5dur"}, r"max_duration '0.5dur' is not allowed"),
    ({"max_duration": "1iter"}, r"max_duration '1iter' is not allowed"),
    ({"max_duration": -1}, r"max_duration '-1ep' is not allowed"),
    ({"eval_interval": "-1ep"}, r"interval '-1ep' is not allowed"),
    ({"optimizers": "adam"}, r"optimizers has a str: give one Optimizer or a list of them"),
    ({"schedulers": [object()]}, r"schedulers has a object"),
    ({"algorithms": [print]}, r"algorithms has a builtin_function_or_method: give one Algorithm"),
    ({"device": "tpu"}, r"device 'tpu' is unknown: use auto, cpu or gpu"),
    ({"seed": -1}, r"seed -1 is not allowed"),
    ({"seed": "x"}, r"seed 'x' is not allowed"),
    ({"device_train_microbatch_size": "all"}, r"device_train_microbatch_size 'all' is not allowed: use a number"),
    ({"device_train_microbatch_size": 0}, r"device_train_microbatch_size 0 is not allowed"),
    ({"record": ["batch_strat"]}, r"'batch_strat' is no event: did you mean"),
    ({"record": 5}, r"record 5 is not allowed: use 'all' or a list of events"),
    ({"train_dataloader": 5}, r"train_dataloader is a int"),
    ({"run_name": "a/b", "publish": True}, r"'a/b' cannot be a run name"),
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


def test_the_names_of_arguments_are_those_people_know() -> None:
    import inspect

    names = list(inspect.signature(Trainer).parameters)
    assert names[:8] == [
        *("model", "train_dataloader", "eval_dataloader", "optimizers", "schedulers", "max_duration"),
        *("eval_interval", "algorithms"),
    ]
    assert {"callbacks", "loggers", "run_name", "seed", "device", "step_schedulers_every_batch"} <= set(names)


def test_a_classifier_needs_nothing_but_a_module() -> None:
    model = Classifier(GoldMLP().net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gold_trainer(model=model, optimizers=optimizer, eval_dataloader=gold_loader("eval_a", 12, 5)) as trainer:
        trainer.fit()
    assert set(trainer.state.eval_metric_values["eval"]) == {"MulticlassAccuracy", "CrossEntropy"}
