"""Trainers of Transformers on several ranks, for ``run_two_ranks``.

Each rank writes what it saw to ``rank-N.json``: of each part the losses that were logged, the steps in which it
evaluated and saved, and its weights.
"""

import json
import os
import threading
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments

from offloop.bus.types.commands import Command
from offloop.transformers import OffloopCallback


class Regression(torch.nn.Module):
    """A model whose weights are quick to compare."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.1), torch.nn.Linear(3, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": (logits[:, 0] - labels).square().mean(), "logits": logits}


class Notes(TrainerCallback):
    """Writes down what is done, and lets commands arrive at the first rank."""

    def __init__(self, take: Any = None) -> None:
        self.done: list[tuple[str, int]] = []
        self.take = take

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Just before the batch ends."""
        if self.take is not None and state.is_world_process_zero:
            self.take(state.global_step + 1)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.done.append(("evaluate", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.done.append(("save", state.global_step))


def train(name: str, folder: Path, attached: bool = True, commands: dict[int, Any] | None = None) -> dict[str, Any]:
    """Trains; ``commands`` arrive at the first rank, by batch."""
    drawn = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(4, generator=drawn), "labels": torch.randn((), generator=drawn)} for _ in range(48)]
    trainer = Trainer(
        model=Regression(),
        train_dataset=rows,
        eval_dataset=rows[:8],
        args=TrainingArguments(
            output_dir=str(folder / f"{name}-out"),
            use_cpu=True,
            ddp_backend="gloo",
            report_to=[],
            disable_tqdm=True,
            per_device_train_batch_size=2,
            num_train_epochs=1,
            logging_steps=1,
            save_strategy="no",
            lr_scheduler_type="constant",
        ),
    )
    callback = OffloopCallback(trainer, run_name=name, runs_dir=folder / "runs")

    def take(step: int) -> None:
        for one in (commands or {}).get(step, ()):
            if one == ("pause",):
                threading.Timer(0.5, lambda: callback._training._control.take(Command("resume", id="resume"))).start()
            callback._training._control.take(Command(one[0], one[1:], id=str(one)))

    notes = Notes(take)
    trainer.add_callback(notes)
    if attached:
        trainer.add_callback(callback)
    trainer.train()
    return {
        "steps": trainer.state.global_step,
        "losses": [one["loss"] for one in trainer.state.log_history if "loss" in one],
        "done": notes.done,
        "lr": trainer.optimizer.param_groups[0]["lr"],
        "weights": [parameter.detach().tolist() for parameter in trainer.model.parameters()],
    }


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    found = {
        "plain": train("plain", folder, attached=False),
        "attached": train("attached", folder),
        "commanded": train(
            "commanded",
            folder,
            commands={
                3: [("set", "lr", 0.2), ("set", "eval", "now"), ("checkpoint",)],
                5: [("pause",)],
                8: [("stop",)],
            },
        ),
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
