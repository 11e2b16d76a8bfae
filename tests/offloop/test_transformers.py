"""Trainers of Transformers and TRL as runs: what is published of them, what can be done to them, and that they are not
changed by that."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from attached_runs import RUN, are_same, events_of, logged_in, snapshots_of, values_of, weights_of
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from bus import Event
from bus.errors import ConfigurationError
from bus.runs.directory import find_run
from offloop.attached import PREDICTION
from offloop.transformers import OffloopCallback

ROWS = 44
CONFIG = GPT2Config(
    vocab_size=32,
    n_positions=16,
    n_embd=8,
    n_layer=1,
    n_head=2,
    bos_token_id=0,
    eos_token_id=0,
    loss_type="ForCausalLM",
)


def rows_of(count: int = ROWS) -> list[dict[str, torch.Tensor]]:
    """Sequences, of which a part that differs from row to row counts for the loss."""
    drawn = torch.Generator().manual_seed(5)
    ids = [torch.randint(1, 32, (12,), generator=drawn) for _ in range(count)]
    return [
        {"input_ids": one, "labels": torch.where(torch.arange(12) < index % 7, -100, one)}
        for index, one in enumerate(ids)
    ]


class Classifier(torch.nn.Module):
    """A model that is not from Transformers, whose loss is a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Embedding(32, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 32))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(input_ids)
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def made(kind: Any = Trainer, model: Any = None, *callbacks: Any, **arguments: Any) -> Any:
    """A trainer of a tiny model with dropout; the same one every time."""
    torch.manual_seed(3)
    data = {name: arguments.pop(name) for name in ("train_dataset", "eval_dataset") if name in arguments}
    options = {
        "output_dir": os.environ["OFFLOOP_RUNS_DIR"] + "-out",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        **arguments,
    }
    return kind(
        model=model or GPT2LMHeadModel(CONFIG),
        args=TrainingArguments(**options),
        callbacks=list(callbacks),
        **{"train_dataset": rows_of(), **data},
    )


def trained(*given: Any, attached: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """A trainer that has trained, attached to a run."""
    trainer = made(*given, **arguments)
    trainer.add_callback(OffloopCallback(trainer, **{"run_name": RUN, **(attached or {})}))
    trainer.train()
    return trainer


def logs_of(trainer: Any, name: str) -> list[float]:
    return [one[name] for one in trainer.state.log_history if name in one]


class AtStep(TrainerCallback):
    """Calls a function after each step."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.function(state.global_step)


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(tmp_path / "runs"))


# Events, and what they say.

FETCH = ["before_dataloader", "after_dataloader", "batch_start"]
MICROBATCH = ["before_forward", "after_loss", "before_backward", "after_backward"]
STEP = ["after_train_batch", "batch_end", "batch_checkpoint"]
EVALUATED = ["eval_before_all", "eval_start", *["eval_batch_start", "eval_batch_end"] * 2, "eval_end", "eval_after_all"]


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_every_event_comes_at_its_place(accumulation: int) -> None:
    trained(
        eval_dataset=rows_of(12),
        eval_strategy="epoch",
        gradient_accumulation_steps=accumulation,
        attached={"record": "all"},
    )
    counts = [accumulation] * (11 // accumulation) + [11 % accumulation] * bool(11 % accumulation)
    batches = [name for count in counts for name in [*FETCH, *MICROBATCH * count, *STEP]]
    end = ["epoch_end", *EVALUATED, "epoch_checkpoint", "fit_end"]
    seen = events_of()
    assert seen == ["init", "fit_start", "epoch_start", *batches, *end]
    unavailable = snapshots_of()[0].fields["unavailable"]
    assert unavailable == find_run(RUN).last.info["unavailable"]
    assert set(unavailable["events"]) == {one.value for one in Event} - set(seen) - {one.value for one in PREDICTION}


@pytest.mark.parametrize(("accumulation", "model"), [(1, None), (2, None), (3, None), (3, Classifier)])
def test_loss_rates_and_training_time_are_those_of_the_trainer(accumulation: int, model: Any) -> None:
    trainer = trained(
        Trainer, model and model(), gradient_accumulation_steps=accumulation, num_train_epochs=2, warmup_steps=2
    )
    ends = [one for one in snapshots_of() if one.event is Event.BATCH_END]
    assert [one.loss for one in ends] == pytest.approx(logs_of(trainer, "loss"), abs=1e-6)
    # Transformers logs the rate that the step had, and events have the next one, as ours.
    assert [one.lr["AdamW"][0] for one in ends[:-1]] == pytest.approx(logs_of(trainer, "learning_rate")[1:], abs=1e-12)
    assert {len(one.lr["AdamW"]) for one in ends} == {len(trainer.optimizer.param_groups)}
    last, per_epoch = ends[-1].timestamp, -(-11 // accumulation)
    assert (last.epoch.value, last.batch.value, last.sample.value) == (1, 2 * per_epoch, 2 * ROWS)
    assert (last.batch_in_epoch.value, last.token.value) == (per_epoch, 2 * ROWS * 12)
    assert {one.dataloader_len for one in ends} == {per_epoch}
    assert str(ends[0].max_duration) == "2ep"
    assert values_of(Event.FIT_START, "global_train_batch_size") == [4 * accumulation]
    assert values_of(Event.FIT_START, "train_samples") == [ROWS]
    norms = logged_in()["metrics/train/grad_norm"]
    assert list(norms.values()) == pytest.approx(logs_of(trainer, "grad_norm"), abs=1e-6)
    assert list(norms) == list(range(2 * per_epoch))
    assert logged_in()["metrics/train/train_loss"] == {2 * per_epoch - 1: logs_of(trainer, "train_loss")[0]}


def test_nan_is_seen_although_the_trainer_logs_none() -> None:
    class Sick(Classifier):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            found = super().forward(input_ids, labels)
            self.calls = getattr(self, "calls", 0) + 1
            return {**found, "loss": found["loss"] * math.nan} if self.calls == 3 else found

    trainer = trained(Trainer, Sick(), max_steps=3)
    assert not any(math.isnan(one) for one in logs_of(trainer, "loss"))
    assert [math.isnan(one) for one in values_of(Event.BATCH_END, "loss")] == [False, False, True]


def test_evaluations_are_published_under_their_labels() -> None:
    trainer = trained(eval_dataset={"short": rows_of(8), "long": rows_of(20)}, eval_strategy="steps", eval_steps=5)
    ends = [one for one in snapshots_of() if one.event is Event.EVAL_END]
    assert [(one.dataloader_label, one.timestamp.batch.value) for one in ends] == [
        ("short", 5),
        ("long", 5),
        ("short", 10),
        ("long", 10),
        ("short", 11),
        ("long", 11),
    ]
    for label in ("short", "long"):
        found = [one.eval_metrics[label]["loss"] for one in ends if one.dataloader_label == label]
        assert found == pytest.approx(logs_of(trainer, f"eval_{label}_loss"), abs=1e-9)
    assert set(ends[0].eval_metrics["short"]) == {"loss", "runtime", "samples_per_second", "steps_per_second"}
    assert [one.eval_timestamp.sample.value for one in ends] == [8, 20] * 3
    # An evaluation is no part of the training, and its results are nothing that the training has logged.
    assert not [name for name in logged_in() if "eval" in name]
    assert "evaluators" not in snapshots_of()[1].fields


# What must not be changed.


@pytest.mark.parametrize("kill", [False, True])
def test_weights_are_the_same_with_and_without_even_if_the_broker_is_killed(kill: bool) -> None:
    def kill_half_way(step: int) -> None:
        if kill and step == 5:
            served = Path(os.environ["OFFLOOP_RUNS_DIR"]) / RUN / "broker.json"
            os.kill(json.loads(served.read_text())["pid"], signal.SIGKILL)

    plain = made(gradient_accumulation_steps=2, num_train_epochs=2)
    plain.train()
    attached = trained(
        Trainer,
        None,
        AtStep(kill_half_way),
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        attached={"record": "all"},
    )
    assert are_same(weights_of(plain.model), weights_of(attached.model))
    assert logs_of(plain, "loss") == logs_of(attached, "loss")
    assert len(values_of(Event.BATCH_END, "loss")) == 12
    assert vars(attached).keys() - vars(plain).keys() == {"train"}
    assert vars(attached.accelerator).keys() == vars(plain.accelerator).keys()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"write trainer\.add_callback\(OffloopCallback\(trainer\)\)"),
        ({"trainer": None}, r"write trainer\.add_callback\(OffloopCallback\(trainer\)\)"),
        ({"trainer": "mine"}, r"OffloopCallback needs the trainer"),
        ({"run_nam": "x"}, "there is no option 'run_nam': did you mean run_name"),
    ],
)
def test_wrong_uses_are_refused_at_once(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        OffloopCallback(**({"trainer": made()} if "run_nam" in given else {}), **given)


def test_the_class_among_the_callbacks_is_refused_with_what_to_write() -> None:
    with pytest.raises(ConfigurationError, match=r"leave it out of callbacks=\[\.\.\.\]"):
        made(Trainer, None, OffloopCallback)
