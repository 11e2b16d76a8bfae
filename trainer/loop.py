"""The training loop."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bus.errors import ConfigurationError
from bus.event import Event
from trainer.data import DataSpec
from trainer.engine import Engine
from trainer.evaluation import Evaluation
from trainer.progress import Progress
from trainer.state import State

__all__ = ["TrainingLoop"]

# Looked up once: in Python 3.11 finding a member of an enum takes longer than running an event that nobody wants.
FIT_START, FIT_END = Event.FIT_START, Event.FIT_END
ITERATION_START = Event.ITERATION_START
EPOCH_START, EPOCH_END, EPOCH_CHECKPOINT = Event.EPOCH_START, Event.EPOCH_END, Event.EPOCH_CHECKPOINT
BEFORE_DATALOADER, AFTER_DATALOADER = Event.BEFORE_DATALOADER, Event.AFTER_DATALOADER
BATCH_START, BATCH_END, BATCH_CHECKPOINT = Event.BATCH_START, Event.BATCH_END, Event.BATCH_CHECKPOINT
BEFORE_TRAIN_BATCH, AFTER_TRAIN_BATCH = Event.BEFORE_TRAIN_BATCH, Event.AFTER_TRAIN_BATCH
BEFORE_FORWARD, AFTER_FORWARD = Event.BEFORE_FORWARD, Event.AFTER_FORWARD
BEFORE_LOSS, AFTER_LOSS = Event.BEFORE_LOSS, Event.AFTER_LOSS
BEFORE_BACKWARD, AFTER_BACKWARD = Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD


class TrainingLoop:
    """Trains until ``state.max_duration`` is reached. :class:`bus.event.Event` shows the same loop with the events'
    places.

    Reference: ``composer/trainer/trainer.py``, ``_train_loop``.
    """

    def __init__(
        self,
        state: State,
        engine: Engine,
        evaluation: Evaluation,
        progress: Progress,
        data: DataSpec,
        clock: Callable[[], int],
        *,
        microbatch_size: int | None = None,
        step_schedulers_every_batch: bool = False,
    ) -> None:
        self._state = state
        self._engine = engine
        self._evaluation = evaluation
        self._progress = progress
        self._data = data
        self._clock = clock
        self._microbatch_size = microbatch_size
        self._step_schedulers_every_batch = step_schedulers_every_batch
        self._tokens = 0
        self._batch_began = 0

    def run(self) -> None:
        """Runs from ``FIT_START`` to ``FIT_END``, and the evaluation that may follow."""
        state, fire, progress = self._state, self._engine.run_event, self._progress
        state.model.train()
        self._batch_began = self._clock() // 1000
        fire(FIT_START)
        while not state.reached_max_duration():
            if state.timestamp.epoch_in_iteration == 0:
                fire(ITERATION_START)
            fire(EPOCH_START)
            for state.batch in self._fetch_batches():
                fire(AFTER_DATALOADER)
                fire(BATCH_START)
                self._train_batch()
                if self._step_schedulers_every_batch:
                    self._step_schedulers()
                now = self._advance_batch()
                fire(BATCH_END)
                self._evaluate_if_due(BATCH_END)
                fire(BATCH_CHECKPOINT)
                if now >= progress.next_draw:
                    progress.draw()
                if state.reached_max_duration():
                    epoch_is_complete = state.timestamp.batch_in_epoch == state.dataloader_len
                    break
            else:
                epoch_is_complete = True
            if epoch_is_complete:
                if not self._step_schedulers_every_batch:
                    self._step_schedulers()
                self._advance_epoch()
                fire(EPOCH_END)
                self._evaluate_if_due(EPOCH_END)
                fire(EPOCH_CHECKPOINT)
                progress.epoch_end()
        fire(FIT_END)
        self._evaluation.run_last()

    def _fetch_batches(self) -> Iterator[Any]:
        state, data, fire = self._state, self._data, self._engine.run_event
        batches = iter(data.dataloader)
        fire(BEFORE_DATALOADER)
        for batch in batches:
            batch = state.device.batch_to_device(batch)
            state.batch_size = data.get_num_samples_in_batch(batch)
            self._tokens = data.get_num_tokens_in_batch(batch)
            yield batch
            fire(BEFORE_DATALOADER)
        if state.timestamp.batch_in_epoch == 0:
            raise ConfigurationError("train_dataloader gave no batch: it is empty, or can be iterated over only once")

    def _train_batch(self) -> None:
        state, fire = self._state, self._engine.run_event
        fire(BEFORE_TRAIN_BATCH)
        for optimizer in state.optimizers:
            optimizer.zero_grad()
        for metric in state.train_metrics.values():
            metric.reset()
        if self._microbatch_size is None:
            state.batch_loss = self._forward_and_backward(1.0)
        else:
            state.batch_loss = self._train_microbatches(self._microbatch_size)
        fire(AFTER_TRAIN_BATCH)
        for optimizer in state.optimizers:
            optimizer.step()

    def _train_microbatches(self, size: int) -> torch.Tensor:
        state, data = self._state, self._data
        batch, rows = state.batch, state.batch_size or 1
        losses = []
        for state.batch in data.split_batch(batch, size):
            state.batch_size = data.get_num_samples_in_batch(state.batch)
            losses.append(self._forward_and_backward(state.batch_size / rows).detach())
        state.batch, state.batch_size = batch, rows
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def _forward_and_backward(self, share: float) -> torch.Tensor:
        state, fire = self._state, self._engine.run_event
        fire(BEFORE_FORWARD)
        state.outputs = state.model(state.batch)
        fire(AFTER_FORWARD)
        fire(BEFORE_LOSS)
        state.loss = state.model.loss(state.outputs, state.batch)
        fire(AFTER_LOSS)
        if state.train_metrics:
            self._update_train_metrics()
        fire(BEFORE_BACKWARD)
        loss: torch.Tensor = _total(state.loss)
        if share != 1.0:
            loss = loss * share
        loss.backward()  # type: ignore[no-untyped-call]
        fire(AFTER_BACKWARD)
        # Detached only when somebody asks for it: that costs a microsecond, and `state.loss` holds the graph anyway.
        return loss

    def _update_train_metrics(self) -> None:
        state = self._state
        with torch.no_grad():
            outputs = state.model.eval_forward(state.batch, state.outputs)
            for metric in state.train_metrics.values():
                state.model.update_metric(state.batch, outputs, metric)

    def _step_schedulers(self) -> None:
        for scheduler in self._state.schedulers:
            scheduler.step()

    def _advance_batch(self) -> int:
        state, now = self._state, self._clock()
        microseconds = now // 1000
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.advance_batch(
            state.batch_size or 0, self._tokens, microseconds - self._batch_began
        )
        self._batch_began = microseconds
        return now

    def _advance_epoch(self) -> None:
        state = self._state
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_epoch()

    def _evaluate_if_due(self, event: Event) -> None:
        if event in self._evaluation.watched:
            # Training time stands still while the model is evaluated.
            self._batch_began += self._evaluation.run_if_due(event) // 1000


def _total(loss: Any) -> Any:
    if isinstance(loss, torch.Tensor):
        return loss
    if isinstance(loss, dict):
        return loss["total"] if "total" in loss else sum(loss.values())
    return sum(loss)
