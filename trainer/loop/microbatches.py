"""The size of microbatches."""

from collections.abc import Callable
from typing import Any, Literal

import torch

from offloop.bus.errors import ConfigurationError
from offloop.bus.printing import say
from offloop.trainer.data.spec import DataSpec
from offloop.trainer.distributed.sampling import own_sampler
from offloop.trainer.engine.state import State

MicrobatchSize = int | Literal["auto"]


def check_microbatch_size(size: Any, data: DataSpec | None = None) -> MicrobatchSize | None:
    """The number of samples in a microbatch, or ``auto``; ``None`` leaves batches whole."""
    if size is None or size == "auto":
        return size  # type: ignore[no-any-return]
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigurationError(
            f"device_train_microbatch_size {size!r} is not allowed: "
            "use a number of samples, 'auto', or None to leave batches whole"
        )
    batch_size = None if data is None else _rows_of(data.dataloader)
    if batch_size is not None and size > batch_size:
        raise _too_large(size, batch_size)
    return size


def _rows_of(dataloader: Any) -> int | None:
    sampler = own_sampler(dataloader)
    if sampler is not None:
        return sampler.rank_batch_size
    for one in (dataloader, getattr(dataloader, "batch_sampler", None)):
        rows = getattr(one, "batch_size", None)
        if isinstance(rows, int):
            return rows
    return None


class Microbatching:
    """Runs a batch in microbatches of ``state.device_train_microbatch_size`` samples.

    With ``auto`` it begins with whole batches; when the memory runs out it halves the size for good, reports that on
    standard error, and repeats the batch."""

    def __init__(self, state: State, size: MicrobatchSize | None) -> None:
        self._state = state
        self._is_automatic = size == "auto"
        self.splits = size is not None
        """Whether batches are run in microbatches, or may have to be."""
        if isinstance(size, int):
            state.device_train_microbatch_size = size

    def run(self, compute: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The result of ``compute`` for the size of a microbatch that fits. Only the last batch of an epoch may be
        smaller than a microbatch."""
        state = self._state
        rows = state.batch_size or 1
        size = state.device_train_microbatch_size or rows
        if not self._is_automatic:
            if size > rows and not self._is_last_batch():
                raise _too_large(size, rows)
            return compute(size)
        while True:
            try:
                return compute(size)
            except RuntimeError as error:
                if not is_out_of_memory(error) or size <= 1:
                    raise
            # Only here, where the error and with it everything that the failed pass held is gone.
            size = self._halve(min(size, rows))

    def _is_last_batch(self) -> bool:
        state = self._state
        length = state.dataloader_len
        return length is None or length <= state.timestamp.values.batch_in_epoch + 1

    def _halve(self, size: int) -> int:
        state = self._state
        state.device_train_microbatch_size = size = max(1, size // 2)
        state.outputs = state.loss = None
        for optimizer in state.optimizers:
            optimizer.zero_grad()
        if state.device.name == "gpu":
            torch.cuda.empty_cache()
        batch = state.timestamp.values.batch
        say(f"out of memory in batch {batch}: microbatches of {size} samples from now on", err=True)
        return size


def is_out_of_memory(error: RuntimeError) -> bool:
    # On the CPU, and within cuBLAS, torch raises a plain RuntimeError.
    text = str(error)
    signs = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(sign in text for sign in signs)


def _too_large(size: int, rows: int) -> ConfigurationError:
    return ConfigurationError(
        f"device_train_microbatch_size {size} is larger than the batch of {rows} samples: use {rows} or less"
    )
