"""The protocol of a model, and models made from plain modules."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from torchmetrics import Metric

Metrics = Mapping[str, Metric] | Iterable[Metric] | Metric
"""Metrics by name, or without names, which are then those of their classes."""


class Model(Protocol):
    """The methods that a model needs beside those of ``nn.Module``; the last three are for evaluation only.

    Reference: ``composer/models/base.py``."""

    def forward(self, batch: Any) -> Any:
        """Return the model's outputs for a batch."""

    def loss(self, outputs: Any, batch: Any) -> Any:
        """Return the loss to minimise: a tensor with one element, or several in a tuple, list or mapping.

        Several are summed; a mapping's entry ``total`` is used instead, if it has one. The parts are published as
        ``losses`` and logged as ``loss/train/NAME``."""

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """Return outputs for the metrics. ``outputs``, if given, come from :meth:`forward` for this batch."""

    def get_metrics(self, is_train: bool) -> Mapping[str, Metric]:
        """Return the metrics of the training or of an evaluation, by name. Each evaluator gets copies."""

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        """Update a metric with a batch."""


class _Supervised(nn.Module):
    """A module that is called with the first part of a batch and measured against the second."""

    def __init__(self, module: nn.Module, metrics: Metrics, train_metrics: Metrics | None) -> None:
        super().__init__()
        self.module = module
        self._metrics = {True: _by_name(train_metrics), False: _by_name(metrics)}

    def forward(self, batch: Any) -> Any:
        return self.module(batch[0])

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        return self(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool) -> Mapping[str, Metric]:
        return self._metrics[is_train]

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        metric.update(outputs, batch[1])


class Classifier(_Supervised):
    """A model from a plain module. Batches are pairs of inputs and class numbers; the module returns scores of classes.

    Reference: ``composer/models/tasks/classification.py``.

    Args:
        module: returns a score for each class.
        metrics: metrics of evaluations, by default ``MulticlassAccuracy`` and ``CrossEntropy``.
        loss_fn: called with scores and class numbers.
        train_metrics: metrics updated at every training batch, by default none."""

    def __init__(
        self,
        module: nn.Module,
        metrics: Metrics | None = None,
        loss_fn: Callable[[Any, Any], Any] = functional.cross_entropy,
        train_metrics: Metrics | None = None,
    ) -> None:
        default = {"MulticlassAccuracy": Accuracy(), "CrossEntropy": CrossEntropy()}
        super().__init__(module, default if metrics is None else metrics, train_metrics)
        self._loss_fn = loss_fn

    def loss(self, outputs: Any, batch: Any) -> Any:
        return self._loss_fn(outputs, batch[1])


class LanguageModel(_Supervised):
    """A model from a plain module that predicts tokens.

    Batches are pairs of token numbers and of the next ones, both of shape (rows, length). The module returns scores of
    shape (rows, length, vocabulary). The loss is in bits per token, which is bits per character when the tokens are
    characters. By default it is evaluated with ``BitsPerToken``, in the same unit."""

    def __init__(self, module: nn.Module, metrics: Metrics | None = None, train_metrics: Metrics | None = None) -> None:
        super().__init__(module, {"BitsPerToken": CrossEntropy(base=2)} if metrics is None else metrics, train_metrics)

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return bits per token. Targets are token numbers, or a probability for each token of the vocabulary."""
        targets = batch[1].flatten(0, outputs.ndim - 2)
        return functional.cross_entropy(outputs.flatten(0, -2), targets) / math.log(2)


def _by_name(metrics: Metrics | None) -> dict[str, Metric]:
    if metrics is None:
        return {}
    if isinstance(metrics, Metric):
        metrics = [metrics]
    if isinstance(metrics, Mapping):
        return dict(metrics)
    return {type(metric).__name__: metric for metric in metrics}


class Accuracy(Metric):
    """Share of samples whose class got the highest score; any number of classes."""

    correct: torch.Tensor
    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("correct", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, scores: torch.Tensor, targets: torch.Tensor) -> None:
        self.correct += (scores.argmax(dim=1) == targets).sum()
        self.total += targets.numel()

    def compute(self) -> torch.Tensor:
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
        self.entropy += functional.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="sum")
        self.total += targets.numel()

    def compute(self) -> torch.Tensor:
        return self.entropy / self.total / self._unit
