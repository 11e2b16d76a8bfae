"""A training of Lightning on two ranks that it spawns, of which the first one fails in its fourth batch:
``python lightning_ranks.py FOLDER``."""

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from attached_runs import make_network, make_rows
from torch.utils.data import DataLoader, TensorDataset

from offloop.lightning import OffloopCallback

DATA = DataLoader(TensorDataset(*make_rows(48)), batch_size=6)
"""Four batches on each rank."""


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_network()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3 and self.global_rank == 0:
            raise ZeroDivisionError
        inputs, targets = batch
        return torch.nn.functional.cross_entropy(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    trainer = lightning.Trainer(
        strategy="ddp_spawn",
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        callbacks=[OffloopCallback(run_name="spawn", runs_dir=folder / "runs")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Module(), DATA)
