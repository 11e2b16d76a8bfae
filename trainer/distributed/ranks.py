"""The processes of one training, and how they agree.

``torchrun`` starts them and sets each one's rank in its environment. Tensors travel by torch's default process group
(NCCL on GPUs, gloo on CPUs). Agreements between the hosts (rows in a batch, whether to stop) use a separate gloo group,
so that no host waits for its GPU."""

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from offloop.bus import errors
from offloop.bus.errors import ConfigurationError, OffloopError, RankError
from offloop.trainer.distributed.launcher import report_uncaught_errors

_REASON = "offloop/reason"
_SIGNS_OF_LOSS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Connection refused")


class Ranks:
    def __init__(self, owns_group: bool, store: Any = None) -> None:
        self.rank: int = dist.get_rank()
        self.world_size: int = dist.get_world_size()
        self._owns_group = owns_group
        self._store = store
        self._hosts: Any = dist.new_group(backend="gloo")
        self._counts = torch.zeros(3, dtype=torch.int64)
        self._counting: Any = None
        self._total = (0, 0)
        self._epoch_end = torch.zeros(0, dtype=torch.int64)
        self._ending_epoch: Any = None
        self._on_sigterm: Any = None
        self.closed: bool = False
        self.failed_at: float | None = None  # when this rank failed, in seconds since 1970

    def begin_count(self, samples: int, tokens: int, batches: int = 1) -> None:
        for index, count in enumerate((samples, tokens, batches)):
            self._counts[index] = count
        with report_lost_ranks(self.rank):
            self._counting = dist.all_reduce(self._counts, group=self._hosts, async_op=True)

    def end_count(self) -> tuple[int, int]:
        """Return samples and tokens of the batch over all ranks; can be called again until the next batch."""
        if self._counting is not None:
            samples, tokens, have_batch = self._end_count()
            if have_batch < self.world_size:
                raise ConfigurationError(_unequal_data(self.world_size - have_batch, self.world_size))
            self._total = (samples, tokens)
        return self._total

    def end_data(self) -> None:
        """Report, instead of :meth:`begin_count`, that this rank's data has ended."""
        self.begin_count(0, 0, 0)
        have_batch = self._end_count()[2]
        if have_batch:
            raise ConfigurationError(_unequal_data(self.world_size - have_batch, self.world_size))

    def _end_count(self) -> list[int]:
        with report_lost_ranks(self.rank):
            self._counting.wait()
        self._counting = None
        counts: list[int] = self._counts.tolist()
        return counts

    def agree(self, microseconds: int, stop: bool, has_commands: bool = False) -> tuple[int, bool, bool]:
        """Agree on the first rank's time, on whether any rank stops, and on whether any has commands."""
        agreed, stops, commands = self.sum(microseconds if self.rank == 0 else 0, stop, has_commands)
        return agreed, stops > 0, commands > 0

    def sum(self, *numbers: int) -> list[int]:
        total = torch.tensor(numbers, dtype=torch.int64)
        with report_lost_ranks(self.rank):
            dist.all_reduce(total, group=self._hosts)
        sums: list[int] = total.tolist()
        return sums

    def sum_batch(self, *numbers: int) -> list[int]:
        """Add up the numbers of a batch. Raises ConfigurationError if another rank has ended the epoch."""
        if self._ending_epoch is not None:
            self._check_epoch_end()
        *sums, have_batch = self.sum(*numbers, 1)
        if have_batch < self.world_size:
            raise ConfigurationError(_unequal_epochs(self.world_size - have_batch, self.world_size))
        return sums

    def end_epoch(self, numbers: int) -> None:
        """Report the end of an epoch, instead of :meth:`sum_batch` of so many numbers, without waiting.

        A rank that has a further batch may wait for this one within it, as in torch's ``join()``."""
        if self._ending_epoch is not None:
            self._check_epoch_end()
        self._epoch_end = torch.zeros(numbers + 1, dtype=torch.int64)
        with report_lost_ranks(self.rank):
            self._ending_epoch = dist.all_reduce(self._epoch_end, group=self._hosts, async_op=True)

    def _check_epoch_end(self) -> None:
        ending, self._ending_epoch = self._ending_epoch, None
        with report_lost_ranks(self.rank):
            ending.wait()
        if have_batch := int(self._epoch_end[-1]):
            raise ConfigurationError(_unequal_epochs(self.world_size - have_batch, self.world_size))

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over the ranks, in place on the device; a GPU's host does not wait."""
        dist.all_reduce(tensor)
        return tensor

    def share(self, value: Any) -> Any:
        """Return the first rank's value on every rank: numbers, text, lists and maps."""
        return json.loads(self.collect(json.dumps(value).encode() if self.rank == 0 else b"")[0])

    def collect(self, content: bytes) -> list[bytes]:
        length = torch.tensor([len(content)])
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with report_lost_ranks(self.rank):
            dist.all_gather(lengths, length, group=self._hosts)
            # All contents may be empty.
            longest = max(1, *(int(one) for one in lengths))
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(content)] = torch.tensor([*content], dtype=torch.uint8)
            parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
            dist.all_gather(parts, padded, group=self._hosts)
        return [bytes(part[: int(one)].tolist()) for part, one in zip(parts, lengths, strict=True)]

    def each(
        self, do: Callable[[], Any], among: Container[int] | None = None, place: Callable[[int], str] = lambda rank: ""
    ) -> list[Any]:
        """Call a function on all ranks, or ``among`` them, and return all results: numbers, text, lists and maps.

        An :class:`OffloopError` on any rank is raised on every rank; ``place`` returns the beginning of its message on
        the others."""
        result = error = None
        if among is None or self.rank in among:
            try:
                result = do()
            except OffloopError as failure:
                error = failure
        report = [result, None if error is None else [type(error).__name__, str(error)]]
        reports = [json.loads(one) for one in self.collect(json.dumps(report).encode())]
        if error is not None:
            raise error
        for rank, (_, failed) in enumerate(reports):
            if failed is not None:
                raise getattr(errors, failed[0], OffloopError)(f"{place(rank)}{failed[1]}")
        return [one for one, _ in reports]

    @property
    def reason(self) -> str | None:
        """Which rank failed first and why, if it reported it."""
        # The store's process may have exited, with torchrun.
        with contextlib.suppress(RuntimeError):
            if self._store is not None and self._store.check([_REASON]):
                return str(self._store.get(_REASON), "utf-8")
        return None

    def leave(self, why: str | None) -> None:
        """Leave the group after an error. Waiting ranks get an error at once, with the reason of the first rank.

        SIGTERM is ignored from here on, until :meth:`restore_sigterm`: ``torchrun`` sends it to every rank as soon as
        one has ended, and would cut off this rank's message."""
        if self.closed:
            return
        if threading.current_thread() is threading.main_thread():
            self._on_sigterm = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.closed = True
        self.failed_at = time.time()
        with contextlib.suppress(RuntimeError):
            if self._store is not None and why is not None:
                self._store.compare_set(_REASON, "", f"rank {self.rank} ended with {why}")
        if dist.is_initialized() and self._owns_group and dist.get_backend() == "gloo":
            self._hosts = self._counting = None
            dist.destroy_process_group()
        else:
            # Tensors on a GPU are still under way; the exit cleans up their group.
            self.disconnect()

    def disconnect(self) -> None:
        """Leave the group of the hosts alone: ranks that wait there get an error at once."""
        self.closed = True
        # A group with references is not closed.
        hosts, self._hosts, self._counting, self._ending_epoch = self._hosts, None, None, None
        if hosts is not None and dist.is_initialized():
            dist.destroy_process_group(hosts)

    def restore_sigterm(self) -> None:
        if self._on_sigterm is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)
            self._on_sigterm = None

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if self._owns_group and dist.is_initialized():
                dist.destroy_process_group()


def make_equal(tensors: Iterable[torch.Tensor]) -> None:
    for work in [dist.broadcast(one.detach(), 0, async_op=True) for one in tensors]:
        work.wait()


_joined: Ranks | None = None
_meeting: tuple[Any, int, int] | None = None  # the store of all ranks, this rank's number, and their count
_groups = 0  # number of process groups so far


def join_ranks(on_gpu: bool) -> Ranks | None:
    """Join the other processes of ``torchrun``, or their existing process group; ``None`` for a single process."""
    global _joined, _meeting, _groups
    if _joined is not None:
        if not _joined.closed:
            return _joined
        _joined.restore_sigterm()
    if dist.is_available() and dist.is_initialized():
        _joined = Ranks(owns_group=False) if dist.get_world_size() > 1 else None
        if _joined is not None:
            report_uncaught_errors(_failed_at)
        return _joined
    if rank_and_world_size()[1] <= 1:
        return None
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    try:
        if _meeting is None:
            _meeting = next(rendezvous("env://"))
        store, rank, world_size = _meeting
        # Entries of an earlier group in the store lead to closed connections.
        store = dist.PrefixStore(f"offloop/{_groups}", store)  # type: ignore[attr-defined]
        _groups += 1
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    except (ValueError, RuntimeError) as error:
        raise RankError(f"the ranks could not connect: {error}") from None
    _joined = Ranks(owns_group=True, store=store)
    # A process that exits without leaving the group is aborted by it.
    atexit.register(_joined.close)
    report_uncaught_errors(_failed_at)
    return _joined


def _failed_at() -> float | None:
    return None if _joined is None else _joined.failed_at


def rank_and_world_size() -> tuple[int, int]:
    """Return rank and world size of torch's process group or of ``torchrun``; (0, 1) for a single process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    size = _in_environment("WORLD_SIZE", 1, range(1, sys.maxsize))
    return _in_environment("RANK", 0, range(size)), size


def local_world_size(by_itself: int) -> int:
    """Return the number of ranks on this host by ``torchrun``; ``by_itself`` without it."""
    return _in_environment("LOCAL_WORLD_SIZE", by_itself, range(1, sys.maxsize))


def _in_environment(name: str, usual: int, allowed: range) -> int:
    text = os.environ.get(name, str(usual))
    if not text.isdecimal() or int(text) not in allowed:
        raise ConfigurationError(
            f"{name} is {text!r} in the environment: start ranks with torchrun, which sets it, or unset RANK, "
            "WORLD_SIZE and LOCAL_WORLD_SIZE",
            name=name,
            value=text,
        )
    return int(text)


@contextlib.contextmanager
def report_lost_ranks(rank: int) -> Iterator[None]:
    """Convert torch's errors about a lost process to a :class:`RankError`."""
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        if isinstance(error, RankError) or not _tells_of_loss(error):
            raise
        reason = None if _joined is None else _joined.reason
        if reason is None:
            reason = f"another rank has ended ({str(error).splitlines()[0][:200]})"
        raise RankError(f"{reason}, so rank {rank} cannot continue; see the output of that rank", rank=rank) from error


def _tells_of_loss(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS_OF_LOSS)


def _unequal_data(without: int, world_size: int) -> str:
    return (
        "train_dataloader gives the ranks different numbers of batches: "
        f"{without} of {world_size} ranks came to the end of their data, the others have a further batch; "
        "give all ranks the same number, for example with offloop.trainer.RankBatchSampler or train_subset_num_batches"
    )


def _unequal_epochs(without: int, world_size: int) -> str:
    return (
        f"the ranks have different numbers of batches: {without} of {world_size} ranks came to the end of their epoch, "
        "the others have a further batch; give all ranks the same number"
    )
