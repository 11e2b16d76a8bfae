"""Ratings of checkpoints: values of a metric, in a file beside them."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from offloop.bus.checkpoints.announced import Score
from offloop.bus.errors import CheckpointError, RunDirectoryError
from offloop.bus.files import atomic_replace
from offloop.bus.run_files import JsonFile
from offloop.bus.types.metrics import Mode, direction_of


class Rating(msgspec.Struct, frozen=True):
    """The value by which a checkpoint is compared."""

    file: str  # name relative to the folder
    batch: int  # number of batches trained
    metric: str  # full name of the metric, such as ``metrics/eval/MulticlassAccuracy``
    value: float | None  # its value at that batch; ``None`` if it is not finite, which is never the best


class RatingsFile(msgspec.Struct):
    """Contents of ``checkpoints.json``."""

    run: str
    best: str | None = None  # name of the best checkpoint
    checkpoints: list[Rating] = []  # kept checkpoints, in the order of saving


RATINGS = JsonFile("checkpoints.json", RatingsFile, 64 << 20)


class Ratings:
    """Compares the checkpoints of one run in a folder by a metric.

    ``mode`` defaults to that of :func:`offloop.bus.types.metrics.direction_of`.

    Raises CheckpointError: the file cannot be read. Without it the best checkpoints would count as the worst, and be
    removed."""

    def __init__(self, folder: Path, run: str, mode: Mode | None) -> None:
        self._folder = folder
        self._run = run
        self._mode = mode
        self._ratings: dict[str, Rating] = {}
        try:
            found = RATINGS.read(folder)
        except RunDirectoryError as error:
            raise CheckpointError(str(error), path=folder / RATINGS.name) from None
        if found is not None and found.run == run:
            self._ratings = {one.file: one for one in found.checkpoints}

    def __iter__(self) -> Iterator[str]:
        return iter(self._ratings)

    def __contains__(self, name: str) -> bool:
        return name in self._ratings

    def forget(self, name: str) -> None:
        """Remove the rating of a checkpoint whose name is reused."""
        self._ratings.pop(name, None)

    def forget_after(self, batch: int) -> None:
        """Remove ratings of later batches than the one from which a training starts or resumes."""
        self._ratings = {name: one for name, one in self._ratings.items() if one.batch <= batch}

    def add(self, name: str, batch: int, metric: str, value: float) -> bool:
        """Rate a checkpoint; return whether its rating is new."""
        rating = Rating(name, batch, metric, value if math.isfinite(value) else None)
        if self._ratings.get(name) == rating:
            return False
        self._ratings[name] = rating
        return True

    def score(self, name: str) -> Score | None:
        rating = self._ratings.get(name)
        if rating is None or rating.value is None:
            return None
        return Score(rating.metric, rating.value, "min" if self._is_less_better(rating.metric) else "max")

    def _is_less_better(self, metric: str) -> bool:
        return (self._mode or direction_of(metric)) == "min"

    def ranking(self) -> list[str]:
        """Return checkpoints by value of the newest metric, best first, of equal ones the first saved."""
        if not self._ratings:
            return []
        metric = next(reversed(self._ratings.values())).metric
        sign = 1.0 if self._is_less_better(metric) else -1.0
        values = {
            one.file: sign * one.value
            for one in self._ratings.values()
            if one.metric == metric and one.value is not None
        }
        return sorted(values, key=values.__getitem__)

    def write(self, is_kept: Callable[[str], bool]) -> None:
        """Replace the file, without checkpoints that are not kept. It has no effect before the first rating."""
        if not self._ratings and not (self._folder / RATINGS.name).exists():
            return
        self._ratings = {name: one for name, one in self._ratings.items() if is_kept(name)}
        best = next(iter(self.ranking()), None)
        content = RatingsFile(self._run, best, list(self._ratings.values()))
        with atomic_replace(self._folder / RATINGS.name) as draft:
            draft.write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
