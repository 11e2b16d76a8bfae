"""The counters of a watched loop, with and without a run."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import msgspec
import torch
import torch.distributed as dist

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.timestamp import Timestamp, TrainingTime
from offloop.trainer.data.resume import is_stateful
from offloop.trainer.data.spec import count_samples, count_tokens

EpochState = Literal["open", "trained", "ended"]
"""Resumption of an epoch: ``open``, with the batches of its dataloader; ``trained``, after its last batch; ``ended``,
with the next epoch."""
_WITHOUT_TOKENS = (tuple, list, torch.Tensor)  # a call less for each batch
_Number = Annotated[int, msgspec.Meta(ge=0)]


class _Saved(msgspec.Struct):
    timestamp: Annotated[list[_Number], msgspec.Meta(min_length=len(TrainingTime._fields))]
    run_name: Annotated[str, msgspec.Meta(min_length=1)] | None
    epoch: EpochState


class LoopPosition:
    """Counts epochs, batches, samples, tokens and training time of a loop, and tracks its place in the epoch.

    Independent of a run: a loop counts the same if offloop could not be attached, or was detached."""

    def __init__(self) -> None:
        self.reached: Timestamp = Timestamp()
        self.samples: int = 0
        self.tokens: int = 0
        """Counts of the current batch."""
        self.fetched: int = 0
        self.trained: int = 0
        """Batches of this pass, and those that the optimizer has stepped for."""
        self.resumed: EpochState = "open"
        self.in_epochs = self.in_body = False
        """True while the loop iterates over epochs of the run, and while it is in one."""
        self._clock = time.monotonic_ns
        self._began = self._clock()
        self._length: int | None = None
        self._is_over = self._is_left = False
        self._pass = 0
        self._handled: BaseException | None = None

    def start(self) -> None:
        self._began = self._clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = self._clock()
        yield
        self._began += self._clock() - began

    def begin_pass(self, dataloader: Any) -> int:
        # A stateful dataloader tracks its end itself.
        self._length = None if is_stateful(dataloader) else length_of(dataloader)
        self.fetched = self.trained = 0
        self._is_over = self._is_left = False
        self._handled = sys.exception()
        self._pass += 1
        return self._pass

    def add(self, batch: Any, fetched: int = 0) -> tuple[int, int]:
        """Count a batch, of which so many came from the dataloader: 1, or 0 if only its forward pass was seen."""
        self.fetched += fetched
        samples, tokens = found = count(batch)
        self.samples += samples
        self.tokens += tokens
        return found

    def is_batch_complete(self, accumulation: int) -> bool:
        return self.fetched % accumulation == 0 or self.fetched == self._length

    def end_pass(self) -> None:
        self._is_over = True

    def stop_pass(self) -> None:
        # Stopped after the last batch, the pass is complete.
        self._is_over = self.fetched > 0 and self.trained == self._length

    def leave_pass(self, number: int) -> None:
        # The iterator of an earlier pass may be garbage-collected at any time.
        self._is_left = self._is_left or number == self._pass

    def end_batch(self, samples: int, tokens: int) -> None:
        """Add a batch that no run counts."""
        now = self._clock()
        # The other ranks cannot be asked: their batches are assumed to have the same size.
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        elapsed = (now - self._began) // 1000
        self.reached = self.reached.advance_batch(samples * ranks, tokens * ranks, elapsed)
        self._began = now

    def end_epoch(self, reached: Timestamp) -> None:
        self.reached = reached
        self.resumed = "open"
        self._is_over = self._is_left = False
        self.fetched = self.trained = 0

    def epoch_state(self, is_stopped: bool) -> EpochState:
        """Return how a training resumes here.

        A loop that left its pass within the epoch has ended the epoch, unless it was stopped or handles an exception
        newer than the pass."""
        handled = sys.exception()
        is_broken_off = is_stopped or (handled is not None and handled is not self._handled)
        if self._is_over or (self._is_left and self.in_body and not is_broken_off):
            return "ended"
        if self.fetched and self.trained == self._length:
            return "trained"
        return "open" if self.fetched else self.resumed

    def load(self, saved: Mapping[str, Any]) -> None:
        """Resume from :meth:`offloop.own_loop.WatchedRun.state_dict`. Raises ConfigurationError for anything else."""
        try:
            state = msgspec.convert(saved, _Saved)
        except msgspec.ValidationError:
            raise ConfigurationError(
                f"load_state_dict() was given {saved!r:.80}: give it what state_dict() returned, or leave it out to "
                "start at epoch 0"
            ) from None
        self.reached, self.resumed = Timestamp.from_values(state.timestamp), state.epoch


def length_of(dataloader: Any) -> int | None:
    try:
        return len(dataloader)
    # A user's object may raise anything.
    except Exception:  # noqa: BLE001
        return None


def count(batch: Any) -> tuple[int, int]:
    try:
        return count_samples(batch), 0 if batch.__class__ in _WITHOUT_TOKENS else count_tokens(batch)
    # A batch may be any object.
    except Exception:  # noqa: BLE001
        return 0, 0
