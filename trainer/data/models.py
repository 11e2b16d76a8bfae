"""The methods of a model, and models made from plain modules."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from torchmetrics import Metric

Metrics = Mapping[str, Metric] | Iterable[Metric] | Metric
"""Metrics under names of one's own, or under the names of their classes."""


class Model(Protocol):
    """The methods that a model has beside those of ``nn.Module``; the last three are for evaluation only.

    ``loss`` returns a tensor, or several as a tuple, list or mapping, whose sum is trained on (a mapping's entry
    ``total`` instead, if there is one). Reference: ``composer/models/base.py``."""

    def forward(self, batch: Any) -> Any:
        """The model's outputs for a batch."""

    def loss(self, outputs: Any, batch: Any) -> Any:
        """The loss to minimise: a tensor with one element, or a dict or list of such, whose sum it then is, or whose
        ``total`` where a dict has that. The parts are published as ``losses`` and logged as ``loss/train/NAME``."""

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """Outputs to measure by the metrics; ``outputs``, when given, are those of :meth:`forward` for this batch."""

    def get_metrics(self, is_train: bool) -> Mapping[str, Metric]:
        """The metrics of the training or of an evaluation, by name. Each evaluator gets copies."""

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        """Lets a metric take in a batch."""


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
    """A model from a plain module: batches are pairs of inputs and class numbers, the module gives a score for each
    class.

    It is evaluated by ``MulticlassAccuracy`` and ``CrossEntropy`` unless ``metrics`` names others; ``train_metrics``
    are updated at every training batch and therefore none by default. Reference:
    ``composer/models/tasks/classification.py``."""

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
    """A model from a plain module that predicts tokens: batches are pairs of token numbers and of those that come next,
    both of shape (rows, length), the module gives scores of shape (rows, length, vocabulary).

    The loss is in bits per token, which is bits per character when the tokens are characters; so is the metric
    ``BitsPerToken`` that it is evaluated by unless ``metrics`` names others."""

    def __init__(self, module: nn.Module, metrics: Metrics | None = None, train_metrics: Metrics | None = None) -> None:
        super().__init__(module, {"BitsPerToken": CrossEntropy(base=2)} if metrics is None else metrics, train_metrics)

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Bits per token. Targets are token numbers, or a probability for each token of the vocabulary."""
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
