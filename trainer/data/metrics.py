"""Checks of a model before it trains, and the values of its metrics.

torchmetrics is imported only for a model with metrics: it takes more memory and time than everything else."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from offloop.bus.errors import ConfigurationError
from offloop.trainer.arguments.values import describe, to_builtin

if TYPE_CHECKING:
    from torchmetrics import Metric


def check_model(model: nn.Module, evaluated: bool, predicts: bool = False) -> None:
    """Raise ``ConfigurationError`` when the model lacks a method that the trainer will call."""
    needed = ["loss", *(["eval_forward"] if evaluated or predicts else [])]
    needed += ["get_metrics", "update_metric"] if evaluated else []
    missing = [name for name in needed if not callable(getattr(model, name, None))]
    if not isinstance(model, nn.Module) or missing:
        what = f"has no {', '.join(missing)}" if isinstance(model, nn.Module) else "is not a torch.nn.Module"
        raise ConfigurationError(
            f"model {type(model).__name__} {what}: wrap a plain module in offloop.trainer.Classifier(module), "
            "or see offloop.trainer.data.models.Model for the methods to define"
        )


def metrics_of(model: Any, is_train: bool) -> "dict[str, Metric]":
    from torchmetrics import Metric, MetricCollection

    metrics = model.get_metrics(is_train=is_train)
    call = f"get_metrics(is_train={is_train}) of model {type(model).__name__}"
    if not isinstance(metrics, Mapping | MetricCollection):
        raise ConfigurationError(
            f"{call} returned {describe(metrics)}: return a dict of names and torchmetrics.Metric objects, "
            "an empty one for none"
        )
    named = dict(metrics.items())
    for name, metric in named.items():
        if not isinstance(name, str) or not isinstance(metric, Metric):
            raise ConfigurationError(
                f"{call} returned {describe(metric)} under {name!r}: use texts for names, and torchmetrics.Metric "
                "objects for metrics"
            )
    if named and is_train:
        check_model(model, evaluated=True)
    return named


def read_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Compute metrics: numbers, or nested lists for metrics with several. Waits for a GPU."""
    return {name: to_builtin(metric.compute()) for name, metric in metrics.items()}
