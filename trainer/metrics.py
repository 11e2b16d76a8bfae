"""The metrics that models here come with, and how metrics are read."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional
from torchmetrics import Metric

from trainer.values import plain

__all__ = ["Accuracy", "CrossEntropy", "read_metrics"]


class Accuracy(Metric):
    """Share of samples whose class got the highest score; any number of classes."""

    correct: torch.Tensor
    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("correct", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, scores: torch.Tensor, targets: torch.Tensor) -> None:
        """Takes in scores of shape (rows, classes) and class numbers of shape (rows,)."""
        self.correct += (scores.argmax(dim=1) == targets).sum()
        self.total += targets.numel()

    def compute(self) -> torch.Tensor:
        """From 0 to 1."""
        return self.correct / self.total


class CrossEntropy(Metric):
    """Mean over samples of the cross entropy, in units of ``log(base)``: nats by default, bits with ``base=2``."""

    entropy: torch.Tensor
    total: torch.Tensor

    def __init__(self, base: float | None = None) -> None:
        super().__init__()
        self._unit = 1.0 if base is None else float(torch.tensor(base, dtype=torch.float64).log())
        self.add_state("entropy", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, scores: torch.Tensor, targets: torch.Tensor) -> None:
        """Takes in scores of shape (..., classes) and class numbers of shape (...)."""
        self.entropy += functional.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="sum")
        self.total += targets.numel()

    def compute(self) -> torch.Tensor:
        """The mean over everything taken in since the last reset."""
        return self.entropy / self.total / self._unit


def read_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Computes metrics and reads their values: numbers, or nested lists for those with more than one.

    On a GPU this waits for the device, so it has its place at the end of an evaluation."""
    return {name: plain(metric.compute()) for name, metric in metrics.items()}
