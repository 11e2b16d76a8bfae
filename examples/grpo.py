"""Reinforcement learning with TRL's GRPO, watched: its completions and rewards as a table, its phases as spans.

    python examples/grpo.py          less than a minute on a CPU, without downloads; a number as argument: of steps

A tiny model, made here, learns to repeat the animal in its prompt. In another terminal, while it trains:

    consumer --callbacks tables --log wandb             completions in a tracker, by a process that may come and go
    offloop ui                                          the run in the browser

Sources: https://huggingface.co/docs/trl/grpo_trainer; the marked lines are ours.
"""

import os
import sys
from collections import defaultdict
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

import offloop
from offloop.transformers import OffloopCallback  # <- this

ANIMALS = ["cat", "dog", "fox", "owl"]
WORDS = ["<pad>", "<eos>", "<unk>", *ANIMALS]
words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
tokens = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
set_seed(1)
model = LlamaForCausalLM(LlamaConfig(**size, **tokens, max_position_embeddings=32))


def repeats(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Share of the words that are the prompt's."""
    answers = [completion.split() for completion in completions]
    return [answer.count(prompt) / max(len(answer), 1) for prompt, answer in zip(prompts, answers, strict=True)]


def short(completions: list[str], **_: Any) -> list[float]:
    """1 for one word, less for more or none."""
    return [1 / length if (length := len(completion.split())) else 0.0 for completion in completions]


trainer = GRPOTrainer(
    model=model,
    reward_funcs=[repeats, short],
    args=GRPOConfig(
        output_dir="animals",
        max_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 60,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=6,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=Dataset.from_dict({"prompt": ANIMALS * 100}),
    processing_class=tokenizer,
)
# Without record= they are published while a consumer requests them.
callback = OffloopCallback(trainer, run_name="grpo", record="#completions,@*")  # <- this
trainer.add_callback(callback)  # <- this
trainer.remove_callback(PrinterCallback)
trainer.train()

run = offloop.runs().sort("-started")[0]
table = run.table("completions", to="pandas")
columns = ["step", "prompt", "completion", "repeats", "short", "advantage"]
print("\nCompletions of the first and the last step:\n")
print(table[columns].iloc[[0, 1, 2, 3, -4, -3, -2, -1]].round(2).to_string(index=False))
print("\nMean reward of each ten steps:\n")
print(table.groupby(table["step"] // 10 * 10)[["repeats", "short"]].mean().round(2).to_string())
seconds: dict[str, float] = defaultdict(float)
for event in run.events("@generate", "@score", "@train"):
    _, _, duration = event.span
    seconds[event.event.value[1:]] += duration / 1e9
print("\nSeconds in", ", ".join(f"{name}: {took:.1f}" for name, took in seconds.items()))
export = f"offloop export {run.name} --to"
print(f"\nNext: offloop ui; {export} parquet --table completions; {export} trace")
