"""Counts, splits and transforms batches."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from offloop.bus.errors import ConfigurationError
from offloop.trainer.arguments.checks import check_function
from offloop.trainer.arguments.values import as_int, describe

if TYPE_CHECKING:
    from offloop.trainer.device.device import Device

_SEQUENCES = (list, tuple)


class DataSpec:
    """A dataloader and how its batches are counted, split and transformed.

    A bare dataloader suffices when its batches are tensors, or tuples, lists and mappings of them, whose first
    dimension counts the samples. Reference: ``composer/core/data_spec.py``.

    Args:
        dataloader: can be iterated over several times.
        get_num_samples_in_batch: by default the first dimension of the tensors.
        get_num_tokens_in_batch: by default the elements of a mapping's ``input_ids``, otherwise 0.
        split_batch: called with a batch and a size, returns a list of batches of at most so many samples.
        device_transforms: called with a batch on the device, returns the batch to use.

    Raises:
        ConfigurationError: the dataloader can be iterated over only once, or a function returns a wrong type."""

    def __init__(
        self,
        dataloader: Iterable[Any],
        *,
        get_num_samples_in_batch: Callable[[Any], int] | None = None,
        get_num_tokens_in_batch: Callable[[Any], int] | None = None,
        split_batch: Callable[[Any, int], Sequence[Any]] | None = None,
        device_transforms: Callable[[Any], Any] | None = None,
    ) -> None:
        _check_dataloader(dataloader, "the dataloader of a DataSpec")
        if device_transforms is not None:
            check_function(device_transforms, "device_transforms", "(batch)")
        self.dataloader = dataloader
        # This module's own functions are not checked: they are called for every batch.
        self.get_num_samples_in_batch: Callable[[Any], int] = count_samples
        if get_num_samples_in_batch is not None:
            self.get_num_samples_in_batch = _counting(get_num_samples_in_batch, "get_num_samples_in_batch")
        self.get_num_tokens_in_batch: Callable[[Any], int] = count_tokens
        if get_num_tokens_in_batch is not None:
            self.get_num_tokens_in_batch = _counting(get_num_tokens_in_batch, "get_num_tokens_in_batch")
        self.split_batch: Callable[[Any, int], Sequence[Any]] = split_samples
        if split_batch is not None:
            self.split_batch = _splitting(split_batch)
        self.device_transforms = device_transforms

    def prepare(self, batch: Any, device: "Device") -> Any:
        """Return the batch on the device, transformed."""
        batch = device.batch_to_device(batch)
        return batch if self.device_transforms is None else self.device_transforms(batch)

    @property
    def length(self) -> int | None:
        """Number of batches in one pass; ``None`` if unknown."""
        # A DataLoader over an IterableDataset has a __len__ that raises; so have base classes of datasets.
        try:
            return len(self.dataloader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None


def as_data_spec(dataloader: "DataSpec | Iterable[Any]", name: str) -> DataSpec:
    """Wrap the dataloader, unless it is a ``DataSpec`` already."""
    if isinstance(dataloader, DataSpec):
        return dataloader
    _check_dataloader(dataloader, name)
    return DataSpec(dataloader)


def count_samples(batch: Any) -> int:
    """Return the number of samples: the first dimension of its tensors."""
    # Called for every batch of every training: the common types come first.
    parts: Iterable[Any]
    if isinstance(batch, _SEQUENCES):
        parts = batch
    elif isinstance(batch, torch.Tensor):
        parts = (batch,)
    else:
        parts = batch.values() if isinstance(batch, Mapping) else ()
    count = None
    for part in parts:
        if isinstance(part, torch.Tensor):
            rows = part.shape[0] if part.ndim else 1
        elif isinstance(part, (*_SEQUENCES, Mapping)) and _holds_tensors(part):
            rows = count_samples(part)
        else:
            continue
        if rows != count and count is not None:
            raise _cannot("count the samples of", batch, f"has tensors of {count} and of {rows} rows")
        count = rows
    if count is None:
        raise _cannot("count the samples of", batch, "holds no tensor")
    return count


def count_tokens(batch: Any) -> int:
    """Return the elements of ``input_ids`` in a mapping; 0 for any other batch."""
    if isinstance(batch, _SEQUENCES) or not isinstance(batch, Mapping):
        return 0
    ids = batch.get("input_ids")
    return int(ids.numel()) if isinstance(ids, torch.Tensor) else 0


def split_samples(batch: Any, size: int) -> list[Any]:
    """Split a batch into parts of ``size`` samples; the last one may be smaller."""
    if isinstance(batch, torch.Tensor):
        parts: Sequence[torch.Tensor] = batch.split(size)  # type: ignore[no-untyped-call]
        return list(parts)
    if isinstance(batch, Mapping):
        columns = [split_samples(value, size) for value in batch.values()]
        return [dict(zip(batch, part, strict=True)) for part in zip(*columns, strict=True)]
    if isinstance(batch, list | tuple) and _holds_tensors(batch):
        columns = [split_samples(value, size) for value in batch]
        make = type(batch)._make if hasattr(batch, "_make") else type(batch)
        return [make(part) for part in zip(*columns, strict=True)]
    if isinstance(batch, list):
        return [batch[start : start + size] for start in range(0, len(batch), size)]
    raise _cannot("split", batch, "has no samples")


def _check_dataloader(dataloader: Any, name: str) -> None:
    if not hasattr(dataloader, "__iter__") or hasattr(dataloader, "__next__"):
        raise ConfigurationError(
            f"{name} is a {type(dataloader).__name__}: pass an object that each epoch can iterate over, "
            "such as a torch.utils.data.DataLoader or a list of batches"
        )


def _counting(function: Any, argument: str) -> Callable[[Any], int]:
    check_function(function, argument, "(batch)")

    def count(batch: Any) -> int:
        given = function(batch)
        number = given if type(given) is int else as_int(given)
        if number is None or number < 0:
            raise ConfigurationError(
                f"{argument} returned {describe(given)} for a batch: return a whole number from 0, "
                "such as the length of one of its tensors"
            )
        return number

    return count


def _splitting(function: Any) -> Callable[[Any, int], Sequence[Any]]:
    check_function(function, "split_batch", "(batch, size)")

    def split(batch: Any, size: int) -> Sequence[Any]:
        parts = function(batch, size)
        if not isinstance(parts, list | tuple) or not parts:
            raise ConfigurationError(
                f"split_batch returned {describe(parts)} for a batch: return a list of batches, with one at least"
            )
        return parts

    return split


def _holds_tensors(batch: Mapping[Any, Any] | Sequence[Any]) -> bool:
    parts = batch.values() if isinstance(batch, Mapping) else batch
    return any(isinstance(part, torch.Tensor | Mapping | list | tuple) for part in parts)


def _cannot(do: str, batch: Any, why: str) -> ConfigurationError:
    argument = "split_batch" if do == "split" else "get_num_samples_in_batch"
    return ConfigurationError(
        f"cannot {do} a batch of type {type(batch).__name__}, which {why}: "
        f"wrap the dataloader in offloop.trainer.DataSpec(dataloader, {argument}=...)"
    )
