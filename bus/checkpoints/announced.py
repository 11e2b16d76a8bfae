"""Locations of a run's checkpoints, in a file in its directory: what wrote one announces it there."""

import math
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from offloop.bus.run_files import JsonFile
from offloop.bus.types.metrics import Mode

_MOST_CHECKPOINTS = 1000


class Score(msgspec.Struct, frozen=True):
    """Metric by which checkpoints are compared."""

    metric: str  # such as ``metrics/eval/Accuracy``, or a framework's name, ``val_loss``
    value: float
    mode: Mode  # whether the lowest or the highest value is the best


class AnnouncedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint of a run."""

    path: str  # path of a file or folder; in the file relative to the run's directory if inside
    epoch: int
    batch: int
    written_ns: int | None = None  # its modification time, to detect a replacement; ``None`` if it did not exist yet
    score: Score | None = None

    @property
    def is_there(self) -> bool:
        try:
            found = os.stat(self.path).st_mtime_ns
        except OSError:
            return False
        return self.written_ns in (None, found)


ANNOUNCED = JsonFile("saved_checkpoints.json", list[AnnouncedCheckpoint], 8 << 20)


def best_of(found: Iterable[AnnouncedCheckpoint]) -> AnnouncedCheckpoint | None:
    """Return the best of the checkpoints with the newest one's metric; of equal ones the first."""
    scored = [one for one in found if one.score is not None]
    newest = scored[-1].score if scored else None
    if newest is None:
        return None
    alike = [(one.score.value, one) for one in scored if one.score is not None and one.score.metric == newest.metric]
    return (min if newest.mode == "min" else max)(alike, key=lambda pair: pair[0])[1]


def announce_checkpoint(run: Path, path: str | os.PathLike[str], epoch: int, batch: int, score: Score | None) -> None:
    """Record a checkpoint, and drop missing ones. A score that is not finite is ignored."""
    inside, absolute = os.path.abspath(run), os.path.abspath(path)
    try:
        written = os.stat(absolute).st_mtime_ns
    except OSError:
        written = None
    is_comparable = score is not None and math.isfinite(score.value)
    # So that the run may be moved with them.
    name = os.path.relpath(absolute, inside) if absolute.startswith(f"{inside}/") else absolute
    new = AnnouncedCheckpoint(name, epoch, batch, written, score if is_comparable else None)

    def change(known: list[AnnouncedCheckpoint] | None) -> list[AnnouncedCheckpoint]:
        others = (other for other in known or () if other.path != name and _in(run, other).is_there)
        return [*others, new][-_MOST_CHECKPOINTS:]

    # The training calls this: a process that keeps the folder locked must not delay it for seconds.
    ANNOUNCED.try_update(run, change, patience=0.5)


def read_announced(run: Path) -> list[AnnouncedCheckpoint]:
    """Return the announced checkpoints, oldest first, with absolute paths."""
    return [_in(run, one) for one in ANNOUNCED.find(run) or () if "\0" not in one.path]


def _in(run: Path, one: AnnouncedCheckpoint) -> AnnouncedCheckpoint:
    return msgspec.structs.replace(one, path=os.path.normpath(os.path.join(os.path.abspath(run), one.path)))
