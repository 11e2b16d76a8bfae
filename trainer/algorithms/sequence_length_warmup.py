"""Training on short sequences first."""

from collections.abc import Mapping
from typing import Any

import torch

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.bus.types.time import TimeUnit
from offloop.trainer.arguments.checks import check_count, check_number
from offloop.trainer.data.spec import count_samples
from offloop.trainer.device.batch import map_tensors
from offloop.trainer.engine.state import Algorithm, AlgorithmLogger, State


class SequenceLengthWarmup(Algorithm):
    """Shortens the sequences at the beginning of the training, from ``min_seq_length`` to ``max_seq_length`` in even
    steps: short ones first are cheaper, and keep large models from diverging.

    Every tensor of the batch, which may be a mapping or a tuple of them, has the shape (rows, length) or (rows, length,
    ...). Shorter sequences stay; after the warmup the others are cut to ``max_seq_length``. Progress counts in batches
    when ``max_duration`` is in epochs and the dataloader has a length, otherwise in the unit of ``max_duration``. The
    length and the number of rows are logged as ``seq_length_warmup/curr_seq_len`` and ``/curr_bs``.

    Args:
        duration: share of the training that the warmup takes, from 0 (none) to 1.
        min_seq_length: length at the beginning.
        max_seq_length: length from the end of the warmup on.
        step_size: by how much the length grows at a time; multiples of 8 suit tensor cores.
        truncate: drop what is too long; otherwise the tokens of the batch, row after row, are laid out anew in rows of
            the present length, and only what does not fill a row is dropped. All tensors then have the same shape.
        preserve_end_of_sequence: put each row's last token, the last one that its ``attention_mask`` counts, at the end
            of what is left of the row, in all tensors. For mappings that are padded on the right, with ``truncate``.

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
        self.duration = check_number(duration, "duration", most=1)
        self.min_seq_length = check_count(min_seq_length, "min_seq_length")
        self.max_seq_length = check_count(max_seq_length, "max_seq_length", min_seq_length)
        self.step_size = check_count(step_size, "step_size")
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
        # Rounded, so that a step which is due at a third of the way is not late by the last digit.
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
    # A copy: what was fetched may be needed again.
    shortened = tensor[:, :length].clone()
    shortened[rows, last.clamp(max=length - 1)] = tensor[rows, last]
    return shortened
