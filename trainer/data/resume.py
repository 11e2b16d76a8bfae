"""Resuming in the middle of an epoch: the same batches in the same order."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from offloop.trainer.device.seeding import pack_state, random_states, restore_random_states, unpack_state


class DataLoaderResume:
    """Resumes a dataloader in the middle of an epoch, with the same batches in the same order.

    A dataloader shuffles and augments with random numbers. So the generators are set back to the beginning of the
    epoch, the finished batches are fetched again and skipped, and the generators are set to their last states. A
    dataloader with ``state_dict`` and ``load_state_dict``, such as torchdata's ``StatefulDataLoader``, is positioned
    instead.

    Not restored: generators of worker processes that live longer than an epoch, and generators from which dataloader
    and model draw in turn."""

    def __init__(self) -> None:
        self._start: Mapping[str, Any] | None = None
        self._pending: Mapping[str, Any] | None = None
        self._loader_state: Any = None
        self._of: Any = None

    def begin_epoch(self, dataloader: Iterable[Any], epoch: int, done: int) -> int:
        """Prepare an epoch; returns how many batches to fetch and skip before calling :meth:`restored`."""
        _set_epoch(dataloader, epoch)
        if self._of is not None and self._of is not dataloader:
            # The state is of another dataloader: this one is entered at the same place, whatever its order.
            self._start = self._loader_state = None
        self._of = dataloader
        if done and self._pending is None:
            self._pending = _all_states(dataloader)
        if self._loader_state is not None and is_stateful(dataloader):
            dataloader.load_state_dict(self._loader_state)  # type: ignore[attr-defined]
            self._loader_state, skip = None, 0
        else:
            skip = done
        if not done:
            self._start = _all_states(dataloader)
        elif skip and self._start is not None:
            _restore_all(self._start, dataloader)
        return skip

    def suspend(self, dataloader: Iterable[Any]) -> None:
        """Keep the dataloader's position when the training stops in the middle of an epoch."""
        if is_stateful(dataloader):
            self._loader_state = dataloader.state_dict()  # type: ignore[attr-defined]

    def rollback(self) -> None:
        """Return to the beginning of an epoch that stops before its first batch was used."""
        self._pending, self._start, self._loader_state = self._start, None, None

    def restored(self, dataloader: Iterable[Any]) -> None:
        """Set the generators to their states at the stop, if this training is resumed."""
        if self._pending is not None:
            _restore_all(self._pending, dataloader)
            self._pending = None

    def tree(self, dataloader: Iterable[Any], in_epoch: bool) -> dict[str, Any]:
        """Return generators, now and at the start of the epoch, and the dataloader's position, for a checkpoint."""
        loader = self._loader_state
        if loader is None and is_stateful(dataloader):
            loader = dataloader.state_dict()  # type: ignore[attr-defined]
        return {
            "random": self._pending or _all_states(dataloader),
            "epoch_start": self._start if in_epoch else None,
            "loader": loader,
        }

    def load(self, tree: Mapping[str, Any]) -> None:
        self._pending, self._start, self._loader_state = tree["random"], tree["epoch_start"], tree["loader"]


def _set_epoch(dataloader: Any, epoch: int) -> None:
    for one in (dataloader, *_samplers(dataloader)):
        if callable(set_epoch := getattr(one, "set_epoch", None)):
            set_epoch(epoch)


def _samplers(dataloader: Any) -> list[Any]:
    batch_sampler = getattr(dataloader, "batch_sampler", None)
    found = [getattr(dataloader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    return [one for index, one in enumerate(found) if one is not None and one not in found[:index]]


def generators_of(dataloader: Any) -> list[torch.Generator]:
    """Return the dataloader's and its samplers' own generators, each once."""
    found: list[torch.Generator] = []
    for one in (dataloader, *_samplers(dataloader)):
        generator = getattr(one, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
            found.append(generator)
    return found


def generator_states(dataloader: Any) -> list[bytes]:
    return [pack_state(own.get_state()) for own in generators_of(dataloader)]


def restore_generators(dataloader: Any, states: Iterable[bytes]) -> None:
    for generator, state in zip(generators_of(dataloader), states, strict=False):
        generator.set_state(unpack_state(state))


def _all_states(dataloader: Any) -> dict[str, Any]:
    return {**random_states(), "own": generator_states(dataloader)}


def _restore_all(states: Mapping[str, Any], dataloader: Any) -> None:
    restore_random_states(states)
    restore_generators(dataloader, states["own"])


def is_stateful(dataloader: Any) -> bool:
    return callable(getattr(dataloader, "state_dict", None)) and callable(getattr(dataloader, "load_state_dict", None))
