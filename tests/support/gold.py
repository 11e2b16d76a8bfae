"""The job that the recorded traces and numbers in ``reference/`` come from, as plain torch.

Every number follows from a formula, in float64 and then rounded to float32: nothing is drawn at random or shuffled.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

OFFSETS = {"train": 0, "eval_a": 1000, "eval_b": 2000, "predict": 3000}
"""Where the rows of each part of the data begin."""

Batch = tuple[Tensor, Tensor]


def gold_data(part: str, rows: int) -> Batch:
    """Return the first rows of a part: inputs of shape (rows, 8) and classes 0 to 3 of shape (rows,)."""
    row = torch.arange(rows, dtype=torch.float64)[:, None] + OFFSETS[part]
    column = torch.arange(8, dtype=torch.float64)
    number = torch.arange(rows) + OFFSETS[part]
    return torch.sin(0.37 * row + 0.91 * column + 0.05 * row * column).float(), (3 * number + number // 4) % 4


def gold_loader(part: str, rows: int, batch_size: int) -> "DataLoader[Any]":
    """Return a loader of :func:`gold_data` that does not shuffle and keeps a short last batch.

    Evaluation is done with ``("eval_a", 12, 5)`` and ``("eval_b", 8, 4)``.
    """
    return DataLoader(TensorDataset(*gold_data(part, rows)), batch_size=batch_size, shuffle=False)


def gold_batches(part: str, rows: int, batch_size: int) -> list[Batch]:
    """Return the batches of :func:`gold_loader`, as tuples."""
    return [(x, y) for x, y in gold_loader(part, rows, batch_size)]


class CrossEntropy(Metric):
    """Mean of the losses of the updates, each counted once whatever its number of rows."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("updates", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total += cross_entropy(outputs, targets)
        self.updates += 1

    def compute(self) -> Tensor:
        return self.total / self.updates


class GoldMLP(nn.Module):
    """Linear(8, 16), Tanh, Linear(16, 4) with fixed first weights; the methods are those that a trainer calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        wide, narrow, inputs = (torch.arange(size, dtype=torch.float64) for size in (16, 4, 8))
        state = {
            "0.weight": 0.35 * torch.cos(0.6 * wide[:, None] + 0.23 * inputs + 0.1),
            "0.bias": 0.02 * wide - 0.1,
            "2.weight": 0.30 * torch.sin(0.4 * narrow[:, None] - 0.15 * wide + 0.3),
            "2.bias": 0.05 * (narrow - 1.5),
        }
        self.net.load_state_dict({name: values.float() for name, values in state.items()})
        self._metrics = {
            is_train: {"MulticlassAccuracy": MulticlassAccuracy(4, average="micro"), "CrossEntropy": CrossEntropy()}
            for is_train in (True, False)
        }

    def forward(self, batch: Batch) -> Tensor:
        outputs: Tensor = self.net(batch[0])
        return outputs

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return cross_entropy(outputs, batch[1])

    def eval_forward(self, batch: Batch, outputs: Tensor | None = None) -> Tensor:
        return self.forward(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        return self._metrics[is_train]

    def update_metric(self, batch: Batch, outputs: Tensor, metric: Metric) -> None:
        metric.update(outputs, batch[1])


def gold_optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)
