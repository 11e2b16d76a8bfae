"""The contents of a run's directory, read while a page is open."""

import os
import stat
import threading
import time
from pathlib import Path
from typing import NamedTuple

from offloop.bus.errors import OffloopError
from offloop.bus.files import NotAFileError, open_directory, open_file, walk_files
from offloop.bus.index.annotations import Annotations, read_annotations
from offloop.bus.index.checkpoints import Checkpoint, find_checkpoints
from offloop.bus.runs.alerts import RunAlert, read_alerts
from offloop.bus.runs.directory import RunInfo, read_run

MOST_FILES = 1000  # limit of listed files of a run

_FRESH_SECONDS = 1.5
_MOST_KNOWN = 200


class RunFile(NamedTuple):
    path: str  # relative to the run's directory
    size: int
    time: float  # time of the last change, in seconds since 1970


class RunFolder(NamedTuple):
    path: Path
    run: RunInfo | None  # None if it cannot be read
    annotations: Annotations
    checkpoints: tuple[Checkpoint, ...]
    alerts: list[RunAlert]
    files: list[RunFile]
    is_cut: bool  # not all files are listed


_known: dict[Path, tuple[float, RunFolder]] = {}
_lock = threading.Lock()


def look_into(path: Path) -> RunFolder:
    """Read a run's directory. Requests within 1.5 seconds share the result."""
    with _lock:
        looked, found = _known.get(path, (0.0, None))
        if found is not None and time.monotonic() < looked + _FRESH_SECONDS:
            return found
    new = _look(path)
    with _lock:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[path] = time.monotonic(), new
    return new


def _look(path: Path) -> RunFolder:
    try:
        run = read_run(path)
    except OffloopError:
        return RunFolder(path, None, Annotations(), (), [], [], False)
    files, is_cut = _files(path)
    return RunFolder(path, run, read_annotations(path), find_checkpoints(run), read_alerts(path), files, is_cut)


def _files(root: Path) -> tuple[list[RunFile], bool]:
    found: list[RunFile] = []
    for path, about in walk_files(root):
        try:
            (name := os.path.relpath(path, root)).encode()
        except UnicodeEncodeError:
            continue
        if stat.S_ISREG(about.st_mode):
            if len(found) >= MOST_FILES:
                return found, True
            found.append(RunFile(name, about.st_size, about.st_mtime))
    return found, False


def open_in(root: Path, path: str) -> int:
    """Open a regular file in a run's directory without following links. Raises OSError."""
    *folders, name = path.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in (*folders, name)):
        raise NotAFileError("it is not the path of a file in the run's directory")
    directory = open_directory(root)
    try:
        for folder in folders:
            inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            os.close(directory)
            directory = inner
        return open_file(name, dir_fd=directory)
    finally:
        os.close(directory)
