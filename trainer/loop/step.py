"""The training step on one batch: gradients, and the update of the weights."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

from offloop.bus.errors import ConfigurationError
from offloop.bus.printing import say
from offloop.bus.types.event import Event
from offloop.trainer.arguments.values import describe
from offloop.trainer.data.metrics import read_metrics
from offloop.trainer.data.spec import DataSpec
from offloop.trainer.device.device import autocast
from offloop.trainer.distributed.ranks import Ranks
from offloop.trainer.engine.engine import Engine
from offloop.trainer.engine.state import State
from offloop.trainer.loop.forward_pass import ForwardPass

# Looked up once: in Python 3.11 finding a member of an enum takes longer than running an unrequested event.
BEFORE_TRAIN_BATCH, AFTER_TRAIN_BATCH = Event.BEFORE_TRAIN_BATCH, Event.AFTER_TRAIN_BATCH
BEFORE_FORWARD, AFTER_FORWARD = Event.BEFORE_FORWARD, Event.AFTER_FORWARD
BEFORE_LOSS, AFTER_LOSS = Event.BEFORE_LOSS, Event.AFTER_LOSS
BEFORE_BACKWARD, AFTER_BACKWARD = Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD


MicrobatchSize = int | Literal["auto"]


class TrainStep:
    """Trains on ``state.batch``: as a whole, or in microbatches of ``state.device_train_microbatch_size`` samples.

    With the size ``auto`` it starts with whole batches. When the memory runs out it halves the size for good, reports
    that on standard error, and repeats the batch. Reference: ``composer/trainer/trainer.py``, ``_train_batch``."""

    def __init__(
        self,
        state: State,
        engine: Engine,
        data: DataSpec,
        forward_pass: ForwardPass,
        ranks: Ranks | None,
        microbatch_size: MicrobatchSize | None,
    ) -> None:
        self._state = state
        self._engine = engine
        self._data = data
        self._forward = forward_pass.prepare(state)
        self._accumulating = forward_pass.accumulating
        self._ranks = ranks
        self._microbatch_size = microbatch_size
        if isinstance(microbatch_size, int):
            state.device_train_microbatch_size = microbatch_size
        self._rows = 0
        self._losses: dict[str, Any] = {}
        self._on_gpu = state.device.name == "gpu"
        self._fire = engine.run_event
        self._is_mixed = state.precision not in (None, "fp32")
        optimized = {id(one) for optimizer in state.optimizers for one in _parameters_of(optimizer)}
        self._not_optimized = [
            one for one in state.model.parameters() if one.requires_grad and id(one) not in optimized
        ]

    def run(self) -> None:
        """Run from ``BEFORE_TRAIN_BATCH`` to the step of the optimizers."""
        state = self._state
        self._fire(BEFORE_TRAIN_BATCH)
        self._rows = state.batch_size or 0
        self._losses = {}
        loss = self._compute_gradients()
        # A model compiled with CUDA graphs returns the same tensor every time, with another number in it.
        state.batch_loss = loss.detach() if self._on_gpu else loss
        state.batch_losses = self._losses
        if self._ranks is not None:
            self._join_results(self._ranks)
        if state.scaler is None:
            self._fire(AFTER_TRAIN_BATCH)
            for optimizer in state.optimizers:
                optimizer.step()
        else:
            # The scaler refuses an optimizer without any gradient, such as one of frozen weights.
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
        assert isinstance(state.batch_loss, torch.Tensor)  # just computed
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
        if self._microbatch_size is None:
            self._forget_gradients()
            loss = self._forward_and_backward(1.0)
        elif self._microbatch_size == "auto":
            loss = self._compute_in_fitting_microbatches(state.device_train_microbatch_size or rows or 1)
        else:
            loss = self._compute_in_microbatches(self._microbatch_size)
        state.batch, state.batch_size = batch, rows
        return loss

    def _compute_in_fitting_microbatches(self, size: int) -> torch.Tensor:
        state, rows = self._state, self._state.batch_size or 1
        while True:
            try:
                return self._compute_in_microbatches(size)
            except RuntimeError as error:
                if not is_out_of_memory(error) or size <= 1:
                    raise
            # Here, because the error and everything that the failed pass held is released.
            state.device_train_microbatch_size = size = max(1, min(size, rows) // 2)
            state.outputs = state.loss = None
            self._losses = {}
            for optimizer in state.optimizers:
                optimizer.zero_grad()
            if self._on_gpu:
                torch.cuda.empty_cache()
            batch = state.timestamp.values.batch
            say(f"out of memory in batch {batch}: microbatches of {size} samples from now on", err=True)

    def _compute_in_microbatches(self, size: int) -> torch.Tensor:
        state, data = self._state, self._data
        batch = state.batch
        try:
            self._forget_gradients()
            microbatches = data.split_batch(batch, size)
            counts = [data.get_num_samples_in_batch(microbatch) for microbatch in microbatches]
            # Counted again, because algorithms may have removed rows.
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
        if self._is_mixed:
            with autocast(state.precision, state.device):
                self._compute_loss()
        else:
            self._compute_loss()
        if state.train_metrics:
            self._update_train_metrics()
        fire(BEFORE_BACKWARD)
        loss = self._total(state.loss)
        if self._ranks is not None:
            # Gradients are averaged over the ranks; each counts by its rows.
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
        # Detached only on request: that takes a microsecond, and `state.loss` holds the graph anyway.
        return loss

    def _compute_loss(self) -> None:
        state, fire = self._state, self._fire
        fire(BEFORE_FORWARD)
        forward = state.model if self._forward is None else self._forward
        state.outputs = forward(state.batch)
        fire(AFTER_FORWARD)
        fire(BEFORE_LOSS)
        state.loss = state.model.loss(state.outputs, state.batch)
        fire(AFTER_LOSS)

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
            what += " without a gradient for any parameter"
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


def check_microbatch_size(size: Any) -> MicrobatchSize | None:
    if size is None or size == "auto":
        return size  # type: ignore[no-any-return]
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigurationError(
            f"device_train_microbatch_size {size!r} is not allowed: "
            "use a number of samples, 'auto', or None to leave batches whole"
        )
    return size


def is_out_of_memory(error: RuntimeError) -> bool:
    # On the CPU, and within cuBLAS, torch raises a plain RuntimeError.
    text = str(error)
    signs = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(sign in text for sign in signs)
