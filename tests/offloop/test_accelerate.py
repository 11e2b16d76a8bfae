"""A training with Accelerate, attached: what is published of it, what can be done to it; and it stays what it was."""

import pickle
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from accelerate_jobs import ROWS, Training
from attached_runs import (
    RUN,
    break_down,
    events_of,
    logged_in,
    note_marks,
    snapshots_of,
    values_of,
)

from offloop.accelerate import attach
from offloop.bus.errors import ConfigurationError
from offloop.bus.runs.directory import find_run
from offloop.bus.types.event import Event

BEGIN = ["before_forward", "after_forward", "after_loss", "before_backward", "after_backward"]
EVALUATED = ["eval_before_all", "eval_start", "eval_end", "eval_after_all"]
DATALOADER = {"before_dataloader", "after_dataloader"}


@pytest.fixture(autouse=True)
def _fresh(runs_dir: Path) -> Iterator[None]:
    yield
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_events_loss_rates_and_training_time_are_those_of_the_loop(accumulate: int) -> None:
    training = Training(accumulate).attach(record="all", config={"depth": 3})
    training.train()
    counts = [accumulate] * (10 // accumulate) + [10 % accumulate] * bool(10 % accumulate)
    epoch = ["epoch_start"]
    for count in counts:
        epoch += ["batch_start", *BEGIN * count, "after_train_batch", "batch_end", "batch_checkpoint"]
    epoch += ["epoch_end", *EVALUATED, "epoch_checkpoint"]
    assert events_of() == ["init", "fit_start", *epoch * 2, "fit_end"]

    ends = [one for one in snapshots_of() if one.event is Event.BATCH_END]
    groups = [list(part) for _, part in groupby(range(20), lambda index: (index // 10, index % 10 // accumulate))]
    means = [sum(training.losses[index] for index in group) / len(group) for group in groups]
    assert [one.loss for one in ends] == pytest.approx(means, abs=1e-6)
    assert [one.lr["AdamW"][0] for one in ends] == pytest.approx(training.rates, abs=1e-12)
    assert [one.timestamp.batch.value for one in ends] == list(range(1, 2 * len(counts) + 1))
    assert {one.dataloader_len for one in ends} == {len(counts)}
    last = snapshots_of()[-1]
    reached = last.timestamp
    assert (reached.epoch.value, reached.sample.value, str(last.max_duration)) == (2, 2 * ROWS, "2ep")
    assert last.eval_metrics["val"].keys() == {"accuracy"}

    first = snapshots_of()[0]
    told = set(first.unavailable["events"])
    assert told == {event.value for event in Event} - set(events_of()) - DATALOADER
    info = find_run(RUN).last.info
    assert info["unavailable"] == first.unavailable
    assert info["framework"] == {"name": "Accelerate", "version": accelerate.__version__}
    known = snapshots_of()[1].hyperparameters
    assert (known["config/depth"], known["config/gradient_accumulation_steps"]) == (3, accumulate)


def test_values_for_trackers_are_logged_too_and_text_stays_with_the_trackers() -> None:
    training = Training().attach()
    training.after_batch = lambda: training.accelerator.log(
        {"train_loss": training.losses[-1], "device": "cpu", "rate": torch.tensor(0.5)}, step=10 * len(training.losses)
    )
    training.train(1)
    training.accelerator.log({"late": 1})
    assert logged_in()["train_loss"] == {10 * number: loss for number, loss in enumerate(training.losses, 1)}
    assert set(logged_in()) == {"train_loss", "rate"}


def test_a_loss_that_is_not_a_number_is_shown_and_one_that_is_logged_counts() -> None:
    training = Training().attach()
    with torch.no_grad():
        next(training.net.parameters())[0, 0] = float("nan")
    training.after_batch = lambda: training.run.log(loss=3.0) if len(training.losses) == 2 else None
    training.train(1)
    losses = values_of(Event.BATCH_END, "loss")
    assert losses[1] == 3.0
    assert all(loss != loss for index, loss in enumerate(losses) if index != 1)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_last_batch_before_an_error_is_published_with_its_loss(accumulate: int) -> None:
    training = Training(accumulate).attach()

    def fail() -> None:
        if len(training.losses) == 4:
            training.accelerator.log({"late": 4})
            raise ZeroDivisionError

    training.after_batch = fail
    with pytest.raises(ZeroDivisionError) as raised:
        training.train()
    training.run.close(raised.value)
    means = [sum(training.losses[at : at + accumulate]) / accumulate for at in range(0, 4, accumulate)]
    assert values_of(Event.BATCH_END, "loss") == pytest.approx(means, abs=1e-6)
    assert logged_in()["late"] == {4 // accumulate - 1: 4}


def test_batches_are_counted_after_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    break_down(monkeypatch, "add_loss")
    training = Training(2).attach().train()
    assert training.run.detached
    assert not training.run.stop_requested
    assert training.run.state_dict()["timestamp"][:5] == [0, 2, 10, 2 * ROWS, 0]


def test_a_training_resumes_within_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = note_marks(monkeypatch)
    training = Training().attach()
    training.accelerator.register_for_checkpointing(training.run)
    training.after_batch = lambda: (
        training.accelerator.save_state(str(tmp_path)) if len(training.losses) == 13 else None
    )
    training.train()
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)

    again = Training().attach()
    again.accelerator.register_for_checkpointing(again.run)
    again.accelerator.load_state(str(tmp_path))
    again.epoch(again.accelerator.skip_first_batches(again.loader, 3))
    assert marks == [("save", 13), ("load", 13)]
    # Going back within a training does not count back.
    again.accelerator.load_state(str(tmp_path))
    again.evaluate()
    again.accelerator.end_training()
    events = events_of(attempt=2)
    assert events[:3] == ["init", "fit_start", "batch_end"]
    assert [name for name in events if "epoch" in name or "fit" in name] == [
        *events[1:2],
        "epoch_end",
        "epoch_checkpoint",
        "fit_end",
    ]
    started, *ends = (one for one in snapshots_of(attempt=2) if one.event in (Event.FIT_START, Event.BATCH_END))
    assert started.timestamp.batch.value == 13
    assert [one.timestamp.batch.value for one in ends] == list(range(14, 21))
    assert snapshots_of(attempt=2)[-1].timestamp.sample.value == 2 * ROWS
    assert snapshots_of(attempt=2)[-1].timestamp.epoch.value == 2


def test_attaching_again_ends_the_run_before() -> None:
    training = Training().attach()
    training.epoch(training.loader)
    first = training.run
    training.attach()
    assert not first.stop_requested
    training.train(1)
    assert events_of()[-1] == events_of(f"{RUN}-2")[-1] == "fit_end"
    assert events_of(f"{RUN}-2").count("batch_end") == 10
    # Nothing of it stays in what was watched.
    assert "backward" not in vars(training.accelerator)
    pickle.dumps(training.model)


def test_what_cannot_be_attached_to_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match=r"prepared no model: call attach\(\) after accelerator.prepare"):
        attach(accelerator)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="prepared no optimizer"):
        attach(accelerator)
    accelerator.prepare(torch.nn.Linear(2, 2), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match=r"2 models: give the one to watch, attach\(accelerator, model\)"):
        attach(accelerator)
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.DEEPSPEED)
    with pytest.raises(ConfigurationError, match="cannot see the steps of DEEPSPEED"):
        attach(accelerator, model)


def test_a_model_that_accelerate_compiles_has_to_be_given() -> None:
    training = Training(2, dynamo_backend="eager")
    with pytest.raises(ConfigurationError, match=r"compiles the model.*prepare\(\)"):
        training.attach()
