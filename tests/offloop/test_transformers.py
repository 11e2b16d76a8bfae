"""Trainers of Transformers as runs: what is published of them, and what is their own in that."""

import math
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
from attached_runs import (
    RUN,
    are_same,
    events_of,
    logged_in,
    snapshots_of,
    values_of,
    weights_of,
)
from field_stream import Stream
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from offloop.attached.training import PREDICTION
from offloop.bus import Event, Recording
from offloop.bus.errors import ConfigurationError
from offloop.bus.index.index import read_entry
from offloop.bus.runs.directory import find_run, list_runs
from offloop.bus.types.commands import Command
from offloop.bus.types.demand import Demand, EventDemand
from offloop.trainer.stream.run_stream import TrainingStream
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
        args=(Seq2SeqTrainingArguments if kind is Seq2SeqTrainer else TrainingArguments)(**options),
        callbacks=list(callbacks),
        **{"train_dataset": rows_of(), **data},
    )


def trained(*given: Any, attached: dict[str, Any] | None = None, **arguments: Any) -> Any:
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


@pytest.mark.slow
@pytest.mark.parametrize(("accumulation", "model"), [(3, None), (3, Classifier)])
def test_events_loss_rates_and_training_time_are_those_of_the_trainer(accumulation: int, model: Any) -> None:
    trainer = trained(
        *(Trainer, model and model()),
        eval_dataset=rows_of(12),
        eval_strategy="epoch",
        gradient_accumulation_steps=accumulation,
        num_train_epochs=2,
        warmup_steps=2,
        hub_token="hf_secret",
        attached={"record": "all"},
    )
    counts = [accumulation] * (11 // accumulation) + [11 % accumulation] * bool(11 % accumulation)
    batches = [name for count in counts for name in [*FETCH, *MICROBATCH * count, *STEP]]
    epoch = ["epoch_start", *batches, "epoch_end", *EVALUATED, "epoch_checkpoint"]
    seen = events_of()
    assert seen == ["init", "fit_start", *epoch * 2, "fit_end"]
    unavailable = snapshots_of()[0].fields["unavailable"]
    info = find_run(RUN).last.info
    assert unavailable == info["unavailable"]
    assert set(unavailable["events"]) == {one.value for one in Event} - set(seen) - {one.value for one in PREDICTION}
    assert info["framework"] == {"name": "Transformers", "version": version("transformers")}

    ends = [one for one in snapshots_of() if one.event is Event.BATCH_END]
    assert [one.loss for one in ends] == pytest.approx(logs_of(trainer, "loss"), abs=1e-6)
    # Transformers logs the rate that the step had, and events have the next one, as ours.
    assert [one.lr["AdamW"][0] for one in ends[:-1]] == pytest.approx(logs_of(trainer, "learning_rate")[1:], abs=1e-12)
    assert {len(one.lr["AdamW"]) for one in ends} == {len(trainer.optimizer.param_groups)}
    last, per_epoch = ends[-1].timestamp, len(counts)
    assert (last.epoch.value, last.batch.value, last.sample.value) == (1, 2 * per_epoch, 2 * ROWS)
    assert (last.batch_in_epoch.value, last.token.value) == (per_epoch, 2 * ROWS * 12)
    assert ({one.dataloader_len for one in ends}, str(ends[0].max_duration)) == ({per_epoch}, "2ep")
    start = snapshots_of()[1]
    assert (start.global_train_batch_size, start.train_samples) == (4 * accumulation, ROWS)
    known = start.hyperparameters
    assert (known["config/learning_rate"], known["config/trainer"]) == (0.01, "Trainer")
    assert known["config/hub_token"] == "***"
    assert "hf_secret" not in find_run(RUN).recording.parent.joinpath("run.json").read_text()
    norms = logged_in()["metrics/train/grad_norm"]
    assert list(norms.values()) == pytest.approx(logs_of(trainer, "grad_norm"), abs=1e-6)
    assert list(norms) == list(range(2 * per_epoch))
    assert logged_in()["metrics/train/train_loss"] == {2 * per_epoch - 1: logs_of(trainer, "train_loss")[0]}


def test_evaluations_are_published_under_their_labels_and_predictions_are_told() -> None:
    trainer = made(
        eval_dataset={"short": rows_of(8), "long": rows_of(20)}, eval_strategy="steps", eval_steps=3, max_steps=6
    )
    trainer.add_callback(OffloopCallback(trainer, run_name=RUN, record="all"))
    trainer.add_callback(AtStep(lambda step: step == 5 and trainer.predict(rows_of(12))))
    trainer.train()
    ends = [one for one in snapshots_of() if one.event is Event.EVAL_END]
    places = [(one.dataloader_label, one.timestamp.batch.value, one.eval_timestamp.sample.value) for one in ends]
    assert places == [("short", 3, 8), ("long", 3, 20), ("short", 6, 8), ("long", 6, 20)]
    for label in ("short", "long"):
        found = [one.eval_metrics[label]["loss"] for one in ends if one.dataloader_label == label]
        assert found == pytest.approx(logs_of(trainer, f"eval_{label}_loss"), abs=1e-9)
    assert set(ends[0].eval_metrics["short"]) == {"loss", "runtime", "samples_per_second", "steps_per_second"}
    # An evaluation is no part of the training, and its results are nothing that the training has logged.
    assert not [name for name in logged_in() if "eval" in name]
    assert "evaluators" not in snapshots_of()[1].fields

    names = events_of()
    at = names.index("predict_start")
    batches = ["predict_batch_start", "predict_batch_end"] * 2
    assert names[at - 1 : at + 6] == ["batch_end", "predict_start", *batches, "predict_end"]
    assert {one.dataloader_label for one in snapshots_of() if one.event is Event.BATCH_END} == {"train"}
    assert next(one for one in snapshots_of() if one.event is Event.PREDICT_END).predict_timestamp.sample.value == 12


def test_what_was_logged_since_the_last_event_is_there_after_an_error() -> None:
    trainer = made(logging_steps=3)
    training_step = trainer.training_step

    def fail(*given: Any, **more: Any) -> Any:
        if trainer.state.global_step == 3:
            trainer.log({"own": 0.5})
            raise ZeroDivisionError
        return training_step(*given, **more)

    trainer.training_step = fail
    trainer.add_callback(OffloopCallback(trainer, run_name=RUN))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert logged_in()["metrics/train/grad_norm"] == {2: logs_of(trainer, "grad_norm")[0]}
    # Within the next batch already.
    assert logged_in()["metrics/train/own"] == {3: 0.5}
    last = snapshots_of()[-1]
    assert (last.event, last.timestamp.batch) == (Event.ITERATION_CHECKPOINT, 3)


def test_nan_is_seen_although_the_trainer_logs_none() -> None:
    class Sick(Classifier):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            found = super().forward(input_ids, labels)
            self.calls = getattr(self, "calls", 0) + 1
            return {**found, "loss": found["loss"] * math.nan} if self.calls == 3 else found

    trainer = trained(Trainer, Sick(), max_steps=3)
    assert not any(math.isnan(one) for one in logs_of(trainer, "loss"))
    assert [math.isnan(one) for one in values_of(Event.BATCH_END, "loss")] == [False, False, True]


def test_sequence_to_sequence_with_generation_and_counted_tokens() -> None:
    size = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    tokens = {"vocab_size": 32, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(3)
    trainer = made(
        Seq2SeqTrainer,
        T5ForConditionalGeneration(T5Config(**size, **tokens)),
        eval_dataset=rows_of(8),
        eval_on_start=True,
        predict_with_generate=True,
        generation_max_length=4,
        include_num_input_tokens_seen="non_padding",
    )
    trainer.compute_metrics = lambda found: {"count": len(found.predictions), "kind": "text"}
    for row in trainer.train_dataset:
        row["attention_mask"] = (torch.arange(12) < 10).long()
    trainer.add_callback(OffloopCallback(trainer, run_name=RUN))
    trainer.train()
    assert values_of(Event.BATCH_END, "loss") == pytest.approx(logs_of(trainer, "loss"), abs=1e-6)
    (end,) = [one for one in snapshots_of() if one.event is Event.EVAL_END]
    assert (end.timestamp.batch.value, end.eval_metrics["eval"]["count"]) == (0, 8)
    assert "kind" not in end.eval_metrics["eval"]
    assert snapshots_of()[-1].timestamp.token.value == 10 * ROWS == trainer.state.num_input_tokens_seen


def test_what_scripts_and_callbacks_log_is_logged_if_it_is_a_number() -> None:
    trainer = made(max_steps=3, logging_strategy="no")
    trainer.add_callback(OffloopCallback(trainer, run_name=RUN))
    values = {"one": np.float32(0.5), "two": torch.tensor(2.0), "no": None, "text": "x", "several": torch.ones(3)}
    trainer.add_callback(AtStep(lambda step: trainer.log(dict(values))))
    trainer.train()
    logged = logged_in()
    assert logged["metrics/train/one"] == {0: 0.5, 1: 0.5, 2: 0.5}
    assert logged["metrics/train/two"] == {0: 2.0, 1: 2.0, 2: 2.0}
    assert {name for name in logged if name.startswith("metrics/train")} - {
        f"metrics/train/{name}" for name in ("one", "two", "total_flos", "train_loss", "train_runtime")
    } == {"metrics/train/train_samples_per_second", "metrics/train/train_steps_per_second"}


def test_a_training_without_a_known_length_counts_in_batches() -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(rows_of(10))

    trainer = trained(max_steps=5, train_dataset=Endless(), gradient_accumulation_steps=2)
    ends = [one for one in snapshots_of() if one.event is Event.BATCH_END]
    # The third batch of an epoch stays without a step, and goes into the next epoch's.
    assert [one.timestamp.epoch.value for one in ends] == [0, 1, 2, 3, 4]
    assert [one.timestamp.sample.value for one in ends] == [8, 18, 28, 38, 48]
    assert [one.loss for one in ends] == pytest.approx(logs_of(trainer, "loss"), abs=1e-6)
    assert (ends[0].dataloader_len, str(ends[0].max_duration)) == (None, "5ba")


def test_a_callback_without_its_trainer_is_refused() -> None:
    for given in ({}, {"trainer": "mine"}):
        with pytest.raises(ConfigurationError, match="trainer"):
            OffloopCallback(**given)
    with pytest.raises(ConfigurationError, match=r"leave it out of callbacks=\[\.\.\.\]"):
        made(Trainer, None, OffloopCallback)


# Fields on demand, and commands.


def test_gradient_norm_is_that_of_the_clipped_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("gradient_norm", "outputs", "activations", "memory_stats")
    stream = Stream(Demand({Event.BATCH_END: EventDemand(1, dict.fromkeys(names, 1))}))
    stream.run_name, stream.answer, stream.poll = RUN, None, None  # type: ignore[attr-defined]
    monkeypatch.setattr(TrainingStream, "_start_publisher", lambda *_: stream)
    trainer = trained(max_steps=3, max_grad_norm=0.1)
    assert min(logs_of(trainer, "grad_norm")) > 0.4
    sent = [fields for event, _, fields in stream.sent if event is Event.BATCH_END]
    assert [one["gradient_norm"] for one in sent] == pytest.approx([0.1] * 3, rel=1e-4)
    assert "outputs: " in sent[2]["not_sent"]
    assert "std/transformer.wte_output.0" in sent[2]["activations"]
    assert ("memory_stats" in sent[2]) != ("memory_stats" in sent[2]["not_sent"])


@pytest.mark.parametrize("is_fsdp2", [False, True])
def test_fields_of_divided_weights_are_not_promised(monkeypatch: pytest.MonkeyPatch, is_fsdp2: bool) -> None:
    trainer = made(max_steps=1)

    class Divided(TrainerCallback):
        def __init__(self, divided: bool) -> None:
            self.divided = divided

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            trainer.is_fsdp_enabled = self.divided
            monkeypatch.setattr(type(trainer.accelerator), "is_fsdp2", self.divided and is_fsdp2)

    for callback in (Divided(True), OffloopCallback(trainer, run_name=RUN), Divided(False)):
        trainer.add_callback(callback)
    trainer.train()
    unavailable = snapshots_of()[0].unavailable["fields"]
    # To ask one rank alone for the weights of FSDP would wait for the others for ever.
    assert unavailable["weights_checkpoint"] == "each rank has only a part"
    assert ("gradient_norm" in unavailable) is not is_fsdp2


def test_a_checkpoint_on_command_is_saved_although_an_evaluation_finds_nothing_better() -> None:
    trainer = made(
        eval_dataset=rows_of(4),
        max_steps=6,
        learning_rate=0.0,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="best",
        metric_for_best_model="loss",
        greater_is_better=False,
    )
    callback = OffloopCallback(trainer, run_name=RUN)

    def save(step: int) -> None:
        if step == 4:
            callback._training._control.take(Command("checkpoint", (), id="1"))

    trainer.add_callback(AtStep(save))
    trainer.add_callback(callback)
    trainer.train()
    saved = sorted(Path(trainer.args.output_dir).glob("checkpoint-*"))
    assert [one.name for one in saved] == ["checkpoint-2", "checkpoint-5"]
    (commanded,) = Recording(find_run(RUN).recording).read_commands()
    assert str(commanded) == f"'checkpoint' wrote {saved[1]} at batch 5"
    of_evaluation, on_command = read_entry(find_run(RUN)).checkpoints
    assert [of_evaluation.path, on_command.path] == list(map(str, saved))
    assert (of_evaluation.batch, on_command.batch) == (2, 5)
    (evaluated, *_) = values_of(Event.EVAL_END, "eval_metrics")
    assert (of_evaluation.metric, of_evaluation.value) == ("metrics/eval/loss", evaluated["eval"]["loss"])
    assert (of_evaluation.is_best, on_command.is_latest, on_command.metric) == (True, True, None)


# How trainings end, and begin again.


class Failing(TrainerCallback):
    """Raises in a step."""

    def __init__(self, error: BaseException, at: int = 3) -> None:
        self.error, self.at = error, at

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.at:
            raise self.error


@pytest.mark.slow
def test_smaller_batches_after_too_little_memory_are_another_attempt() -> None:
    class Hungry(Classifier):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            if len(input_ids) > 3:
                raise RuntimeError("CUDA out of memory.")
            return super().forward(input_ids, labels)

    trainer = trained(Trainer, Hungry(), auto_find_batch_size=True, attached={"run_name": None}, run_name="my run/1")
    first, second = find_run("my-run-1").attempts
    assert (first.status, first.error) == ("failed", "MemoryError: out of memory: it restarts with batches of 3")
    assert second.status == "finished"
    losses = values_of(Event.BATCH_END, "loss", run="my-run-1", attempt=2)
    assert losses == pytest.approx(logs_of(trainer, "loss"), abs=1e-6)
    assert snapshots_of("my-run-1", 2)[-1].timestamp.sample.value == ROWS


@pytest.mark.slow
@pytest.mark.parametrize(("every", "reached"), [(4, 8), (11, 11)])
def test_a_training_that_resumes_counts_on(every: int, reached: int) -> None:
    """In the middle of an epoch; and from its last step, in which the checkpoint was written before the epoch ended."""
    arguments = {"save_strategy": "steps", "save_steps": every, "num_train_epochs": 2}
    whole = made(**arguments, output_dir=os.environ["OFFLOOP_RUNS_DIR"] + "-whole")
    whole.train()
    with pytest.raises(ZeroDivisionError):
        trained(Trainer, None, Failing(ZeroDivisionError(), reached), **arguments)
    trainer = made(**arguments)
    trainer.add_callback(OffloopCallback(trainer, run_name="second"))
    trainer.train(resume_from_checkpoint=True)
    assert are_same(weights_of(trainer.model), weights_of(whole.model))
    start = snapshots_of("second")[1]
    now = start.timestamp
    assert (start.event, now.batch.value, now.sample.value) == (Event.FIT_START, reached, 4 * reached)
    assert (now.token.value, now.epoch.value) == (48 * reached, reached // 11)
    assert events_of("second").count("epoch_start") == 1
    ends = [one.timestamp for one in snapshots_of("second") if one.event is Event.BATCH_END]
    assert [one.batch.value for one in ends] == list(range(reached + 1, 23))
    assert ends[-1].sample.value == 2 * ROWS
    saved = Recording(find_run(RUN).path).read_checkpoints()
    assert [(one.action, one.timestamp.batch.value) for one in saved] == [
        ("save", at) for at in sorted({every, reached})
    ]
    loaded, *_ = Recording(find_run("second").path).read_checkpoints()
    assert (loaded.action, loaded.run) == ("load", RUN)


@pytest.mark.slow
def test_a_callback_that_is_added_twice_makes_one_run_and_train_again_another() -> None:
    trainer = made(max_steps=2)
    before = vars(trainer).keys(), vars(trainer.accelerator).keys()
    for name in ("first", RUN):
        trainer.add_callback(OffloopCallback(trainer, run_name=name))
    for run in (RUN, f"{RUN}-2"):
        trainer.train()
        assert len(values_of(Event.BATCH_END, "loss", run)) == 2
    assert {one.name for one in list_runs()} == {RUN, f"{RUN}-2"}
    assert "training_step" not in vars(trainer).keys() - before[0]
    assert "backward" not in vars(trainer.accelerator).keys() - before[1]
