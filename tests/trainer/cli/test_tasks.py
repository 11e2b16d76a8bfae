"""The tasks that come with the command train on real data, and learn."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from offloop import trainer
from offloop.trainer import Trainer
from offloop.trainer.device.seeding import seed_all
from offloop.trainer.tasks import BUILT_IN, find_task
from offloop.trainer.tasks.chars import read_source
from offloop.trainer.tasks.gpt import encode


def train(name: str, seed: int, max_duration: str | None = None, **options: Any) -> Trainer:
    seed_all(seed)
    arguments = find_task(name).arguments(**options)
    if max_duration is not None:
        arguments["max_duration"] = max_duration
    with Trainer(**arguments, seed=seed, device="cpu", publish=False, progress_bar=False) as made:
        made.fit()
    return made


def test_tasks_explain_their_options() -> None:
    assert all(option.help for name in BUILT_IN for option in find_task(name).options)


@pytest.mark.slow
def test_digits_gets_more_than_97_percent_of_the_held_out_images_right() -> None:
    made = train("digits", 0)
    assert made.state.timestamp.epoch == 5
    assert made.state.eval_metric_values["eval"]["MulticlassAccuracy"] > 0.97


def test_digits_holds_out_the_same_images_for_every_seed() -> None:
    held_out = []
    for seed in (1, 2):
        seed_all(seed)
        arguments = find_task("digits").arguments()
        held_out.append(next(iter(arguments["eval_dataloader"]))[0])
        assert len(arguments["train_dataloader"].dataset) == 1797 - 360
    assert torch.equal(*held_out)


@pytest.mark.slow
def test_chars_needs_fewer_bits_than_the_frequencies_of_the_characters() -> None:
    made = train("chars", 0, "120ba", length=32, width=32, layers=1, lr=0.01, characters=200_000)
    counts = Counter(encode(read_source(200_000)).tolist())
    entropy = -sum(count / 200_000 * math.log2(count / 200_000) for count in counts.values())
    assert 4.0 < entropy < 5.5
    assert made.state.eval_metric_values["eval"]["BitsPerCharacter"] < entropy - 1
    assert made.state.timestamp.token == 120 * 32 * 32


def test_every_public_name_can_be_imported() -> None:
    for name in trainer.__all__:
        assert getattr(trainer, name).__name__ == name
    assert set(trainer.__all__) <= set(dir(trainer))
