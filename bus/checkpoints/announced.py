"""Locations of a run's checkpoints, in its directory: folders of consumers, and checkpoints of other frameworks.

The latter have their own names and formats, and do not name their run."""

import math
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from offloop.bus.run_files import JsonFile
from offloop.bus.types.metrics import Mode

_MOST_CHECKPOINTS = 1000
_MOST_FOLDERS = 20


class Score(msgspec.Struct, frozen=True):
    """Metric by which a framework compares checkpoints."""

    metric: str  # the framework's name for it, such as ``val_loss``
    value: float
    mode: Mode  # whether the lowest or the highest value is the best


class AnnouncedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint written by a training."""

    path: str  # absolute path of a file or folder
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
FOLDERS = JsonFile("checkpoint_folders.json", list[str])


def best_of(found: Iterable[AnnouncedCheckpoint]) -> AnnouncedCheckpoint | None:
    """Return the best of the checkpoints with the newest one's metric; of equal ones the first."""
    scored = [one for one in found if one.score is not None]
    newest = scored[-1].score if scored else None
    if newest is None:
        return None
    alike = [(one.score.value, one) for one in scored if one.score is not None and one.score.metric == newest.metric]
    return (min if newest.mode == "min" else max)(alike, key=lambda pair: pair[0])[1]


def announce_checkpoint(run: Path, path: str | os.PathLike[str], epoch: int, batch: int, score: Score | None) -> None:
    """Record a checkpoint written by a training, and drop missing ones. A score that is not finite is ignored."""
    absolute = os.path.abspath(path)
    try:
        written = os.stat(absolute).st_mtime_ns
    except OSError:
        written = None
    is_comparable = score is not None and math.isfinite(score.value)
    new = AnnouncedCheckpoint(absolute, epoch, batch, written, score if is_comparable else None)

    def change(known: list[AnnouncedCheckpoint] | None) -> list[AnnouncedCheckpoint]:
        others = (other for other in known or () if other.path != absolute and other.is_there)
        return [*others, new][-_MOST_CHECKPOINTS:]

    ANNOUNCED.try_update(run, change)


def read_announced(run: Path) -> list[AnnouncedCheckpoint]:
    """Return the announced checkpoints, oldest first."""
    return [one for one in ANNOUNCED.find(run) or () if _is_absolute(one.path)]


def note_folder(run: Path, folder: Path) -> None:
    """Record a folder with checkpoints of a run. The file's time changes even for a known folder, as a signal."""
    path = str(folder.absolute())
    FOLDERS.try_update(run, lambda known: [*(other for other in known or () if other != path), path][-_MOST_FOLDERS:])


def read_folders(run: Path) -> list[Path]:
    """Return the recorded folders, oldest first."""
    return [Path(one) for one in FOLDERS.find(run) or () if _is_absolute(one)]


def _is_absolute(path: str) -> bool:
    return os.path.isabs(path) and "\0" not in path
