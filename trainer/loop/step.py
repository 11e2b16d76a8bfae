"""The training step on one batch: gradients, and the update of the weights."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer.arguments.values import describe
from offloop.trainer.data.metrics import read_metrics
from offloop.trainer.data.spec import DataSpec
from offloop.trainer.device.device import autocast_of
from offloop.trainer.distributed.ranks import Ranks
from offloop.trainer.engine.engine import Engine
from offloop.trainer.engine.state import State
from offloop.trainer.loop.microbatches import Microbatching, is_out_of_memory

# Looked up once: in Python 3.11 finding a member of an enum takes longer than running an unrequested event.
BEFORE_TRAIN_BATCH, AFTER_TRAIN_BATCH = Event.BEFORE_TRAIN_BATCH, Event.AFTER_TRAIN_BATCH
BEFORE_FORWARD, AFTER_FORWARD = Event.BEFORE_FORWARD, Event.AFTER_FORWARD
BEFORE_LOSS, AFTER_LOSS = Event.BEFORE_LOSS, Event.AFTER_LOSS
BEFORE_BACKWARD, AFTER_BACKWARD = Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD


class TrainStep:
    """Trains on ``state.batch``. Within ``accumulating()`` gradients stay on their rank: for all microbatches but the
    last one. Reference: ``composer/trainer/trainer.py``, ``_train_batch``."""

    def __init__(
        self,
        state: State,
        engine: Engine,
        data: DataSpec,
        microbatching: Microbatching,
        *,
        forward: Callable[[Any], Any] | None = None,
        ranks: Ranks | None = None,
        accumulating: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._state = state
        self._engine = engine
        self._data = data
        self._microbatching = microbatching
        self._forward = forward
        self._ranks = ranks
        self._accumulating = accumulating
        self._rows = 0
        self._losses: dict[str, Any] = {}
        self._on_gpu = state.device.name == "gpu"
        self._fire = engine.run_event
        self._autocast = autocast_of(state.precision, state.device)
        optimized = {id(one) for optimizer in state.optimizers for one in _parameters_of(optimizer)}
        self._not_optimized = [
            one for one in state.model.parameters() if one.requires_grad and id(one) not in optimized
        ]

    def run(self) -> None:
        """From ``BEFORE_TRAIN_BATCH`` to the step of the optimizers."""
        state = self._state
        self._fire(BEFORE_TRAIN_BATCH)
        self._rows = state.batch_size or 0
        self._losses = {}
        loss = self._compute_gradients()
        # Compiled with CUDA graphs, a model returns one tensor every time, with another number in it.
        state.batch_loss = loss.detach() if self._on_gpu else loss
        state.batch_losses = self._losses
        if self._ranks is not None:
            self._join_results(self._ranks)
        if state.scaler is None:
            self._fire(AFTER_TRAIN_BATCH)
            for optimizer in state.optimizers:
                optimizer.step()
        else:
            # The scaler takes no optimizer without any gradient, such as that of a part which is frozen.
            optimizers = [
                one for one in state.optimizers if any(weight.grad is not None for weight in _parameters_of(one))
            ]
            for optimizer in optimizers:
                state.scaler.unscale_(optimizer)
            self._fire(AFTER_TRAIN_BATCH)
            for optimizer in optimizers:
                state.scaler.step(optimizer)
            if optimizers:
                state.scaler.update()

    def recompute_gradients(self) -> torch.Tensor:
        """Computes the gradients again; see ``State``."""
        if self._state.scaler is not None:
            raise ConfigurationError(
                "the gradients of a batch cannot be computed twice with precision 'amp_fp16': use amp_bf16 or fp32"
            )
        self._fire = self._engine.run_algorithms
        try:
            return self._compute_gradients().detach()
        finally:
            self._fire = self._engine.run_event

    def _join_results(self, ranks: Ranks) -> None:
        state = self._state
        assert state.batch_loss is not None  # just computed
        state.batch_loss = ranks.add(state.batch_loss.detach() / ranks.world_size)
        if state.batch_losses:
            parts = [torch.as_tensor(part, device=state.batch_loss.device) for part in state.batch_losses.values()]
            sums = ranks.add(torch.stack(parts) / ranks.world_size)
            state.batch_losses = dict(zip(state.batch_losses, sums, strict=True))
        if state.train_metrics:
            state.train_metric_values = read_metrics(state.train_metrics)

    def _compute_gradients(self) -> torch.Tensor:
        state = self._state
        batch, rows = state.batch, state.batch_size
        if not self._microbatching.splits:
            self._forget_gradients()
            loss = self._forward_and_backward(1.0)
        else:
            loss = self._microbatching.run(self._compute_in_microbatches)
        state.batch, state.batch_size = batch, rows
        return loss

    def _compute_in_microbatches(self, size: int) -> torch.Tensor:
        state, data = self._state, self._data
        batch = state.batch
        try:
            self._forget_gradients()
            microbatches = data.split_batch(batch, size)
            counts = [data.get_num_samples_in_batch(microbatch) for microbatch in microbatches]
            # Counted anew, because algorithms may have taken rows out of what was fetched.
            rows = sum(counts)
            losses = []
            for index, (state.batch, state.batch_size) in enumerate(zip(microbatches, counts, strict=True), 1):
                is_last = index == len(counts)
                with contextlib.nullcontext() if is_last else self._accumulating():
                    losses.append(self._forward_and_backward(state.batch_size / rows).detach())
        finally:
            state.batch = batch
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def _forget_gradients(self) -> None:
        for optimizer in self._state.optimizers:
            optimizer.zero_grad()
        for parameter in self._not_optimized:
            parameter.grad = None
        for metric in self._state.train_metrics.values():
            metric.reset()

    def _forward_and_backward(self, share: float) -> torch.Tensor:
        state, fire = self._state, self._fire
        if self._autocast is None:
            self._compute_loss()
        else:
            with self._autocast():
                self._compute_loss()
        if state.train_metrics:
            self._update_train_metrics()
        fire(BEFORE_BACKWARD)
        loss = self._total(state.loss)
        if self._ranks is not None:
            # Gradients are averaged over the ranks, each of which counts by its rows.
            share *= self._rows * self._ranks.world_size / self._ranks.end_count()[0]
        if share != 1.0:
            loss = loss * share
        if state.loss is not loss and not isinstance(state.loss, torch.Tensor):
            self._add_parts(state.loss, share)
        try:
            if state.scaler is None:
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                state.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        except RuntimeError:
            if loss.numel() == 1 and loss.requires_grad:
                raise
            raise self._refused(loss) from None
        fire(AFTER_BACKWARD)
        # Detached only on request: that costs a microsecond, and `state.loss` holds the graph anyway.
        return loss

    def _compute_loss(self) -> None:
        state, fire = self._state, self._fire
        fire(BEFORE_FORWARD)
        forward = state.model if self._forward is None else self._forward
        try:
            state.outputs = forward(state.batch)
        except RuntimeError as error:
            self._explain(error)
            raise
        fire(AFTER_FORWARD)
        fire(BEFORE_LOSS)
        state.loss = state.model.loss(state.outputs, state.batch)
        fire(AFTER_LOSS)

    def _explain(self, error: RuntimeError) -> None:
        if is_out_of_memory(error):
            return
        for algorithm in self._state.algorithms:
            explanation = algorithm.explain(error, self._state)
            if explanation is not None:
                raise ConfigurationError(explanation) from error

    def _update_train_metrics(self) -> None:
        state = self._state
        with torch.no_grad():
            outputs = state.model.eval_forward(state.batch, state.outputs)
            for metric in state.train_metrics.values():
                state.model.update_metric(state.batch, outputs, metric)

    def _total(self, loss: Any) -> torch.Tensor:
        if isinstance(loss, torch.Tensor):
            return loss
        if isinstance(loss, Mapping):
            parts = [loss["total"]] if "total" in loss else list(loss.values())
        else:
            parts = list(loss) if isinstance(loss, list | tuple) else []
        total = sum(parts) if all(isinstance(part, torch.Tensor | float | int) for part in parts) else None
        if not isinstance(total, torch.Tensor):
            raise self._refused(loss)
        return total

    def _add_parts(self, loss: Any, share: float) -> None:
        if self._fire != self._engine.run_event:
            return
        for name, part in _parts_of(loss):
            value = part.detach().reshape(()) if isinstance(part, torch.Tensor) else part
            self._losses[name] = self._losses.get(name, 0.0) + value * share

    def _refused(self, loss: Any) -> ConfigurationError:
        what = describe(loss)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            what += " that no parameter has a gradient from"
        return ConfigurationError(
            f"the loss of model {type(self._state.model).__name__} is {what}: return a tensor with one element from "
            "loss(outputs, batch), computed from the outputs without detach(), or a list or dict of such tensors"
        )


def _parts_of(loss: Any) -> Iterator[tuple[str, Any]]:
    named = loss.items() if isinstance(loss, Mapping) else ((f"loss{index}", part) for index, part in enumerate(loss))
    for name, part in named:
        if name != "total" and (part.numel() == 1 if isinstance(part, torch.Tensor) else isinstance(part, float | int)):
            yield str(name), part


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
