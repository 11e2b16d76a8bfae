"""How the ranks of a training share the work of a batch."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from bus.errors import ConfigurationError
from trainer.data import DataSpec
from trainer.device import Device

__all__ = ["DataParallel", "Parallel", "check_shards"]


class Parallel(Protocol):
    """What the training step asks of a way to share the work."""

    forward: Callable[[Any], Any]
    """The forward pass."""

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Within this, gradients stay on their rank: for all microbatches but the last one."""


class DataParallel:
    """Every rank has the whole model and trains on its part of each batch; torch's ``DistributedDataParallel`` averages
    the gradients while the backward pass goes on."""

    def __init__(self, model: nn.Module, device: Device, find_unused_parameters: bool = False) -> None:
        ids = [device.torch_device.index] if device.name == "gpu" else None
        self._model = DistributedDataParallel(model, device_ids=ids, find_unused_parameters=find_unused_parameters)
        self.forward: Callable[[Any], Any] = self._model

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Within this, gradients stay on their rank: for all microbatches but the last one."""
        return self._model.no_sync()


def check_shards(data: DataSpec | Iterable[Any] | None, name: str, world_size: int) -> None:
    """Raises :class:`bus.errors.ConfigurationError` for a dataloader that gives every rank all of the data."""
    dataloader = data.dataloader if isinstance(data, DataSpec) else data
    if not isinstance(dataloader, DataLoader) or isinstance(dataloader.dataset, IterableDataset):
        return  # whoever makes batches by other means has to see to it
    samplers = (dataloader.sampler, dataloader.batch_sampler, getattr(dataloader.batch_sampler, "sampler", None))
    kinds = (torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler)
    if not any(hasattr(sampler, "num_replicas") for sampler in samplers) and isinstance(dataloader.sampler, kinds):
        raise ConfigurationError(
            f"{name} gives each of the {world_size} ranks all of the data: use DataLoader(dataset, "
            "batch_sampler=trainer.RankBatchSampler(dataset, batch_size, shuffle=True)), or a DistributedSampler"
        )
