"""The checkpoints of a run, with their metrics."""

import contextlib
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from offloop.bus.checkpoints.announced import Score, best_of, read_announced, read_folders
from offloop.bus.checkpoints.image import main_file, read_contents
from offloop.bus.checkpoints.ratings import RATINGS, Rating
from offloop.bus.files import walk_files
from offloop.bus.runs.directory import RunInfo
from offloop.bus.types.metrics import direction_of

SAVE_FOLDER = "save_folder"  # key of run.json for the folder of a trainer's checkpoints

MOST = 1000  # maximum number of checkpoints of a run; the newest are kept

_ENDINGS = (".safetensors", ".ckpt")
_DEEPEST = 3
_MOST_LOOKED_AT = 20_000
_PREFERRED = ("max", "min", None)
_LINK = re.compile(r"(latest|best)\b")
_IN_NAME = re.compile(r"(?:^|[^a-z])(ep|epoch|ba|batch|step)[=_-]?(\d+)")


class Checkpoint(msgspec.Struct, array_like=True, frozen=True):
    path: str  # relative to the run's directory if inside, else absolute
    epoch: int | None
    batch: int | None
    time: float | None  # modification time in seconds since 1970; None for a deleted one
    size: int
    is_latest: bool = False  # true if a link such as latest-rank0.safetensors points to it
    is_best: bool = False
    metric: str | None = None  # metric for comparing checkpoints, see bus.checkpoints.ratings
    value: float | None = None
    metrics: dict[str, float] = {}  # metrics of evaluations at its batch

    @property
    def exists(self) -> bool:
        return self.time is not None

    def __str__(self) -> str:
        return self.path


class _Position(NamedTuple):
    run: str | None
    epoch: int | None
    batch: int | None


class _Found(NamedTuple):
    path: Path
    time_ns: int
    size: int
    files: int = 1


def find_checkpoints(
    run: RunInfo, names: Iterable[str] = (), evaluated: Mapping[int, Mapping[str, float]] | None = None
) -> tuple[Checkpoint, ...]:
    """Return the checkpoints of a run, the earliest first.

    They are those in its directory, in other folders if they name this run or one of its earlier ``names``, and those
    announced by its training. ``evaluated`` has metrics of evaluations, by batch."""
    known_as = {run.name, run.recorded_as, *names}
    since_ns = int(run.attempts[0].started * 1e9)
    inside = Path(os.path.abspath(run.path))
    found: dict[Path, Checkpoint] = {}

    def add(
        path: Path,
        time: tuple[int | None, int | None],
        file: _Found | None,
        rating: Rating | Score | None,
        *,
        is_latest: bool = False,
        is_best: bool = False,
    ) -> None:
        about: tuple[float | None, int] = (None, 0) if file is None else (file.time_ns / 1e9, file.size)
        compared: tuple[str | None, float | None] = (None, None) if rating is None else (rating.metric, rating.value)
        metrics = dict((evaluated or {}).get(-1 if time[1] is None else time[1], {}))
        shown = str(path.relative_to(inside) if path.is_relative_to(inside) else path)
        found[path] = Checkpoint(shown, *time, *about, is_latest, is_best, *compared, metrics)

    saved = (attempt.info.get(SAVE_FOLDER) for attempt in run.attempts)
    named = (Path(one) for one in saved if isinstance(one, str) and os.path.isabs(one) and "\0" not in one)
    for folder in dict.fromkeys(Path(os.path.normpath(one)) for one in (inside, *named, *read_folders(run.path))):
        if folder != inside and folder.is_relative_to(inside):
            continue
        looked = _Look(folder)
        for file in sorted(looked.found, key=lambda one: one.time_ns)[-MOST:]:
            name, epoch, batch = _position(str(file.path), file.time_ns, file.size)
            rating, is_best = looked.rating(file.path, known_as)
            if folder == inside or rating is not None or (file.time_ns >= since_ns and name in known_as):
                time = epoch, batch if rating is None else rating.batch
                is_best = is_best or file.path in looked.best
                add(file.path, time, file, rating, is_latest=file.path in looked.latest, is_best=is_best)
        for path, rating in looked.lost(known_as):
            if path not in found:
                add(path, (None, rating.batch), None, rating)
    announced = read_announced(run.path)
    there = [one for one in announced if one.is_there]
    best, latest = best_of(there), there[-1] if there else None
    left = _MOST_LOOKED_AT
    for one in announced:
        about = None
        if one in there:
            # It may just have been removed.
            with contextlib.suppress(OSError):
                about = _measured(Path(one.path), max(left, 0))
                left -= about.files
        add(Path(one.path), (one.epoch, one.batch), about, one.score, is_latest=one is latest, is_best=one is best)
    ordered = sorted(found.values(), key=lambda one: (one.time or 0.0, one.batch or 0, one.path))
    return tuple(sorted(ordered[-MOST:], key=lambda one: -1 if one.batch is None else one.batch))


def compared_by(checkpoint: Checkpoint) -> tuple[str | None, float | None]:
    """Return metric and value for comparing a checkpoint; else of an evaluation, preferably a score, then a loss."""
    if checkpoint.metric is not None or not checkpoint.metrics:
        return checkpoint.metric, checkpoint.value
    metric = min(checkpoint.metrics, key=lambda name: (_PREFERRED.index(direction_of(name)), name))
    return metric, checkpoint.metrics[metric]


class _Look:
    def __init__(self, folder: Path) -> None:
        self.found: list[_Found] = []
        self.latest: set[Path] = set()
        self.best: set[Path] = set()
        self._ratings: dict[Path, tuple[str, Rating, bool]] = {}
        self._left = _MOST_LOOKED_AT
        self._take(folder, _DEEPEST)

    def rating(self, path: Path, names: set[str]) -> tuple[Rating | None, bool]:
        run, rating, is_best = self._ratings.get(path, ("", None, False))
        return (rating, is_best) if rating is not None and run in names else (None, False)

    def lost(self, names: set[str]) -> Iterator[tuple[Path, Rating]]:
        there = {one.path for one in self.found}
        for path, (run, rating, _) in self._ratings.items():
            if run in names and path not in there:
                yield path, rating

    def _take(self, folder: Path, deep: int) -> None:
        try:
            with os.scandir(folder) as entries:
                listed = [entry for entry, _ in zip(entries, range(self._left), strict=False)]
        except OSError:
            return
        self._left -= len(listed)
        # Another kind of file, such as a FIFO, would never be read to its end.
        is_rated = any(entry.name == RATINGS.name and entry.is_file(follow_symlinks=False) for entry in listed)
        if is_rated and (ratings := RATINGS.find(folder)) is not None:
            for rating in ratings.checkpoints[:MOST]:
                path = Path(os.path.normpath(folder / rating.file))
                if path.is_relative_to(folder):
                    self._ratings[path] = ratings.run, rating, rating.file == ratings.best
        for entry in listed:
            # Skips deleted files, and names that are not UTF-8, which cannot be stored.
            with contextlib.suppress(OSError, UnicodeEncodeError):
                entry.name.encode()
                self._take_entry(folder, entry, deep)

    def _take_entry(self, folder: Path, entry: "os.DirEntry[str]", deep: int) -> None:
        path = folder / entry.name
        if entry.is_symlink():
            link = _LINK.match(entry.name)
            if link is not None:
                target = Path(os.path.normpath(folder / os.readlink(path)))
                (self.latest if link[1] == "latest" else self.best).add(target)
        elif entry.is_dir():
            if main_file(path).is_file():
                self.found.append(_measured(path, _MOST_LOOKED_AT))
            elif deep > 1 and not entry.name.startswith("."):
                self._take(path, deep - 1)
        elif entry.name.endswith(_ENDINGS) and entry.is_file(follow_symlinks=False):
            about = entry.stat(follow_symlinks=False)
            self.found.append(_Found(path, about.st_mtime_ns, about.st_size))


def _measured(path: Path, most: int) -> _Found:
    files = [about for _, about in islice(walk_files(path), most)] or [os.lstat(path)]
    times, sizes = [about.st_mtime_ns for about in files], [about.st_size for about in files]
    return _Found(path, max(times), sum(sizes), len(files))


@functools.lru_cache(maxsize=4096)
def _position(path: str, time_ns: int, size: int) -> _Position:
    # The contents come first, then the name.
    contents = None if path.endswith(".ckpt") else read_contents(path)
    tree = (contents or {}).get("tree")
    if isinstance(tree, dict):
        values, run = tree.get("timestamp"), tree.get("run")
        name = run.get("name") if isinstance(run, dict) else None
        if isinstance(values, list) and len(values) > 2 and all(type(one) is int for one in values[:3]):
            return _Position(name if isinstance(name, str) else None, values[1], values[2])
    counted: dict[str, Any] = {kind[0]: int(number[:18]) for kind, number in _IN_NAME.findall(os.path.basename(path))}
    return _Position(None, counted.get("e"), counted.get("b", counted.get("s")))
