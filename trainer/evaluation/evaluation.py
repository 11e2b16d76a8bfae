"""Evaluation and prediction, within a training and standalone."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.bus.types.metrics import MetricNames, flatten
from offloop.bus.types.time import Time
from offloop.bus.types.timestamp import Timestamp
from offloop.trainer.arguments.durations import Interval
from offloop.trainer.arguments.values import to_builtin
from offloop.trainer.data.evaluator import Evaluator
from offloop.trainer.data.metrics import metrics_of, read_metrics
from offloop.trainer.data.spec import DataSpec
from offloop.trainer.device.batch import map_tensors
from offloop.trainer.device.device import autocast
from offloop.trainer.distributed.ranks import Ranks
from offloop.trainer.engine.engine import Engine
from offloop.trainer.engine.state import State

_PHASES = ("start", "batch_start", "before_forward", "after_forward", "batch_end")


class Evaluation:
    """Runs the evaluators of a training when they are due, or at once, and predicts.

    ``subset_num_batches`` limits the batches of evaluators without their own limit; -1 for all. ``in_step`` are ranks
    whose forward passes need one another. Reference: ``composer/trainer/trainer.py``, ``_run_evaluators`` and
    ``_eval_loop``."""

    def __init__(
        self,
        state: State,
        engine: Engine,
        clock: Callable[[], int],
        *,
        subset_num_batches: int = -1,
        in_step: Ranks | None = None,
    ) -> None:
        self._state = state
        self._engine = engine
        self._clock = clock
        self._subset_num_batches = subset_num_batches
        self._in_step = in_step
        self._intervals: list[tuple[Evaluator, Interval]] = []
        self.watched: frozenset[Event] = frozenset()

    def plan(self, default_interval: Time, max_duration: Time) -> None:
        batches = self._state.dataloader_len
        self._intervals = [
            (evaluator, Interval(evaluator.eval_interval or default_interval, max_duration, batches))
            for evaluator in self._state.evaluators
        ]
        self.watched = frozenset(interval.event for _, interval in self._intervals)

    def run_if_due(self, event: Event) -> int:
        """Run the evaluators that are due at this event; returns the nanoseconds that it took."""
        state = self._state
        due = [
            evaluator
            for evaluator, interval in self._intervals
            if interval.is_due(event, state.timestamp, state.previous_timestamp)
        ]
        return self._run(due)

    def run_last(self) -> int:
        """Run the evaluators that have not run since the last batch; returns the nanoseconds that it took."""
        batch = self._state.timestamp.values.batch
        if not batch:
            return 0
        due = [
            evaluator
            for evaluator, interval in self._intervals
            if not interval.is_never and self._state.evaluated_at.get(evaluator.label) != batch
        ]
        return self._run(due)

    def run_now(self) -> int:
        """Run all evaluators, whatever the interval; returns the nanoseconds that it took."""
        if not self._state.evaluators:
            raise ConfigurationError("there is nothing to evaluate on: this training has no eval_dataloader")
        return self._run(self._state.evaluators)

    def run_standalone(self, evaluators: Sequence[Evaluator], subset_num_batches: int = -1) -> None:
        """Evaluate outside of the training, or between two calls of ``fit()``."""
        self._engine.run_event(Event.EVAL_STANDALONE_START)
        with self._evaluating():
            for evaluator in evaluators:
                self._evaluate(evaluator, subset_num_batches)
        self._engine.run_event(Event.EVAL_STANDALONE_END)

    def _run(self, evaluators: Sequence[Evaluator]) -> int:
        if not evaluators:
            return 0
        began = self._clock()
        self._engine.run_event(Event.EVAL_BEFORE_ALL)
        with self._evaluating():
            for evaluator in evaluators:
                self._evaluate(evaluator)
                self._state.evaluated_at[evaluator.label] = self._state.timestamp.values.batch
        self._engine.run_event(Event.EVAL_AFTER_ALL)
        return self._clock() - began

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Set evaluation mode without gradients; afterwards each module returns to its mode."""
        state = self._state
        dataloader = state.dataloader_in_use
        training = [module for module in state.model.modules() if module.training]
        state.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True
            state.set_dataloader(*dataloader)

    def _evaluate(self, evaluator: Evaluator, subset_num_batches: int = -1) -> None:
        state = self._state
        limits = (subset_num_batches, evaluator.subset_num_batches, self._subset_num_batches)
        subset = next((limit for limit in limits if limit >= 0), -1)
        metrics = state.eval_metrics[evaluator.label]
        for metric in metrics.values():
            metric.reset()

        def measure() -> None:
            for metric in metrics.values():
                state.model.update_metric(state.batch, state.outputs, metric)

        self._run_batches("eval", evaluator.spec, evaluator.label, subset, measure)
        if not state.eval_timestamp.values.batch:
            raise ConfigurationError(f"the dataloader of evaluator {evaluator.label!r} gave no batch: it is empty")
        state.eval_metric_values = {**state.eval_metric_values, evaluator.label: read_metrics(metrics)}
        state.total_eval_wct += state.eval_timestamp.values.total_wct
        self._engine.run_event(Event.EVAL_END)

    def predict(
        self, spec: DataSpec, subset_num_batches: int, on_outputs: Callable[[Any, Any], object] | None
    ) -> list[Any]:
        """Return the outputs, with their tensors on the host, or pass them to ``on_outputs``."""
        state, kept = self._state, list[Any]()

        def keep() -> None:
            if on_outputs is None:
                kept.append(map_tensors(state.outputs, torch.Tensor.cpu))
            else:
                on_outputs(state.batch, state.outputs)

        with self._evaluating():
            self._run_batches("predict", spec, "predict", subset_num_batches, keep)
            self._engine.run_event(Event.PREDICT_END)
        return kept

    def _run_batches(self, kind: str, spec: DataSpec, label: str, subset: int, take: Callable[[], None]) -> None:
        state, fire, timestamp = self._state, self._engine.run_event, f"{kind}_timestamp"
        start, batch_start, before_forward, after_forward, batch_end = (Event(f"{kind}_{one}") for one in _PHASES)
        state.set_dataloader(spec, label, subset)
        setattr(state, timestamp, Timestamp())
        batch_began = self._clock() // 1000
        fire(start)
        batches: Iterable[Any] = spec.dataloader if subset < 0 else itertools.islice(spec.dataloader, subset)
        for batch in batches if self._in_step is None else self._keep_in_step(batches, self._in_step):
            state.batch = spec.prepare(batch, state.device)
            state.batch_size = spec.get_num_samples_in_batch(state.batch)
            tokens = spec.get_num_tokens_in_batch(state.batch)
            fire(batch_start)
            fire(before_forward)
            self._forward()
            fire(after_forward)
            take()
            now = self._clock() // 1000
            advanced = getattr(state, timestamp).advance_batch(state.batch_size, tokens, now - batch_began)
            setattr(state, timestamp, advanced)
            batch_began = now
            fire(batch_end)

    def _keep_in_step(self, batches: Iterable[Any], ranks: Ranks) -> Iterator[Any]:
        """Yield the batches. A rank without further ones repeats its last forward pass while another has some."""
        has_batch = False
        for batch in batches:
            has_batch = True
            ranks.agree(0, True)
            yield batch
        if not has_batch:
            label = self._state.dataloader_label
            raise ConfigurationError(
                f"the dataloader {label!r} gave rank {ranks.rank} no batch: give each rank at least one"
            )
        outputs = self._state.outputs
        while ranks.agree(0, False)[1]:
            self._forward()
        self._state.outputs = outputs

    def _forward(self) -> None:
        state = self._state
        with autocast(state.precision, state.device):
            state.outputs = state.model.eval_forward(state.batch)


def add_train_metrics(state: State) -> None:
    if hasattr(state.model, "get_metrics"):
        state.train_metrics = deepcopy(metrics_of(state.model, is_train=True))
    for metric in state.train_metrics.values():
        metric.to(state.device.torch_device)


def add_eval_metrics(state: State, evaluators: Sequence[Evaluator]) -> None:
    for evaluator in evaluators:
        metrics = evaluator.choose_metrics(state.model)
        state.eval_metrics[evaluator.label] = {
            name: metric.to(state.device.torch_device) for name, metric in metrics.items()
        }


def use_evaluators(state: State, evaluators: Sequence[Evaluator]) -> None:
    """Replace the evaluators of the state, and keep the values of labels that both have."""
    labels = {one.label for one in evaluators}
    state.evaluators[:], state.evaluated_at = evaluators, {}
    add_eval_metrics(state, evaluators)
    state.eval_metric_values = {name: one for name, one in state.eval_metric_values.items() if name in labels}


def newest_metrics(state: State) -> dict[str, float]:
    groups: dict[str, Any] = {}
    if state.batch_loss is not None:
        groups["loss/train"] = {"total": to_builtin(state.batch_loss), **to_builtin(state.batch_losses)}
        several = state.train_metric_values
        groups["metrics/train"] = read_metrics(state.train_metrics) if several is None else several
    groups |= {f"metrics/{label}": values for label, values in state.eval_metric_values.items()}
    return _ByName(
        (f"{group}/{name}", value)
        for group, values in groups.items()
        for name, value in flatten(values).items()
        if isinstance(value, float | int)
    )


class _ByName(dict[str, float]):
    """Metrics by full name; ``[]`` takes short names too."""

    def __missing__(self, name: str) -> float:
        found = MetricNames(self).matches(name)
        if len(found) != 1:
            raise KeyError(name)
        return self[found[0]]


@contextlib.contextmanager
def evaluating_on_others(state: State, evaluators: Sequence[Evaluator]) -> Iterator[None]:
    own, values = state.eval_metrics, state.eval_metric_values
    state.eval_metrics = {}
    try:
        add_eval_metrics(state, evaluators)
        yield
    finally:
        state.eval_metrics, state.eval_metric_values = own, values
