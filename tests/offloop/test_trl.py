"""Trainers of TRL as runs: the loss that they log, what they count, their own metrics, completions and samples."""

import json
import os
import subprocess
import sys
from collections import defaultdict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import trl
from attached_runs import RUN, are_same, events_of, logged_in, run_two_ranks, snapshots_of, values_of, weights_of
from datasets import Dataset
from paths import FOLDERS
from PIL import Image as PillowImage
from tiny_trl import TEXTS, Rewards, grpo, made, model
from trl import DPOConfig, DPOTrainer, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.trainer import grpo_trainer

import offloop
from offloop.attached.samples import BatchSamples, Completions
from offloop.bus import Event, Recording
from offloop.bus.runs.directory import find_run
from offloop.bus.types.image import Image
from offloop.consumers.callbacks import Tables
from offloop.transformers import OffloopCallback

# TRL uses names that Transformers is about to give up.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:`{name}` is deprecated and will be removed in v6:FutureWarning")
    for name in (
        *("gradient_checkpointing", "is_gradient_checkpointing"),
        *("gradient_checkpointing_enable", "gradient_checkpointing_disable"),
    )
]


def trained(trainer: Any, **options: Any) -> Any:
    trainer.add_callback(OffloopCallback(trainer, run_name=RUN, **options))
    trainer.train()
    return trainer


def logs_of(trainer: Any, name: str) -> list[float]:
    return [one[name] for one in trainer.state.log_history if name in one]


def check_losses_and_metrics(trainer: Any, *metrics: str) -> None:
    assert values_of(Event.BATCH_END, "loss") == pytest.approx(logs_of(trainer, "loss"), abs=1e-6)
    logged = logged_in()
    for name in ("grad_norm", *metrics):
        assert list(logged[f"metrics/train/{name}"].values()) == pytest.approx(logs_of(trainer, name), abs=1e-9)
    assert find_run(RUN).last.info["framework"] == {"name": "TRL", "version": trl.__version__}


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(tmp_path / "runs"))


def rows_of(table: str) -> list[dict[str, Any]]:
    frame = offloop.runs()[RUN].table(table)
    return frame.drop(columns=["time", "rank", "attempt"]).to_dict("records")  # type: ignore[no-any-return]


def sft() -> Any:
    data = {"prompt": TEXTS, "completion": [" the mat"] * 16}
    return made(
        *(SFTTrainer, SFTConfig, data, {"max_length": 16, "eval_strategy": "steps", "eval_steps": 3}),
        eval_dataset=Dataset.from_dict({name: rows[:3] for name, rows in data.items()}),
    )


@pytest.mark.slow
def test_supervised_fine_tuning() -> None:
    plain = sft()
    plain.train()
    trainer = trained(sft(), record="#samples")
    assert are_same(weights_of(plain.model), weights_of(trainer.model))
    check_losses_and_metrics(trainer, "entropy", "mean_token_accuracy", "num_tokens")
    last = snapshots_of()[-1].timestamp
    assert last.sample.value == 12
    assert values_of(Event.BATCH_END, "batch_size") == [4] * 3
    # The padding is counted, too; TRL's num_tokens has none.
    assert last.token.value >= logs_of(trainer, "num_tokens")[-1]
    (evaluated,) = values_of(Event.EVAL_END, "eval_metrics")
    assert evaluated["eval"]["loss"] == pytest.approx(logs_of(trainer, "eval_loss")[0], abs=1e-9)
    assert evaluated["eval"]["mean_token_accuracy"] == logs_of(trainer, "eval_mean_token_accuracy")[0]

    assert events_of()[2:5] == ["epoch_start", "#samples", "batch_end"]
    rows = rows_of("samples")
    assert [row["step"] for row in rows] == [0, 0, 1, 1, 2, 2]
    assert [row["loss_text"] for row in rows] == ["the mat <eos>"] * 6
    assert [row["loss_tokens"] for row in rows] == [3] * 6
    assert all(row["text"].removesuffix(" the mat <eos>") in TEXTS for row in rows)
    assert [row["tokens"] for row in rows] == [len(row["text"].split()) for row in rows]


def test_direct_preference_optimization() -> None:
    data = {"prompt": TEXTS, "chosen": [" the mat"] * 16, "rejected": [" it saw the tree"] * 16}
    arguments = {"max_length": 32, "per_device_train_batch_size": 4}
    trainer = trained(made(DPOTrainer, DPOConfig, data, arguments, ref_model=model()), record="#samples")
    check_losses_and_metrics(trainer, "rewards/margins", "rewards/accuracies", "logps/chosen")
    # A pair is a sample.
    assert snapshots_of()[-1].timestamp.sample.value == 24
    rows = rows_of("samples")
    assert [row["kind"] for row in rows] == ["chosen", "chosen", "rejected", "rejected"] * 3
    assert [row["loss_text"] for row in rows[:4]] == ["the mat <eos>"] * 2 + ["it saw the tree <eos>"] * 2


STEP = ["@generate", "@score", "#completions", "before_forward", "@train", "before_forward", "@train", "batch_end"]


@pytest.mark.parametrize(
    ("logs_completions", "requested"),
    [(False, {"record": "#completions,@*,before_forward"}), (True, {"callbacks": [Tables()]})],
)
def test_group_relative_policy_optimization(logs_completions: bool, requested: dict[str, Any]) -> None:
    rewards = Rewards()
    trainer = trained(grpo(rewards, {"log_completions": logs_completions}), **requested)
    check_losses_and_metrics(trainer, "reward", "completions/mean_length", "entropy")
    assert values_of(Event.BATCH_END, "batch_size") == [4] * 3
    last = snapshots_of()[-1].timestamp
    assert (last.sample.value, last.token.value) == (12, logs_of(trainer, "num_tokens")[-1])
    if "record" in requested:
        assert events_of() == ["init", "fit_start", "epoch_start", *STEP * 3, "fit_end"]
        # No span is within another one.
        assert {one.fields["span"][1] for one in snapshots_of() if one.event.is_custom} == {0}

    rows = rows_of("completions")
    assert list(rows[0]) == ["step", "prompt", "completion", "length", "cats", "words", "advantage"]
    assert [(row["prompt"], row["completion"]) for row in rows] == rewards.seen
    assert [row["step"] for row in rows] == [0] * 4 + [1] * 4 + [2] * 4
    assert [row["length"] for row in rows] == [len(row["completion"]) % 3 for row in rows]
    assert [row["words"] for row in rows] == [len(row["completion"].split()) for row in rows]
    # A function that gives no reward.
    assert [bool(np.isnan(row["cats"])) for row in rows] == ["dog" in row["completion"] for row in rows]
    kept = trainer._logs
    assert [row["advantage"] for row in rows[-4:]] == list(kept["advantages"])
    assert [row["completion"] for row in rows[-4:]] == list(kept["completion"])
    assert kept["prompt"].maxlen == 4


def test_completions_that_nobody_requests_cost_nothing_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, int] = defaultdict(int)

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            calls[name] += 1
            return original(*args, **more)

        monkeypatch.setattr(owner, name, call)

    counted(grpo_trainer, "gather_object")
    counted(Completions, "__init__")
    counted(BatchSamples, "take")
    plain = grpo(Rewards())
    plain.train()
    gathered = calls.pop("gather_object")
    quiet = trained(grpo(Rewards()))
    assert calls == {"gather_object": gathered}
    assert events_of() == ["init", "fit_start", "epoch_start", *["batch_end"] * 3, "fit_end"]
    loud = grpo(Rewards())
    loud.add_callback(OffloopCallback(loud, run_name="loud", record="all"))
    loud.train()
    assert calls["gather_object"] == 2 * gathered  # no gathering of ours
    assert calls["__init__"] == 3
    for one in (quiet, loud):
        assert are_same(weights_of(plain.model), weights_of(one.model))


def test_a_failed_step_ends_its_span() -> None:
    trainer = grpo(Rewards())

    def fail(*_: Any, **more: Any) -> None:
        raise ValueError("no loss")

    trainer._compute_loss = fail
    with pytest.raises(ValueError, match="no loss"):
        trained(trainer, record="@train")
    (span,) = [one for one in snapshots_of() if one.event.is_custom]
    assert span.fields["error"] == "ValueError"


def test_completions_of_evaluations_are_a_table_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    rewards = Rewards()
    arguments = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 6}
    trained(grpo(rewards, arguments, eval_dataset=Dataset.from_dict({"prompt": TEXTS[:3]})), record="#*")
    assert offloop.runs()[RUN].tables() == {"completions": 12, "eval_completions": 4}
    rows = rows_of("eval_completions")
    # TRL keeps as many as a batch of the training has.
    assert [(row["prompt"], row["completion"]) for row in rows] == rewards.seen[-4:]
    assert [row["step"] for row in rows] == [3] * 4
    assert "table eval_completions is left out, all else is published: 2 rows, because TRL keeps 4" in caplog.text


class Renamed(GRPOTrainer):  # type: ignore[misc]
    """As in a version of TRL that keeps completions in another way."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        kept = {name: [] for name in ("prompt", "completion", "advantages", "images")}
        self._logs = {**kept, "rewards": defaultdict(list), "extra": defaultdict(list)}


@pytest.mark.parametrize("has_method", [True, False])
def test_a_version_of_trl_without_them_is_named_once_and_trains(
    has_method: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_method:
        monkeypatch.setattr("offloop.transformers._GENERATION", "_renamed")
    trainer = trained(grpo(Rewards(), kind=Renamed), record="#completions")
    assert trainer.state.global_step == 3
    assert offloop.runs()[RUN].tables() == {}
    (line,) = [one for one in caplog.messages if "table completions is left out" in one]
    assert "Renamed of this version of TRL does not keep them" in line


@pytest.mark.slow
def test_the_first_rank_has_the_completions_of_all(tmp_path: Path) -> None:
    (first, second), _ = run_two_ranks("tiny_trl", tmp_path)
    tables = [(one.rank, one.fields["rows"]) for one in Recording(find_run(RUN).path) if one.event.is_table]
    assert [rank for rank, _ in tables] == [0] * 3
    for step, (_, rows) in enumerate(tables):
        part = slice(4 * step, 4 * step + 4)
        assert [row[:2] for row in rows] == first["seen"][part] + second["seen"][part]
    for rank in (0, 1):
        spans = [one for one in events_of(rank=rank) if one[0] == "@"]
        assert spans == ["@generate", "@score", "@train", "@train"] * 3


@pytest.mark.slow
def test_leave_one_out_has_the_same_table_and_spans() -> None:
    arguments = {"num_generations": 2, "max_completion_length": 6, "beta": 0.0}
    rewards = Rewards()
    trainer = made(RLOOTrainer, RLOOConfig, {"prompt": TEXTS}, arguments, reward_funcs=[rewards.length, rewards.cats])
    trained(trainer, record="#*,@*")
    step = [name for name in STEP if name != "before_forward"]
    assert events_of() == ["init", "fit_start", "epoch_start", *step * 3, "fit_end"]
    rows = rows_of("completions")
    assert [(row["prompt"], row["completion"]) for row in rows] == rewards.seen
    assert list(rows[0]) == ["step", "prompt", "completion", "length", "cats", "words", "advantage"]


@pytest.mark.slow
def test_online_dpo_has_spans() -> None:
    def cats(completions: list[str], **_: Any) -> list[float]:
        return [float(one.count("cat")) for one in completions]

    arguments = {"max_new_tokens": 6, "gradient_accumulation_steps": 1}
    parts = {"ref_model": model(), "reward_funcs": [cats]}
    trained(made(OnlineDPOTrainer, OnlineDPOConfig, {"prompt": TEXTS}, arguments, **parts), record="@*")
    assert [one for one in events_of() if one[0] == "@"] == ["@generate", "@score"] * 3


def test_messages_become_json_and_images_files_and_stale_columns_stay_out() -> None:
    def column(*values: Any) -> deque[Any]:
        return deque(values, maxlen=2)

    picture = PillowImage.new("RGBA", (1024, 8), (255, 0, 0, 255))
    logs: dict[str, Any] = {
        "prompt": column("old"),
        "completion": column("old"),
        "advantages": column(0.5),
        "images": column(),
        "rewards": {"r": column(1.0)},
        "extra": {"old": column(1)},
    }
    added = Completions(logs)
    question = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "é?"}]}]
    logs["prompt"].extend([question, question])
    logs["completion"].extend(iter([[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "b"}]]))
    logs["rewards"]["r"].extend([2.0, 3.0])
    logs["advantages"].extend([-1.0, 1.0])
    logs["images"].extend([[picture], [picture]])
    logs["extra"]["new"] = column([1, 2], None)
    first, second = added.rows()
    assert added.dropped == 0
    assert list(first) == ["prompt", "completion", "r", "new", "advantage", "image"]
    assert json.loads(first["prompt"])[0]["content"] == [
        {"type": "image", "image": "<Image>"},
        {"type": "text", "text": "é?"},
    ]
    assert json.loads(second["completion"]) == [{"role": "assistant", "content": "b"}]
    assert (first["r"], first["new"], second["new"], second["advantage"]) == (2.0, [1, 2], None, 1.0)
    (image,) = first["image"]
    assert isinstance(image, Image)
    assert image is second["image"][0]
    assert image.content[0].startswith(b"\x89PNG")


def test_samples_are_decoded_once_they_have_left_the_gpu() -> None:
    device: Any = SimpleNamespace(read_many_later=lambda vector: Promise(vector))

    class Promise:
        is_ready = False

        def __init__(self, vector: torch.Tensor) -> None:
            self.value = vector.tolist

        def ready(self) -> bool:
            return Promise.is_ready

    samples = BatchSamples(lambda ids: " ".join(map(str, ids)), device, ())
    samples.take({"input_ids": torch.arange(12).reshape(6, 2)}, 5)
    assert list(samples.arrived()) == []
    Promise.is_ready = True
    ((step, rows),) = samples.arrived()
    assert (step, [row["text"] for row in rows()]) == (5, ["0 1", "2 3", "4 5", "6 7"])
    samples.take({"input_ids": torch.ones(1, 1, dtype=torch.long)}, 6)
    Promise.is_ready = False
    assert [step for step, _ in samples.arrived(wait=True)] == [6]
    samples.take({"pixel_values": torch.ones(1, 1)}, 7)
    assert list(samples.arrived(wait=True)) == []


@pytest.mark.slow
@pytest.mark.needs("lowest")
def test_the_lowest_supported_version_has_the_same_events_tables_and_metrics() -> None:
    # Those that depend on the version; others take most of the time.
    chosen = "tuning or preference or relative or leave_one_out or evaluations"
    code = f"import pytest, sys; sys.exit(pytest.main(['-q', '-m', '', '-k', {chosen!r}, {__file__!r}]))"
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", f"import trl; assert trl.__version__ == '1.0.0'; {code}"],
        env=plain | {"PYTHONPATH": str(FOLDERS["lowest"])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
