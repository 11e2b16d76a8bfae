"""Lightning's trainers on two ranks, of which it starts the second one itself: ``python lightning_ranks.py FOLDER``.

Each rank writes what it saw to ``rank-N.json``: of each part its losses, what was done on command after which step, and
its weights. With ``spawn`` as a further argument the ranks are spawned, and the first one fails in its fourth batch.
"""

import json
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import lightning
import torch
from attached_runs import make_network, make_rows
from torch.utils.data import DataLoader, TensorDataset

from offloop.attached.training import AttachedTraining
from offloop.bus.types.commands import Command
from offloop.lightning import OffloopCallback

ROWS, SIZE, EPOCHS = 36, 6, 4
"""On each of two ranks three batches an epoch."""
DATA = DataLoader(TensorDataset(*make_rows(ROWS)), batch_size=SIZE)


class Module(lightning.LightningModule):
    """Notes what happens, and has commands come to the first rank."""

    def __init__(self, commands: dict[int, Any] | None = None) -> None:
        super().__init__()
        self.net = make_network()
        self.commands = commands or {}
        self.losses: list[float] = []
        self.done: list[tuple[str, int]] = []

    def loss_of(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.cross_entropy(self.net(inputs), targets)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss_of(batch)
        self.losses.append(loss.item())
        command = self.commands.get(self.global_step + 1)
        if command is not None and self.global_rank == 0:
            command(self.trainer.callbacks[0]._training)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def on_validation_start(self) -> None:
        self.done.append(("evaluate", self.global_step))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.done.append(("checkpoint", self.global_step))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer(folder: Path, *callbacks: Any, strategy: str = "ddp") -> lightning.Trainer:
    return lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=EPOCHS,
        check_val_every_n_epoch=1000,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def train(name: str, folder: Path, published: bool = True, commands: dict[int, Any] | None = None) -> dict[str, Any]:
    """Trains on this rank's part of the data; ``commands`` come to the first rank, by step."""
    module = Module(commands)

    def set_heat(value: Any) -> None:
        module.done.append((f"heat {value}", module.global_step))

    options: Any = {"run_name": name, "runs_dir": folder / "runs", "on_set": {"heat": set_heat}}
    trainer = make_trainer(folder, *([OffloopCallback(**options)] if published else []))
    trainer.fit(module, DATA, DATA)
    weights = [parameter.detach().tolist() for parameter in module.parameters()]
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return {"losses": module.losses, "done": module.done, "weights": weights, "lr": rate}


def taking(*commands: tuple[Any, ...]) -> Any:
    """Has commands arrive."""

    def send(training: AttachedTraining) -> None:
        for name, *arguments in commands:
            training._control.take(Command(name, tuple(arguments), id=f"{name} {arguments}"))

    return send


def pause_for_a_while(training: AttachedTraining) -> None:
    """Has the training pause, and continue half a second later."""
    taking(("pause",))(training)
    threading.Timer(0.5, lambda: taking(("resume",))(training)).start()


def fail(training: AttachedTraining) -> None:
    raise ZeroDivisionError


def main(folder: Path) -> None:
    found = {"plain": train("plain", folder, published=False)}
    rank = torch.distributed.get_rank()
    found["commanded"] = train(
        "commanded",
        folder,
        commands={
            4: taking(("set", "heat", 2), ("set", "eval", "now"), ("checkpoint",), ("set", "lr", 0.2)),
            5: pause_for_a_while,
            8: taking(("stop",)),
        },
    )
    found["published"] = train("published", folder)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[2:] == ["spawn"]:
        options: Any = {"run_name": "spawn", "runs_dir": Path(sys.argv[1]) / "runs"}
        trainer = make_trainer(Path(sys.argv[1]), OffloopCallback(**options), strategy="ddp_spawn")
        trainer.fit(Module({4: fail}), DATA, DATA)
    else:
        main(Path(sys.argv[1]))
