"""The quick start of Hugging Face Transformers, attached: the marked lines are ours.

    python examples/transformers_quickstart.py          in one terminal
    consumer --callbacks speed,lr,metrics               in another, before it or while it runs; --last: after it
    offloop send NAME stop                          stops it after the current batch; NAME is in its output

Source: https://huggingface.co/docs/transformers/training; model, tokenizer and reviews are made here, to avoid
downloads.
"""

import random
import sys

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from offloop.transformers import OffloopCallback  # <- this

GOOD, BAD, OTHER = ["great", "tasty", "friendly"], ["cold", "rude", "slow"], ["the", "food", "was", "and", "waiter"]
WORDS = ["[PAD]", "[UNK]", *GOOD, *BAD, *OTHER]
words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def reviews(count: int) -> Dataset:
    """Make random sentences, with the writers' opinion."""
    labels = [random.randrange(2) for _ in range(count)]
    texts = [" ".join(random.choices(OTHER, k=5) + random.choices(GOOD if label else BAD, k=2)) for label in labels]
    return Dataset.from_dict({"text": texts, "label": labels})


def tokenize(examples: dict[str, list[str]]) -> dict[str, list[list[int]]]:
    return {"input_ids": tokenizer(examples["text"])["input_ids"]}


def compute_metrics(eval_pred: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    logits, labels = eval_pred
    return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}


random.seed(0)
train, test = (reviews(count).map(tokenize, batched=True) for count in (1000, 200))
size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
model = BertForSequenceClassification(BertConfig(vocab_size=len(WORDS), num_labels=2, **size))
training_args = TrainingArguments(
    output_dir="reviews",
    num_train_epochs=int(sys.argv[1]) if len(sys.argv) > 1 else 3,
    learning_rate=5e-3,
    eval_strategy="epoch",
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=train,
    eval_dataset=test,
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=compute_metrics,
)
trainer.add_callback(OffloopCallback(trainer))  # <- this
trainer.train()
