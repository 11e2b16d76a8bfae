"""The checkpoints that a training of another framework has written, in a file in the run's directory: they have names
and formats of their own, and do not say of which run they are."""

import fcntl
import logging
import math
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from offloop.bus.files import check_owner, open_directory, read_file, replace_file
from offloop.bus.types.metrics import Mode

_log = logging.getLogger("offloop")

ANNOUNCED_FILE = "saved_checkpoints.json"
_MOST = 1000
_MAX_BYTES = 8 << 20


class Score(msgspec.Struct, frozen=True):
    """What a framework compares checkpoints by."""

    metric: str
    """As the framework calls it, such as ``val_loss``."""
    value: float
    mode: Mode
    """Whether the least or the greatest value is the best."""


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
        """Whether it is there, and is not another one of the same name."""
        try:
            found = os.stat(self.path).st_mtime_ns
        except OSError:
            return False
        return self.written_ns in (None, found)


def best_of(found: Iterable[AnnouncedCheckpoint]) -> AnnouncedCheckpoint | None:
    """The best of those that are compared by the same metric as the newest one; of equal ones the first."""
    scored = [one for one in found if one.score is not None]
    newest = scored[-1].score if scored else None
    if newest is None:
        return None
    alike = [(one.score.value, one) for one in scored if one.score is not None and one.score.metric == newest.metric]
    return (min if newest.mode == "min" else max)(alike, key=lambda pair: pair[0])[1]


def announce_checkpoint(run: Path, path: str | os.PathLike[str], epoch: int, batch: int, score: Score | None) -> None:
    """Writes down that a training has written a checkpoint; those that are gone are left out from then on. A score that
    is not finite is none. What cannot be written is named in the log, and a file that cannot be read stays as it is."""
    absolute = os.path.abspath(path)
    try:
        written = os.stat(absolute).st_mtime_ns
    except OSError:
        written = None
    is_comparable = score is not None and math.isfinite(score.value)
    new = AnnouncedCheckpoint(absolute, epoch, batch, written, score if is_comparable else None)
    try:
        directory = open_directory(run)
        try:
            check_owner(directory)
            fcntl.flock(directory, fcntl.LOCK_EX)
            kept = [one for one in _read(run) if one.path != absolute and one.is_there]
            content = msgspec.json.encode([*kept, new][-_MOST:])
            replace_file(directory, ANNOUNCED_FILE, msgspec.json.format(content).decode())
        finally:
            os.close(directory)
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("%s is not written, so %s is not listed: %s", run / ANNOUNCED_FILE, absolute, _reason(error))


def read_announced(run: Path) -> list[AnnouncedCheckpoint]:
    """What was written down, the newest last; empty where nothing was, or it cannot be read."""
    try:
        return _read(run)
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("%s is left out: %s", run / ANNOUNCED_FILE, _reason(error))
        return []


def _read(run: Path) -> list[AnnouncedCheckpoint]:
    try:
        found = msgspec.json.decode(read_file(run / ANNOUNCED_FILE, _MAX_BYTES), type=list[AnnouncedCheckpoint])
    except FileNotFoundError:
        return []
    return [one for one in found[-_MOST:] if os.path.isabs(one.path) and "\0" not in one.path]


def _reason(error: Exception) -> object:
    return error.strerror or error if isinstance(error, OSError) else error
