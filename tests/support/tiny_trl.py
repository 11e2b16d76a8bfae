"""Tiny trainers of TRL, made from configurations, also on several ranks for ``run_two_ranks``."""

import json
import os
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from offloop.transformers import OffloopCallback

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


class Rewards:
    """Two reward functions; notes each completion that they get."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def length(self, prompts: list[str], completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        self.seen += zip(prompts, completions, strict=True)
        log_extra("words", [len(one.split()) for one in completions])
        return [float(len(one) % 3) for one in completions]

    def cats(self, completions: list[str], **_: Any) -> list[float | None]:
        return [float(one.count("cat")) if "dog" not in one else None for one in completions]


def grpo(rewards: Rewards, arguments: dict[str, Any] | None = None, kind: Any = GRPOTrainer, **parts: Any) -> Any:
    arguments = {"num_generations": 2, "max_completion_length": 6, **(arguments or {})}
    functions = [rewards.length, rewards.cats]
    return made(kind, GRPOConfig, {"prompt": TEXTS}, arguments, reward_funcs=functions, **parts)


def main(folder: Path) -> None:
    """Train with GRPO on this rank, and write the completions that its reward functions got."""
    rewards = Rewards()
    trainer = grpo(rewards, {"ddp_backend": "gloo"})
    trainer.add_callback(OffloopCallback(trainer, run_name="r", record="#*,@*"))
    trainer.train()
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps({"seen": rewards.seen}))
