"""Data parallel training, and checks of the data of the ranks."""

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from offloop.bus.errors import ConfigurationError
from offloop.trainer.data.evaluator import Evaluator
from offloop.trainer.data.spec import DataSpec
from offloop.trainer.device.device import Device
from offloop.trainer.distributed.ranks import Ranks


class DataParallel:
    """Gives every rank the whole model and its part of each batch; torch's ``DistributedDataParallel`` averages the
    gradients during the backward pass."""

    def __init__(self, model: nn.Module, device: Device, find_unused_parameters: bool = False) -> None:
        ids = [device.torch_device.index] if device.name == "gpu" else None
        self._model = DistributedDataParallel(model, device_ids=ids, find_unused_parameters=find_unused_parameters)
        self.forward: Callable[[Any], Any] = self._model

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Keeps gradients on their rank within this: for all microbatches but the last one."""
        return self._model.no_sync()

    def close(self) -> None:
        """Releases the process group; nothing can be computed afterwards."""
        # As long as anything refers to the group, its connections stay open, and the other ranks keep waiting.
        for name in ("reducer", "logger", "process_group"):
            vars(self._model).pop(name, None)


def check_shards(ranks: Ranks | None, data: DataSpec | None, evaluators: Iterable[Evaluator]) -> None:
    """Refuses a dataloader that gives every rank all of the data."""
    if ranks is not None:
        if data is not None:
            _check_shard(data.dataloader, "train_dataloader", ranks.world_size)
        for one in evaluators:
            _check_shard(one.dataloader, f"the dataloader of evaluator {one.label!r}", ranks.world_size)


def _check_shard(dataloader: Iterable[Any], name: str, world_size: int) -> None:
    if not isinstance(dataloader, DataLoader) or isinstance(dataloader.dataset, IterableDataset):
        return  # other ways to make batches are up to the user
    sharding = _sharding_sampler(dataloader)
    by_torch_alone = type(dataloader.batch_sampler) in (BatchSampler, type(None)) and isinstance(
        dataloader.sampler, RandomSampler | SequentialSampler
    )
    if sharding.num_replicas != world_size if sharding is not None else by_torch_alone:
        gives = (
            f"gives each of the {world_size} ranks all of the data"
            if sharding is None
            else f"divides the data among {sharding.num_replicas} ranks, and there are {world_size}"
        )
        raise ConfigurationError(
            f"{name} {gives}: use DataLoader(dataset, batch_sampler=offloop.trainer.RankBatchSampler(dataset, "
            "batch_size, shuffle=True)), or a DistributedSampler"
        )


def check_parts(data: DataSpec, num_batches: int | None, ranks: Ranks) -> None:
    """Checks that the ranks' data makes up one training; all of them have to call it."""
    sampler = _sharding_sampler(data.dataloader)
    part = [num_batches, getattr(sampler, "seed", None), None if sampler is None else sampler.rank]
    parts = [json.loads(one) for one in ranks.collect(json.dumps(part).encode())]
    numbers, seeds, places = zip(*parts, strict=True)
    if len(set(numbers)) > 1:
        raise ConfigurationError(
            f"train_dataloader gives the ranks {_listed(numbers)} batches: give all of them the same number, "
            "for example with offloop.trainer.RankBatchSampler or train_subset_num_batches"
        )
    if len(set(seeds)) > 1:
        raise ConfigurationError(
            f"the samplers of train_dataloader have the seeds {_listed(seeds)} on the ranks, "
            "which would draw different orders: pass all of them the same seed"
        )
    if None not in places and len(set(places)) < len(places):
        raise ConfigurationError(
            f"the samplers of train_dataloader take the parts {_listed(places)} of the data: "
            "leave out their rank, or pass each one its own"
        )


def _sharding_sampler(dataloader: Any) -> Any:
    batch_sampler = getattr(dataloader, "batch_sampler", None)
    samplers = (batch_sampler, getattr(batch_sampler, "sampler", None), getattr(dataloader, "sampler", None))
    return next((one for one in samplers if hasattr(one, "num_replicas") and hasattr(one, "rank")), None)


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(str(value) for value in values)
