"""A profile of the next batches of a running training, by ``torch.profiler``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offloop.bus.errors import ConfigurationError
from offloop.bus.files import atomic_replace
from offloop.bus.publisher.publisher import Publisher
from offloop.bus.runs.flight import MOST_DUMPS, PROFILES, list_dumps
from offloop.bus.types.commands import Command, parse_profile


class Profile:
    """Profiles one rank for the batches that a command asks for, if it names the rank.

    All ranks make one at the same boundary. Only OffloopError is raised."""

    def __init__(self, command: Command, batch: int, world_size: int) -> None:
        count, self.ranks = parse_profile(command.arguments)
        if max(self.ranks) >= world_size:
            raise ConfigurationError(f"there is no rank {max(self.ranks)}: the training has {world_size}")
        self.id = command.id
        self.until = batch + count  # number of the last batch
        self._batch = batch
        self._path: Path | None = None
        self._profiler: Any = None

    def begin(self, publisher: Publisher, rank: int) -> None:
        from torch.profiler import ProfilerAction, profile

        if torch.autograd.profiler._is_profiler_enabled:
            raise ConfigurationError(f"rank {rank} has an active profiler of its own: end that one first")
        place = publisher.attempt, rank
        if len(list_dumps(publisher.run_dir, PROFILES.format(*place, "{}"))) >= MOST_DUMPS:
            raise ConfigurationError(f"rank {rank} has {MOST_DUMPS} profiles of this attempt, the maximum: remove some")
        self._path = publisher.run_dir / PROFILES.format(*place, self._batch)
        self._profiler = profile(schedule=lambda _: ProfilerAction.RECORD)
        # The marks of batches in the trace then have the training's numbers.
        self._profiler.step_num = self._batch
        _checked(self._profiler.start)

    def batch_end(self) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def write(self) -> str:
        """End the profile, write the trace, and return its path."""
        assert self._path is not None
        self.end()
        with atomic_replace(self._path) as draft:
            _checked(lambda: self._profiler.export_chrome_trace(str(draft)))
        return str(self._path)

    def end(self) -> None:
        if self._profiler is not None:
            _checked(self._profiler.stop)


def _checked(call: Callable[[], object]) -> None:
    # Errors of torch, CUPTI or the disk. Other ranks wait for this one's report.
    try:
        call()
    except Exception as error:
        raise ConfigurationError(f"torch.profiler failed: {error}") from error
