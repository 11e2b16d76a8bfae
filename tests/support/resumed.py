"""A training that is stopped and goes on from its checkpoint."""

from pathlib import Path
from typing import Any

import torch
from gold import gold_data
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from offloop.bus.types.event import Event
from offloop.trainer import Algorithm, Classifier, State, Trainer
from offloop.trainer.schedulers import CosineAnnealingWithWarmupScheduler


class Augmented(Dataset[Any]):
    """Rows with noise that is drawn when they are fetched."""

    def __init__(self, rows: int) -> None:
        self.inputs, self.targets = gold_data("train", rows)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] + 0.1 * torch.randn(8), self.targets[index]


class Momentum(Algorithm):
    """Keeps a number from batch to batch that decides the weights."""

    def __init__(self) -> None:
        self.value = 0.0

    def match(self, event: Event, state: State) -> bool:
        return event is Event.AFTER_TRAIN_BATCH

    def apply(self, event: Event, state: State, logger: object) -> None:
        self.value = 0.5 * self.value + float(state.total_loss or 0)
        for parameter in state.model.parameters():
            parameter.grad.mul_(self.value)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def make(folder: Path | None, max_duration: str = "3ep", workers: int = 0, **arguments: Any) -> Trainer:
    """Return a training in which everything is drawn at random: order, noise, dropout; with accumulated gradients."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 4))
    loader = DataLoader(Augmented(26), batch_size=6, shuffle=True, num_workers=workers)
    settings: dict[str, Any] = {
        "optimizers": torch.optim.AdamW(net.parameters(), lr=0.01),
        "schedulers": CosineAnnealingWithWarmupScheduler("3ba"),
        "eval_dataloader": DataLoader(TensorDataset(*gold_data("eval_a", 12)), batch_size=5, shuffle=True),
        "eval_interval": "4ba",
        "device_train_microbatch_size": 2,
        "algorithms": Momentum(),
        "save_interval": "1ba",
        "publish": False,
    }
    return Trainer(
        Classifier(net),
        loader,
        max_duration=max_duration,
        seed=17,
        device="cpu",
        progress_bar=False,
        save_folder=folder,
        **(settings | arguments),
    )


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.state.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one | other)


def train(folder: Path | None, **arguments: Any) -> dict[str, torch.Tensor]:
    with make(folder, **arguments) as trainer:
        trainer.fit()
    return weights(trainer)
