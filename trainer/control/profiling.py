"""A profile of the next batches of a running training, by ``torch.profiler``."""

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler

from offloop.bus.errors import ConfigurationError
from offloop.bus.files import atomic_replace
from offloop.bus.publisher.publisher import Publisher
from offloop.bus.runs.flight import MOST_DUMPS, PROFILES, list_dumps
from offloop.bus.types.commands import Command, parse_profile


class Profile:
    """Profiles one rank for the batches that a command asks for, if it names the rank.

    All ranks make one at the same boundary. Only OffloopError is raised."""

    def __init__(self, command: Command, batch: int, world_size: int) -> None:
        count, ranks = parse_profile(command.arguments)
        self.ranks: list[int] = ranks
        if max(ranks) >= world_size:
            raise ConfigurationError(f"there is no rank {max(ranks)}: the training has {world_size}")
        self.id: str = command.id
        self.until: int = batch + count  # number of the last batch
        self._batch = batch
        self._path: Path | None = None
        self._profiler: Any = None
        self._batch_mark: Any = None

    def begin(self, publisher: Publisher, rank: int) -> None:
        """Start to record on this rank."""
        if profiler._is_profiler_enabled:
            raise ConfigurationError(f"rank {rank} has an active profiler of its own: end that one first")
        place = publisher.attempt, rank
        if len(list_dumps(publisher.run_dir, PROFILES.format(*place, "{}"))) >= MOST_DUMPS:
            raise ConfigurationError(f"rank {rank} has {MOST_DUMPS} profiles of this attempt, the maximum: remove some")
        self._path = publisher.run_dir / PROFILES.format(*place, self._batch)
        # Not torch.profiler.profile, whose start imports torch's compiler: the training would wait for seconds.
        self._profiler = profiler.profile(use_kineto=True, use_device="cuda" if torch.cuda.is_available() else None)
        _checked(self._profiler.__enter__)
        self._mark(self._batch)

    def _mark(self, batch: int | None) -> None:
        """Begin the mark of a batch in the trace, after the end of the last one."""
        if self._batch_mark is not None:
            self._batch_mark.__exit__(None, None, None)
        self._batch_mark = None if batch is None else profiler.record_function(f"ProfilerStep#{batch}")
        if self._batch_mark is not None:
            self._batch_mark.__enter__()

    def batch_end(self, batch: int) -> None:
        """Mark the end of a batch in the trace."""
        if self._profiler is not None:
            self._mark(batch)

    def write(self) -> str:
        """End the profile, write the trace, and return its path."""
        assert self._path is not None
        self.end()
        with atomic_replace(self._path) as draft:
            trace = draft.with_suffix("")
            _checked(lambda: self._profiler.export_chrome_trace(str(trace)))
            with open(trace, "rb") as source, gzip.open(draft, "wb", compresslevel=1) as target:
                shutil.copyfileobj(source, target)
        return str(self._path)

    def end(self) -> None:
        """End the recording, without a file."""
        if self._profiler is not None:
            self._mark(None)
            _checked(lambda: self._profiler.__exit__(None, None, None))


def _checked(call: Callable[[], object]) -> None:
    # Errors of torch, CUPTI or the disk. Other ranks wait for this one's report.
    try:
        call()
    except Exception as error:
        raise ConfigurationError(f"torch.profiler failed: {error}") from error
