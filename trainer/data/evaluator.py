"""Data to evaluate on."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils.data import DataLoader

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.time import Time, TimeInput
from offloop.trainer.arguments.checks import check_subset
from offloop.trainer.arguments.durations import check_interval
from offloop.trainer.data.metrics import metrics_of
from offloop.trainer.data.spec import DataSpec, as_data_spec

# Consumers distinguish training and evaluation batches by this label.
_OTHER_LABELS = ("", "train", "predict")


class Evaluator:
    """A dataloader to evaluate on, with its own label and metrics.

    Reference: ``composer/core/evaluator.py``.

    Args:
        label: names the evaluator in metrics and events.
        dataloader: the batches.
        metric_names: names of the model's metrics to use, by default all.
        eval_interval: replaces the trainer's.
        subset_num_batches: number of batches to evaluate, replaces the trainer's; -1 for all.

    Raises:
        ConfigurationError: an argument is not allowed."""

    def __init__(
        self,
        label: str,
        dataloader: DataSpec | Iterable[Any],
        metric_names: str | Sequence[str] | None = None,
        eval_interval: TimeInput | None = None,
        *,
        subset_num_batches: int = -1,
    ) -> None:
        if not isinstance(label, str) or label in _OTHER_LABELS:
            raise ConfigurationError(
                f"the label of an evaluator is {label!r}: use a name such as 'eval', but not train or predict"
            )
        self.label = label
        self.spec: DataSpec = as_data_spec(dataloader, f"the dataloader of evaluator {label!r}")
        self.metric_names: list[str] | None = _check_names(metric_names, label)
        self.eval_interval: Time | None = None if eval_interval is None else check_interval(eval_interval)
        self.subset_num_batches: int = check_subset(subset_num_batches, f"subset_num_batches of evaluator {label!r}")

    @property
    def dataloader(self) -> Iterable[Any]:
        return self.spec.dataloader

    def choose_metrics(self, model: Any) -> dict[str, Any]:
        """Return copies of the model's metrics that this evaluator uses, by name."""
        available = metrics_of(model, is_train=False)
        names = available if self.metric_names is None else self.metric_names
        for name in names:
            if name not in available:
                raise ConfigurationError(
                    f"evaluator {self.label!r} names the metric {name!r}, which is unknown to the model: "
                    f"it has {', '.join(available) or 'none'}"
                )
        return {name: copy.deepcopy(available[name]) for name in names}


def as_evaluators(eval_dataloader: Any) -> list[Evaluator]:
    """Return the evaluators in ``eval_dataloader``: none, a dataloader (label ``eval``), one evaluator or several."""
    listed = isinstance(eval_dataloader, list | tuple)
    if eval_dataloader is None or (listed and not eval_dataloader):
        return []
    several = listed and any(isinstance(one, _LOADERS) for one in eval_dataloader)
    given = eval_dataloader if several else [eval_dataloader]
    evaluators = [one if isinstance(one, Evaluator) else Evaluator("eval", one) for one in given]
    labels = [evaluator.label for evaluator in evaluators]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigurationError(
                f"two evaluators have the label {label!r}: give each its own with "
                "offloop.trainer.Evaluator(label, dataloader)"
            )
    return evaluators


def _check_names(names: Any, label: str) -> list[str] | None:
    if names is None:
        return None
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, list | tuple) or not all(isinstance(name, str) for name in listed):
        raise ConfigurationError(
            f"metric_names of evaluator {label!r} is {names!r}: use a list of names, or None for all of the metrics"
        )
    return list(listed)


# A list of anything else is a dataloader itself: a list of batches.
_LOADERS = (Evaluator, DataSpec, DataLoader)
