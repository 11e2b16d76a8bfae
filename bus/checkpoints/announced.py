"""Where a run's checkpoints are, in files in its directory: the folders of consumers, and the checkpoints of other
frameworks, which have names and formats of their own and do not say of which run they are."""

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
    """The metric by which a framework compares checkpoints."""

    metric: str
    """As the framework calls it, such as ``val_loss``."""
    value: float
    mode: Mode
    """The best value: the least or the greatest."""


class AnnouncedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint that a training has written."""

    path: str
    """Absolute; of a file or a folder."""
    epoch: int
    batch: int
    written_ns: int | None = None
    """When it was last changed, by which another one in its place is known; ``None`` where it was not there yet."""
    score: Score | None = None

    @property
    def is_there(self) -> bool:
        """It exists, and is not another one of the same name."""
        try:
            found = os.stat(self.path).st_mtime_ns
        except OSError:
            return False
        return self.written_ns in (None, found)


ANNOUNCED = JsonFile("saved_checkpoints.json", list[AnnouncedCheckpoint], 8 << 20)
FOLDERS = JsonFile("checkpoint_folders.json", list[str])


def best_of(found: Iterable[AnnouncedCheckpoint]) -> AnnouncedCheckpoint | None:
    """The best of those that are compared by the same metric as the newest one; of equal ones the first."""
    scored = [one for one in found if one.score is not None]
    newest = scored[-1].score if scored else None
    if newest is None:
        return None
    alike = [(one.score.value, one) for one in scored if one.score is not None and one.score.metric == newest.metric]
    return (min if newest.mode == "min" else max)(alike, key=lambda pair: pair[0])[1]


def announce_checkpoint(run: Path, path: str | os.PathLike[str], epoch: int, batch: int, score: Score | None) -> None:
    """Records that a training has written a checkpoint; those that are gone are left out from then on. A score that is
    not finite is none."""
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
    """The announced checkpoints, the newest last."""
    return [one for one in ANNOUNCED.find(run) or () if _is_absolute(one.path)]


def note_folder(run: Path, folder: Path) -> None:
    """Records that checkpoints of a run are in a folder. The file's time changes also for a known folder, so that those
    who look at it notice that there is something new."""
    path = str(folder.absolute())
    FOLDERS.try_update(run, lambda known: [*(other for other in known or () if other != path), path][-_MOST_FOLDERS:])


def read_folders(run: Path) -> list[Path]:
    """The folders that were recorded, the newest last."""
    return [Path(one) for one in FOLDERS.find(run) or () if _is_absolute(one)]


def _is_absolute(path: str) -> bool:
    return os.path.isabs(path) and "\0" not in path
