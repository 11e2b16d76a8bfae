"""Which samples make a batch, and which of them are a rank's."""

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from offloop.bus.errors import ConfigurationError
from offloop.trainer.distributed.ranks import rank_and_world_size


class RankBatchSampler(Sampler[list[int]]):
    """The batches of a dataset, of which each rank gets its part: ``DataLoader(dataset, batch_sampler=...)``.

    A batch has ``batch_size`` samples over all ranks together, so the batches are the same whatever the number of
    ranks. The ranks' parts differ by at most one sample. A last batch with fewer samples than ranks is left out, as is
    every short one with ``drop_last``. With ``shuffle`` the order of an epoch follows from ``seed`` (by default the
    trainer's, and 0 without a trainer) and the epoch's number alone.

    Raises :class:`offloop.bus.errors.ConfigurationError` for batches that cannot be divided among the ranks."""

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
        self.rank = own_rank if rank is None else rank
        self.num_replicas = world_size if num_replicas is None else num_replicas
        if batch_size < self.num_replicas:
            raise ConfigurationError(
                f"batch_size {batch_size} is not allowed: it counts the samples of all {self.num_replicas} ranks, "
                f"so use {self.num_replicas} or more"
            )
        self._has_seed = seed is not None
        self.seed = seed or 0
        self.shuffle = shuffle
        self.epoch = 0
        self._samples = len(dataset)
        self._size = batch_size
        self._smallest = batch_size if drop_last else self.num_replicas

    @property
    def rank_batch_size(self) -> int:
        """The most samples that a batch has on this rank."""
        return -(-self._size // self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch; the trainer does."""
        self.epoch = epoch

    def use_seed(self, seed: int) -> None:
        """Sets the seed, if none was given; the trainer does."""
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
        # Any two numbers make another generator, also neighbouring seeds and epochs.
        generator = torch.Generator().manual_seed(hash((self.seed, self.epoch)) & (2**63 - 1))
        return torch.randperm(self._samples, generator=generator)


def own_sampler(dataloader: Any) -> RankBatchSampler | None:
    """The :class:`RankBatchSampler` of a dataloader that has one."""
    sampler = getattr(dataloader, "batch_sampler", None)
    return sampler if isinstance(sampler, RankBatchSampler) else None
