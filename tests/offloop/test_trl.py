"""Trainers of TRL as runs: the loss that they log, what they count, and their own metrics."""

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from attached_runs import RUN, are_same, logged_in, snapshots_of, values_of, weights_of
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from offloop.bus import Event
from offloop.bus.runs.directory import find_run
from offloop.transformers import OffloopCallback

# TRL uses names that Transformers is about to give up.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:`{name}` is deprecated and will be removed in v6:FutureWarning")
    for name in (
        *("gradient_checkpointing", "is_gradient_checkpointing"),
        *("gradient_checkpointing_enable", "gradient_checkpointing_disable"),
    )
]

TEXTS = ["the cat sat on the mat", "a dog ran under the tree", "it saw a cat and a dog", "the dog sat"] * 4
WORDS = ["<pad>", "<eos>", "<unk>", *sorted({word for text in TEXTS for word in text.split()})]


def tokenizer() -> Any:
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model() -> Any:
    torch.manual_seed(3)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**size, **tokens, max_position_embeddings=64))


def made(kind: Any, config: Any, data: dict[str, Any], arguments: dict[str, Any], **parts: Any) -> Any:
    options = {
        "output_dir": os.environ["OFFLOOP_RUNS_DIR"] + "-out",
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "max_steps": 3,
        **arguments,
    }
    return kind(
        model=model(),
        args=config(**options),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer(),
        **parts,
    )


def trained(trainer: Any) -> Any:
    trainer.add_callback(OffloopCallback(trainer, run_name=RUN))
    trainer.train()
    return trainer


def logs_of(trainer: Any, name: str) -> list[float]:
    return [one[name] for one in trainer.state.log_history if name in one]


def check_losses_and_metrics(trainer: Any, *metrics: str) -> None:
    assert values_of(Event.BATCH_END, "loss") == pytest.approx(logs_of(trainer, "loss"), abs=1e-6)
    logged = logged_in()
    for name in ("grad_norm", *metrics):
        assert list(logged[f"metrics/train/{name}"].values()) == pytest.approx(logs_of(trainer, name), abs=1e-9)
    assert find_run(RUN).last.info["framework"] == {"name": "TRL", "version": version("trl")}


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(tmp_path / "runs"))


def sft() -> Any:
    return made(
        *(SFTTrainer, SFTConfig, {"text": TEXTS}),
        {"max_length": 16, "eval_strategy": "steps", "eval_steps": 3},
        eval_dataset=Dataset.from_dict({"text": TEXTS[:3]}),
    )


@pytest.mark.slow
def test_supervised_fine_tuning() -> None:
    plain = sft()
    plain.train()
    trainer = trained(sft())
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


def test_direct_preference_optimization() -> None:
    data = {"prompt": TEXTS, "chosen": [" the mat"] * 16, "rejected": [" it saw the tree"] * 16}
    trainer = trained(made(DPOTrainer, DPOConfig, data, {"max_length": 32}, ref_model=model()))
    check_losses_and_metrics(trainer, "rewards/margins", "rewards/accuracies", "logps/chosen")
    # A pair is a sample.
    assert snapshots_of()[-1].timestamp.sample.value == 12


def test_group_relative_policy_optimization() -> None:
    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(one) % 3) for one in completions]

    arguments = {"num_generations": 2, "max_completion_length": 6}
    trainer = trained(made(GRPOTrainer, GRPOConfig, {"prompt": TEXTS}, arguments, reward_funcs=reward))
    check_losses_and_metrics(trainer, "reward", "completions/mean_length", "entropy")
    assert values_of(Event.BATCH_END, "batch_size") == [4] * 3
    last = snapshots_of()[-1].timestamp
    assert (last.sample.value, last.token.value) == (12, logs_of(trainer, "num_tokens")[-1])
