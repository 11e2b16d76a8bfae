"""Divides batches among ranks, and checks the data of ranks."""

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from offloop.bus.errors import ConfigurationError
from offloop.trainer.data.evaluator import Evaluator
from offloop.trainer.data.spec import DataSpec
from offloop.trainer.distributed.ranks import Ranks, rank_and_world_size


class RankBatchSampler(Sampler[list[int]]):
    """The batches of a dataset, of which each rank gets its part: ``DataLoader(dataset, batch_sampler=...)``.

    A batch has ``batch_size`` samples over all ranks together, so the batches do not depend on the number of ranks. The
    ranks' parts differ by at most one sample. A last batch with fewer samples than ranks is left out; ``drop_last``
    leaves out every short one. With ``shuffle`` the order of an epoch depends only on ``seed`` (by default the
    trainer's, and 0 without a trainer) and the epoch's number.

    Raises:
        ConfigurationError: a batch cannot be divided among the ranks."""

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        *,
        seed: int | None = None,
        rank: int | None = None,
        num_replicas: int | None = None,
    ) -> None:
        own_rank, world_size = rank_and_world_size()
        self.rank: int = own_rank if rank is None else rank
        self.num_replicas: int = world_size if num_replicas is None else num_replicas
        if batch_size < self.num_replicas:
            raise ConfigurationError(
                f"batch_size {batch_size} is not allowed: it counts the samples of all {self.num_replicas} ranks, "
                f"so use {self.num_replicas} or more"
            )
        self._has_seed = seed is not None
        self.seed: int = seed or 0
        self.shuffle = shuffle
        self.epoch: int = 0
        self._samples = len(dataset)
        self._size = batch_size
        self._smallest = batch_size if drop_last else self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch. The trainer calls it."""
        self.epoch = epoch

    def use_seed(self, seed: int) -> None:
        """Set the seed, if none was given. The trainer calls it."""
        if not self._has_seed:
            self.seed = seed

    def __len__(self) -> int:
        whole, rest = divmod(self._samples, self._size)
        return whole + (rest >= self._smallest)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for number in range(len(self)):
            yield order[number * self._size : (number + 1) * self._size][self.rank :: self.num_replicas].tolist()

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self._samples)
        # Any two pairs of numbers make different generators, also neighbouring seeds and epochs.
        generator = torch.Generator().manual_seed(hash((self.seed, self.epoch)) & (2**63 - 1))
        return torch.randperm(self._samples, generator=generator)


def own_sampler(dataloader: Any) -> RankBatchSampler | None:
    sampler = getattr(dataloader, "batch_sampler", None)
    return sampler if isinstance(sampler, RankBatchSampler) else None


def check_shards(ranks: Ranks | None, data: DataSpec | None, evaluators: Iterable[Evaluator]) -> None:
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
    """Check that the ranks' data makes up one training; all ranks must call it."""
    sampler = _sharding_sampler(data.dataloader)
    part = [num_batches, getattr(sampler, "seed", None), None if sampler is None else sampler.rank]
    numbers, seeds, places = zip(*ranks.each(lambda: part), strict=True)
    if len(set(numbers)) > 1:
        raise ConfigurationError(
            f"train_dataloader gives the ranks {', '.join(map(str, numbers))} batches: give all of them the same "
            "number, for example with offloop.trainer.RankBatchSampler or train_subset_num_batches"
        )
    if len(set(seeds)) > 1:
        raise ConfigurationError(
            f"the samplers of train_dataloader have the seeds {', '.join(map(str, seeds))} on the ranks, "
            "which would draw different orders: pass all of them the same seed"
        )
    if None not in places and len(set(places)) < len(places):
        raise ConfigurationError(
            f"the samplers of train_dataloader take the parts {', '.join(map(str, places))} of the data: "
            "leave out their rank, or pass each one its own"
        )


def _sharding_sampler(dataloader: Any) -> Any:
    batch_sampler = getattr(dataloader, "batch_sampler", None)
    samplers = (batch_sampler, getattr(batch_sampler, "sampler", None), getattr(dataloader, "sampler", None))
    return next((one for one in samplers if hasattr(one, "num_replicas") and hasattr(one, "rank")), None)
