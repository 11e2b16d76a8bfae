"""The metrics of a training and of its evaluators: on the device, in the state."""

import contextlib
from collections.abc import Iterator, Sequence
from copy import deepcopy

from trainer.data.evaluator import Evaluator
from trainer.data.models import metrics_of
from trainer.engine.state import State


def add_train_metrics(state: State) -> None:
    """Puts copies of the model's metrics of the training into the state.

    Raises :class:`bus.errors.ConfigurationError` for a model that gives something else than metrics."""
    if hasattr(state.model, "get_metrics"):
        state.train_metrics = deepcopy(metrics_of(state.model, is_train=True))
    for metric in state.train_metrics.values():
        metric.to(state.device.torch_device)


def add_eval_metrics(state: State, evaluators: Sequence[Evaluator]) -> None:
    """Puts copies of the model's metrics into the state for each evaluator.

    Raises :class:`bus.errors.ConfigurationError` for a metric that the model has not."""
    for evaluator in evaluators:
        metrics = evaluator.choose_metrics(state.model)
        state.eval_metrics[evaluator.label] = {
            name: metric.to(state.device.torch_device) for name, metric in metrics.items()
        }


def use_evaluators(state: State, evaluators: Sequence[Evaluator]) -> None:
    """Puts evaluators in the place of those that the state has. What was measured stays for the labels that stay.

    Raises :class:`bus.errors.ConfigurationError` for a metric that the model has not."""
    labels = {one.label for one in evaluators}
    state.evaluators[:] = evaluators
    add_eval_metrics(state, evaluators)
    state.eval_metric_values = {name: one for name, one in state.eval_metric_values.items() if name in labels}


@contextlib.contextmanager
def evaluating_on_others(state: State, evaluators: Sequence[Evaluator]) -> Iterator[None]:
    """Within this, other evaluators than the training's own have metrics in the state. Afterwards what its own have
    said is again what it was, also that of one with the same label.

    Raises :class:`bus.errors.ConfigurationError` for a metric that the model has not."""
    own, values = state.eval_metrics, state.eval_metric_values
    state.eval_metrics = {}
    try:
        add_eval_metrics(state, evaluators)
        yield
    finally:
        state.eval_metrics, state.eval_metric_values = own, values
