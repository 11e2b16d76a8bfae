"""Evaluation within a training."""

from collections.abc import Callable, Sequence

import torch

from bus.errors import ConfigurationError
from bus.event import Event
from bus.time import Time, Timestamp
from trainer.durations import Interval
from trainer.engine import Engine
from trainer.evaluator import Evaluator
from trainer.metrics import read_metrics
from trainer.state import State

__all__ = ["Evaluation"]


class Evaluation:
    """Runs the evaluators of a training when they are due.

    Reference: ``composer/trainer/trainer.py``, ``_run_evaluators`` and ``_eval_loop``.
    """

    def __init__(self, state: State, engine: Engine, clock: Callable[[], int]) -> None:
        self._state = state
        self._engine = engine
        self._clock = clock
        self._intervals: list[tuple[Evaluator, Interval]] = []
        self._last_batch: dict[str, int] = {}
        self.watched: frozenset[Event] = frozenset()
        """The events at which an evaluator may be due."""

    def plan(self, default_interval: Time, max_duration: Time) -> None:
        """Settles when each evaluator is due in a training of that length."""
        batches = self._state.dataloader_len
        self._intervals = [
            (evaluator, Interval(evaluator.eval_interval or default_interval, max_duration, batches))
            for evaluator in self._state.evaluators
        ]
        self.watched = frozenset(interval.event for _, interval in self._intervals)

    def run_if_due(self, event: Event) -> int:
        """Evaluates what is due at this event; returns the nanoseconds that it took."""
        state = self._state
        due = [
            evaluator
            for evaluator, interval in self._intervals
            if interval.is_due(event, state.timestamp, state.previous_timestamp)
        ]
        return self._run(due)

    def run_last(self) -> int:
        """Evaluates whatever has not been evaluated since the last batch; returns the nanoseconds that it took."""
        batch = self._state.timestamp.values[2]
        due = [
            evaluator
            for evaluator, interval in self._intervals
            if not interval.is_never and self._last_batch.get(evaluator.label) != batch
        ]
        return self._run(due)

    def _run(self, evaluators: Sequence[Evaluator]) -> int:
        if not evaluators:
            return 0
        state, fire, began = self._state, self._engine.run_event, self._clock()
        was_training, dataloader = state.model.training, state.dataloader_in_use
        fire(Event.EVAL_BEFORE_ALL)
        state.model.eval()
        with torch.no_grad():
            for evaluator in evaluators:
                self._evaluate(evaluator)
        state.model.train(was_training)
        state.set_dataloader(*dataloader)
        fire(Event.EVAL_AFTER_ALL)
        return self._clock() - began

    def _evaluate(self, evaluator: Evaluator) -> None:
        state, fire, spec = self._state, self._engine.run_event, evaluator.spec
        state.set_dataloader(spec, evaluator.label)
        state.eval_timestamp = Timestamp()
        metrics = state.eval_metrics[evaluator.label]
        for metric in metrics.values():
            metric.reset()
        batch_began = self._clock() // 1000
        fire(Event.EVAL_START)
        for batch in spec.dataloader:
            state.batch = state.device.batch_to_device(batch)
            state.batch_size = spec.get_num_samples_in_batch(state.batch)
            tokens = spec.get_num_tokens_in_batch(state.batch)
            fire(Event.EVAL_BATCH_START)
            fire(Event.EVAL_BEFORE_FORWARD)
            state.outputs = state.model.eval_forward(state.batch)
            fire(Event.EVAL_AFTER_FORWARD)
            for metric in metrics.values():
                state.model.update_metric(state.batch, state.outputs, metric)
            now = self._clock() // 1000
            state.eval_timestamp = state.eval_timestamp.advance_batch(state.batch_size, tokens, now - batch_began)
            batch_began = now
            fire(Event.EVAL_BATCH_END)
        if not state.eval_timestamp.values[2]:
            raise ConfigurationError(f"the dataloader of evaluator {evaluator.label!r} gave no batch: it is empty")
        state.eval_metric_values = {**state.eval_metric_values, evaluator.label: read_metrics(metrics)}
        self._last_batch[evaluator.label] = state.timestamp.values[2]
        fire(Event.EVAL_END)
