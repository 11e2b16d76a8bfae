"""Training on a part of each batch: the hardest rows, or the starts of sequences."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch.nn import functional

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.bus.types.time import TimeUnit
from offloop.trainer.algorithms.common import check_key
from offloop.trainer.arguments.checks import check_count, check_function, check_number
from offloop.trainer.arguments.values import describe
from offloop.trainer.data.spec import count_samples
from offloop.trainer.device.batch import BatchKey, batch_set, map_tensors
from offloop.trainer.device.device import autocast
from offloop.trainer.engine.state import Algorithm, AlgorithmLogger, State

_INTERPOLATION = {3: "linear", 4: "bilinear", 5: "trilinear"}

Losses = Callable[[Any, Any], torch.Tensor]


class SelectiveBackprop(Algorithm):
    """Trains on a part of each batch, preferring rows with a high loss, for a part of the training.

    A forward pass without gradients gives each row's loss. Rows are then drawn without replacement, with a weight of
    ``percentile ** (1 / keep - 1)``, where the percentile is the row's rank among the losses of its batch. The model
    stays in training mode in this pass: dropout drops, and batch norm counts the batch twice. Every tensor of the batch
    with as many rows as the targets loses the other rows; training time counts all fetched rows. Random numbers come
    from torch's generator on the host. With a ``max_duration`` in epochs, ``start`` and ``end`` take effect between
    epochs.

    Args:
        start, end: from which to which share of the training rows are left out.
        keep: share of a batch's rows to keep, above 0 and up to 1; at least one row is kept.
        scale_factor: scale of the inputs' size (the dimensions after the second one) in the pass for the losses, above
            0 and up to 1, which saves time for models that take any size. Other values than 1 need inputs of shape
            (rows, channels, length), (rows, channels, height, width) or with one dimension more.
        interrupt: leave every such batch of an epoch whole, to stay close to the whole data; 0 for none.
        input_key, target_key: keys of inputs and targets in the batch, see :mod:`offloop.trainer.device.batch`.
        loss_fn: takes outputs and targets and returns one loss for each row, or several whose mean counts, such as
            ``torch.nn.MSELoss(reduction="none")``. The default is the cross entropy, with the classes in the last
            dimension of the outputs, or in the second one as in torch.

    Paper: Jiang et al. 2019, "Accelerating Deep Learning by Focusing on the Biggest Losers", arXiv:1910.00762.
    Reference: ``composer/algorithms/selective_backprop``."""

    # The losses must be those of the unchanged data, and dropped rows need no changes.
    position: ClassVar[dict[Event, Literal["first", "last"]]] = {Event.AFTER_DATALOADER: "first"}

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
        self.start: float = check_number(start, "start", most=1)
        self.end: float = check_number(end, "end", most=1)
        if start >= end:
            raise ConfigurationError(f"start {start} is not before end {end}: use two shares of the training in order")
        self.keep: float = check_number(keep, "keep", above=0, most=1)
        self.scale_factor: float = check_number(scale_factor, "scale_factor", above=0, most=1)
        self.interrupt: int = check_count(interrupt, "interrupt", 0)
        if interrupt == 1:
            raise ConfigurationError("interrupt 1 would leave every batch whole: use 0 for none, or 2 and more")
        self.input_key: BatchKey = check_key("input_key", input_key)
        self.target_key: BatchKey = check_key("target_key", target_key)
        if loss_fn is not None:
            check_function(loss_fn, "loss_fn", "(outputs, targets)")
        self.loss_fn: Losses = loss_fn or _cross_entropy

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
        # Relative to the highest one, so that a small share does not make all weights zero.
        weights = (percentiles / percentiles[-1]) ** (1 / self.keep - 1)
        return torch.multinomial(weights, count)


def _cross_entropy(outputs: Any, targets: Any) -> torch.Tensor:
    if outputs.ndim > 2 and targets.shape == outputs.shape[:-1]:
        outputs = outputs.movedim(-1, 1)
    return functional.cross_entropy(outputs, targets, reduction="none")


class SequenceLengthWarmup(Algorithm):
    """Shortens the sequences at the start of the training, from ``min_seq_length`` to ``max_seq_length`` in even steps.

    Short sequences first take less time, and keep large models from diverging. Every tensor of the batch, which may be
    a mapping or a tuple of them, has the shape (rows, length) or (rows, length, ...). Shorter sequences stay; after the
    warmup the others are cut to ``max_seq_length``. Progress counts in batches when ``max_duration`` is in epochs and
    the dataloader has a length, otherwise in the unit of ``max_duration``. The length and the number of rows are logged
    as ``seq_length_warmup/curr_seq_len`` and ``/curr_bs``.

    Args:
        duration: share of the training for the warmup, from 0 (none) to 1.
        min_seq_length: length at the start.
        max_seq_length: length from the end of the warmup on.
        step_size: the length grows by multiples of it; multiples of 8 suit tensor cores.
        truncate: drop the rest of a sequence. Otherwise the tokens of the batch, row after row, are laid out in rows of
            the present length, and only the rest that does not fill a row is dropped. All tensors must then have the
            same shape.
        preserve_end_of_sequence: put each row's last token, by its ``attention_mask``, at the end of the shortened row,
            in all tensors. For mappings that are padded on the right, with ``truncate``.

    Paper: Li, Zhang & He 2021, "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT
    Models", arXiv:2108.06084. Reference: ``composer/algorithms/seq_length_warmup``."""

    def __init__(
        self,
        duration: float = 0.3,
        min_seq_length: int = 8,
        max_seq_length: int = 1024,
        step_size: int = 8,
        truncate: bool = True,
        preserve_end_of_sequence: bool = False,
    ) -> None:
        self.duration: float = check_number(duration, "duration", most=1)
        self.min_seq_length: int = check_count(min_seq_length, "min_seq_length")
        self.max_seq_length: int = check_count(max_seq_length, "max_seq_length", min_seq_length)
        self.step_size: int = check_count(step_size, "step_size")
        self.truncate = truncate
        self.preserve_end_of_sequence = preserve_end_of_sequence

    def match(self, event: Event, state: State) -> bool:
        return event is Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        length = self._length(_elapsed(state))
        shape = _check_shapes(state.batch, same=not self.truncate)
        if not self.truncate:
            if length < shape[1]:
                state.batch = map_tensors(state.batch, lambda tensor: _lay_out(tensor, length))
        elif self.preserve_end_of_sequence:
            last = _last_positions(state.batch)
            state.batch = map_tensors(state.batch, lambda tensor: _cut_before(tensor, length, last))
        else:
            state.batch = map_tensors(state.batch, lambda tensor: tensor[:, :length])
        sizes = {"curr_seq_len": length, "curr_bs": count_samples(state.batch)}
        logger.log_metrics({f"seq_length_warmup/{name}": size for name, size in sizes.items()})

    def _length(self, elapsed: float) -> int:
        if elapsed >= self.duration:
            return self.max_seq_length
        # Rounded, so that a step due at a third of the way is not late by the last digit.
        steps = round(elapsed / self.duration * (self.max_seq_length - self.min_seq_length) / self.step_size, 6)
        return min(self.min_seq_length + int(steps) * self.step_size, self.max_seq_length)


def _elapsed(state: State) -> float:
    duration, batches = state.max_duration, state.dataloader_len
    if duration is not None and duration.unit is TimeUnit.EPOCH and batches:
        return int(state.timestamp.batch) / (int(duration) * batches)
    return float(state.get_elapsed_duration() or 0)


def _check_shapes(batch: Any, same: bool) -> torch.Size:
    shapes: list[torch.Size] = []
    map_tensors(batch, lambda tensor: shapes.append(tensor.shape))
    if not shapes or min(map(len, shapes)) < 2:
        raise ConfigurationError(
            f"SequenceLengthWarmup cannot shorten tensors of shapes {[*map(tuple, shapes)]}: it needs a mapping or a "
            "tuple of tensors of shape (rows, length)"
        )
    if same and len(set(shapes)) > 1:
        raise ConfigurationError(
            f"SequenceLengthWarmup cannot lay out tensors of different shapes {[*map(tuple, shapes)]} anew: "
            "use truncate=True"
        )
    return shapes[0]


def _lay_out(tensor: torch.Tensor, length: int) -> torch.Tensor:
    tokens = tensor.flatten(0, 1)
    rows = len(tokens) // length
    return tokens[: rows * length].reshape(rows, length, *tensor.shape[2:])


def _last_positions(batch: Any) -> torch.Tensor:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, torch.Tensor):
        return (mask.long().sum(dim=1) - 1).clamp(min=0)
    raise ConfigurationError(
        f"preserve_end_of_sequence needs the attention mask of each batch, and a batch is a {type(batch).__name__} "
        "without 'attention_mask': use batches that are mappings with one, or leave out preserve_end_of_sequence"
    )


def _cut_before(tensor: torch.Tensor, length: int, last: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(tensor.shape[0], device=tensor.device)
    # A copy: the fetched batch may be needed again.
    shortened = tensor[:, :length].clone()
    shortened[rows, last.clamp(max=length - 1)] = tensor[rows, last]
    return shortened
