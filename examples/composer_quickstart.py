"""Composer's quick start, watched: the marked lines are ours.

    python examples/composer_quickstart.py              in one terminal
    consumer --callbacks speed,lr,metrics               in another, before it or while it runs; --last: after it
    offloop send NAME stop                          stops it after the current batch; NAME is in its output

Source: https://github.com/mosaicml/composer#quick-start; its pictures of digits are drawn here, to avoid
downloads.
"""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from composer import Trainer
from composer.algorithms import LabelSmoothing
from composer.models import ComposerClassifier
from torch.utils.data import DataLoader, TensorDataset

from offloop.composer import OffloopCallback  # <- this

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 5


class Model(nn.Module):
    """Toy convolutional neural network architecture in pytorch for MNIST."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, (3, 3), padding=0)
        self.conv2 = nn.Conv2d(16, 32, (3, 3), padding=0)
        self.bn = nn.BatchNorm2d(32)
        self.fc1 = nn.Linear(32 * 16, 32)
        self.fc2 = nn.Linear(32, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.bn(self.conv2(self.conv1(x))))
        out = torch.flatten(F.adaptive_avg_pool2d(out, (4, 4)), 1)
        return self.fc2(F.relu(self.fc1(out)))


def digits(count: int) -> TensorDataset:
    """Draw pictures: a pattern for each of ten classes, with noise."""
    patterns = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(10, (count,))
    return TensorDataset(patterns[labels] + torch.randn(count, 1, 28, 28), labels)


train_dataloader = DataLoader(digits(1280), batch_size=128)
eval_dataloader = DataLoader(digits(256), batch_size=128)

trainer = Trainer(
    model=ComposerClassifier(module=Model(), num_classes=10),
    train_dataloader=train_dataloader,
    eval_dataloader=eval_dataloader,
    max_duration=f"{epochs}ep",
    algorithms=[LabelSmoothing(smoothing=0.1)],
    callbacks=[OffloopCallback()],  # <- this
)
trainer.fit()
