"""The checkpoints of a run, with their metrics."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

import msgspec

from offloop.bus.checkpoints.announced import best_of, read_announced
from offloop.bus.files import walk_files
from offloop.bus.runs.directory import RunInfo
from offloop.bus.types.metrics import MetricNames, direction_of
from offloop.bus.types.units import BYTES, number_text

_MOST_LOOKED_AT = 20_000
_PREFERRED = ("max", "min", None)


class Checkpoint(msgspec.Struct, array_like=True, frozen=True):
    path: str  # relative to the run's directory if inside, else absolute
    epoch: int
    batch: int
    time: float | None  # modification time in seconds since 1970; None for a deleted one
    size: int
    is_latest: bool = False
    is_best: bool = False
    metric: str | None = None  # metric for comparing checkpoints
    value: float | None = None
    metrics: dict[str, float] = {}  # metrics of evaluations at its batch

    @property
    def exists(self) -> bool:
        return self.time is not None

    def __str__(self) -> str:
        return self.path


def find_checkpoints(
    run: RunInfo, evaluated: Mapping[int, Mapping[str, float]] | None = None
) -> tuple[Checkpoint, ...]:
    """Return the announced checkpoints of a run, the earliest first. ``evaluated`` has metrics, by batch."""
    announced = read_announced(run.path)
    there = [one for one in announced if one.is_there]
    best, latest = best_of(there), there[-1] if there else None
    inside, left = Path(os.path.abspath(run.path)), _MOST_LOOKED_AT
    found = []
    for one in announced:
        path, time, size = Path(one.path), None, 0
        if one in there:
            # It may just have been removed.
            with contextlib.suppress(OSError):
                files = [about for _, about in islice(walk_files(path), left)] or [os.lstat(path)]
                time, size = max(about.st_mtime_ns for about in files) / 1e9, sum(about.st_size for about in files)
                left = max(left - len(files), 0)
        shown = str(path.relative_to(inside) if path.is_relative_to(inside) else path)
        metric, value = (None, None) if one.score is None else (one.score.metric, one.score.value)
        metrics = dict((evaluated or {}).get(one.batch, {}))
        about = (one.epoch, one.batch, time, size, one is latest, one is best)
        found.append(Checkpoint(shown, *about, metric, value, metrics))
    return tuple(sorted(found, key=lambda one: one.batch))


def checkpoint_rows(checkpoints: Iterable[Checkpoint], metrics: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield path, batch, size, metric, value and marks of each, for people."""
    names = MetricNames(metrics)
    for one in checkpoints:
        metric, value = compared_by(one)
        marks = [word for word, holds in (("best", one.is_best), ("latest", one.is_latest)) if holds]
        size = number_text(one.size, BYTES) if one.exists else "deleted"
        number = "" if value is None else number_text(value)
        batch = "" if one.batch is None else str(one.batch)
        yield one.path, batch, size, names.short(metric or ""), number, ", ".join(marks)


def compared_by(checkpoint: Checkpoint) -> tuple[str | None, float | None]:
    """Return metric and value for comparing a checkpoint; else of an evaluation, preferably a score, then a loss."""
    if checkpoint.metric is not None or not checkpoint.metrics:
        return checkpoint.metric, checkpoint.value
    metric = min(checkpoint.metrics, key=lambda name: (_PREFERRED.index(direction_of(name)), name))
    return metric, checkpoint.metrics[metric]
