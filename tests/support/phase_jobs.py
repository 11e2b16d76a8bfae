"""A training whose rows take their time on one of its ranks, for ``run_two_ranks``."""

import time
from pathlib import Path
from typing import Any

import torch
from gold import gold_data, gold_optimizer
from ranks_jobs import make_model
from torch.utils.data import DataLoader, Dataset

from offloop.consumers import JsonlLogger
from offloop.consumers.callbacks.phases import Phases
from offloop.trainer import RankBatchSampler, Trainer
from offloop.trainer.distributed.ranks import rank_and_world_size

NAME = "phases"
BATCHES = 24
SECONDS_A_ROW = 0.04


class SlowRows(Dataset[Any]):
    """Rows that take their time."""

    def __init__(self, seconds: float) -> None:
        self._inputs, self._targets = gold_data("train", 4 * BATCHES)
        self._seconds = seconds

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._seconds)
        return self._inputs[index], self._targets[index]


def train(seconds: float, **arguments: Any) -> None:
    dataset = SlowRows(seconds)
    model = make_model()
    with Trainer(
        model,
        train_dataloader=DataLoader(dataset, batch_sampler=RankBatchSampler(dataset, 4)),
        optimizers=gold_optimizer(model),
        max_duration=f"{BATCHES}ba",
        device_train_microbatch_size=1,
        device="cpu",
        progress_bar=False,
        run_name=NAME,
        callbacks=[Phases(every=2, window=6)],
        loggers=[JsonlLogger()],
        **arguments,
    ) as trainer:
        trainer.fit()


def main(folder: Path) -> None:
    """Trains on several ranks, of which the second one waits for its data."""
    torch.set_num_threads(1)
    rank = rank_and_world_size()[0]
    train(SECONDS_A_ROW if rank == 1 else 0.0)
    (folder / f"rank-{rank}.json").write_text("null")
