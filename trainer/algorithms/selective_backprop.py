"""Training on the rows that are hard at the moment."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch.nn import functional

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer.algorithms.common import check_key
from offloop.trainer.arguments.checks import check_count, check_function, check_number
from offloop.trainer.arguments.values import describe
from offloop.trainer.device.batch import BatchKey, batch_set, map_tensors
from offloop.trainer.device.device import autocast
from offloop.trainer.engine.state import Algorithm, AlgorithmLogger, State

_INTERPOLATION = {3: "linear", 4: "bilinear", 5: "trilinear"}

Losses = Callable[[Any, Any], torch.Tensor]


class SelectiveBackprop(Algorithm):
    """Trains on a part of each batch, preferring rows with a high loss, for a part of the training.

    A forward pass without gradients gives each row's loss. Rows are then drawn without replacement, with a weight of
    ``percentile ** (1 / keep - 1)``, the percentile being the row's place among the losses of its batch. The model
    stays in training mode in this pass: dropout drops, and batch norm counts the batch twice. Every tensor of the batch
    with as many rows as the targets loses the other rows; training time counts all that were fetched. Random numbers
    come from torch's generator on the host. With a ``max_duration`` in epochs, ``start`` and ``end`` take effect
    between epochs.

    Args:
        start, end: from which share of the training to which rows are left out.
        keep: share of a batch's rows to keep, above 0 and up to 1; at least one row is kept.
        scale_factor: scale of the inputs' size (the dimensions after the second one) in the pass for the losses, above
            0 and up to 1, which makes it cheaper for models that take any size. Other than 1 it needs inputs of shape
            (rows, channels, length), (rows, channels, height, width) or with one dimension more.
        interrupt: leave every such batch of an epoch whole, to stay close to the whole data; 0 for none.
        input_key, target_key: where inputs and targets are in the batch, see :mod:`offloop.trainer.device.batch`.
        loss_fn: takes outputs and targets and returns one loss for each row, or several whose mean counts, such as
            ``torch.nn.MSELoss(reduction="none")``; by default the cross entropy, classes being the last dimension of
            the outputs, or the second one as torch has it.

    Paper: Jiang et al. 2019, "Accelerating Deep Learning by Focusing on the Biggest Losers", arXiv:1910.00762.
    Reference: ``composer/algorithms/selective_backprop``."""

    # Losses are to be those of the data, before others change it, and what is thrown away need not be changed.
    position: ClassVar = {Event.AFTER_DATALOADER: "first"}

    def __init__(
        self,
        start: float = 0.5,
        end: float = 0.9,
        keep: float = 0.5,
        scale_factor: float = 1.0,
        interrupt: int = 2,
        input_key: BatchKey = 0,
        target_key: BatchKey = 1,
        loss_fn: Losses | None = None,
    ) -> None:
        self.start = check_number(start, "start", most=1)
        self.end = check_number(end, "end", most=1)
        if start >= end:
            raise ConfigurationError(f"start {start} is not before end {end}: use two shares of the training in order")
        self.keep = check_number(keep, "keep", above=0, most=1)
        self.scale_factor = check_number(scale_factor, "scale_factor", above=0, most=1)
        self.interrupt = check_count(interrupt, "interrupt", 0)
        if interrupt == 1:
            raise ConfigurationError("interrupt 1 would leave every batch whole: use 0 for none, or 2 and more")
        self.input_key = check_key("input_key", input_key)
        self.target_key = check_key("target_key", target_key)
        if loss_fn is not None:
            check_function(loss_fn, "loss_fn", "(outputs, targets)")
        self.loss_fn = loss_fn or _cross_entropy

    def match(self, event: Event, state: State) -> bool:
        return event is Event.AFTER_DATALOADER and self._is_due(state)

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        batch = state.batch
        if not isinstance(batch, Mapping | list | tuple):
            raise ConfigurationError(
                f"SelectiveBackprop cannot take rows out of a batch of type {type(batch).__name__}: "
                "use tuples, lists or mappings of tensors"
            )
        losses = self._compute_losses(state)
        count = len(losses)
        chosen = losses.argsort(stable=True)[self._draw_places(count).to(losses.device)]
        state.batch = map_tensors(
            batch, lambda tensor: tensor[chosen] if tensor.ndim and tensor.shape[0] == count else tensor
        )

    def _is_due(self, state: State) -> bool:
        if self.interrupt and (int(state.timestamp.batch_in_epoch) + 1) % self.interrupt == 0:
            return False
        return self.keep < 1 and self.start <= float(state.get_elapsed_duration() or 0) < self.end

    def _compute_losses(self, state: State) -> torch.Tensor:
        batch, targets = state.batch, state.batch_get_item(self.target_key)
        if self.scale_factor < 1:
            batch = batch_set(batch, self.input_key, self._scale(state.batch_get_item(self.input_key)))
        with torch.no_grad(), autocast(state.precision, state.device):
            losses = self.loss_fn(state.model(batch), targets)
        if not isinstance(losses, torch.Tensor) or losses.ndim == 0 or losses.shape[0] != targets.shape[0]:
            raise ConfigurationError(
                f"loss_fn returned {describe(losses)} for {targets.shape[0]} rows: use one that gives a loss for each "
                "row, such as torch.nn.MSELoss(reduction='none')"
            )
        return losses.float().flatten(1).mean(dim=1) if losses.ndim > 1 else losses

    def _scale(self, inputs: Any) -> torch.Tensor:
        if not isinstance(inputs, torch.Tensor) or inputs.ndim not in _INTERPOLATION:
            raise ConfigurationError(
                f"scale_factor {self.scale_factor} cannot be applied to {describe(inputs)}: "
                "they need 3 to 5 dimensions, the first two being rows and channels; use scale_factor=1"
            )
        mode = _INTERPOLATION[inputs.ndim]
        return functional.interpolate(inputs, scale_factor=self.scale_factor, mode=mode)

    def _draw_places(self, rows: int) -> torch.Tensor:
        # Rounded, because 0.29 * 100 is a little less than 29.
        count = max(1, int(round(rows * self.keep, 6)))
        percentiles = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
        # Against the highest one, so that a small share does not leave all weights at zero.
        weights = (percentiles / percentiles[-1]) ** (1 / self.keep - 1)
        return torch.multinomial(weights, count)


def _cross_entropy(outputs: Any, targets: Any) -> torch.Tensor:
    if outputs.ndim > 2 and targets.shape == outputs.shape[:-1]:
        outputs = outputs.movedim(-1, 1)
    return functional.cross_entropy(outputs, targets, reduction="none")
