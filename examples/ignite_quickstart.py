"""The quick start of PyTorch Ignite, attached: the marked lines are ours.

    python examples/ignite_quickstart.py                in one terminal
    consumer --callbacks speed,lr,metrics               in another, before it or while it runs; --last: after it
    offloop send NAME stop                          stops it after the current batch; NAME is in its output

Source: https://docs.pytorch.org/ignite/quickstart.html; its handwritten digits are drawn here, to avoid
downloads, and its network is smaller.
"""

import sys

import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from offloop.ignite import OffloopLogger  # <- this

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def digits(count: int) -> TensorDataset:
    """Draw pictures of shape (1, 28, 28): a pattern for each of ten classes, with noise."""
    patterns = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(10, (count,))
    return TensorDataset(patterns[labels] + 2 * torch.randn(count, 1, 28, 28), labels)


class Net(nn.Module):
    """One convolution and one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 12 * 12, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x)
        return logits


model = Net().to(device)
train_loader = DataLoader(digits(6400), batch_size=128, shuffle=True)
val_loader = DataLoader(digits(640), batch_size=256)
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.005)
criterion = nn.CrossEntropyLoss()

trainer = create_supervised_trainer(model, optimizer, criterion, device)
val_metrics = {"accuracy": Accuracy(), "loss": Loss(criterion)}
train_evaluator = create_supervised_evaluator(model, metrics=val_metrics, device=device)
val_evaluator = create_supervised_evaluator(model, metrics=val_metrics, device=device)


@trainer.on(Events.EPOCH_COMPLETED)
def log_training_results(trainer: Engine) -> None:
    train_evaluator.run(train_loader)
    metrics = train_evaluator.state.metrics
    print(f"Training Results - Epoch[{trainer.state.epoch}] Avg accuracy: {metrics['accuracy']:.2f}")


@trainer.on(Events.EPOCH_COMPLETED)
def log_validation_results(trainer: Engine) -> None:
    val_evaluator.run(val_loader)
    metrics = val_evaluator.state.metrics
    print(f"Validation Results - Epoch[{trainer.state.epoch}] Avg accuracy: {metrics['accuracy']:.2f}")


evaluators = {"training": train_evaluator, "validation": val_evaluator}  # <- this
OffloopLogger().attach(trainer, optimizer, evaluators)  # <- this
trainer.run(train_loader, max_epochs=int(sys.argv[1]) if len(sys.argv) > 1 else 5)
