"""Averages of a model's weights over the training."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from offloop.bus.errors import CheckpointError


class WeightAverage:
    """A running average of a model's weights, kept beside the model; at first it equals them.

    Args:
        model: the model; its parameters and buffers have to stay the same objects.
        with_buffers: also average what the model keeps in buffers as floats, such as the statistics of batch
            normalization. Buffers that are not part of the model's ``state_dict()`` are left out.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, *, with_buffers: bool = False) -> None:
        self._weights = _weights_of(model, with_buffers)
        self._average = {name: weight.clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def update(self, average: Callable[[list[Tensor], list[Tensor], int], Any], count: int) -> None:
        """Takes in the model's weights as they are now. ``average`` is a function such as
        ``torch.optim.swa_utils.get_swa_multi_avg_fn()`` makes; ``count`` is how many weights are in the average so far.
        """
        # Tensors that are spread over ranks and whole ones cannot be averaged in one call.
        for is_spread in (False, True):
            names = [name for name, weight in self._weights.items() if hasattr(weight, "placements") is is_spread]
            if names:
                average([self._average[name] for name in names], [self._weights[name] for name in names], count)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the model's weights and the average; doing it twice leaves every bit as it was."""
        for name, weight in self._weights.items():
            average = self._average[name]
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def state_dict(self) -> dict[str, Tensor]:
        return self._average

    def load_state_dict(self, average: Mapping[str, Tensor]) -> None:
        if average.keys() != self._average.keys():
            odd = ", ".join(sorted(average.keys() ^ self._average.keys())[:3])
            raise CheckpointError(f"the averaged weights are those of another model: the two differ by {odd}")
        for name, value in average.items():
            self._average[name].copy_(value)


def _weights_of(model: nn.Module, with_buffers: bool) -> dict[str, Tensor]:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    weights = dict[str, Tensor](model.named_parameters())
    if with_buffers:
        persistent = model.state_dict().keys()
        weights |= {
            name: buffer for name, buffer in model.named_buffers() if name in persistent and buffer.is_floating_point()
        }
    return weights
