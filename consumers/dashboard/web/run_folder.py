"""The contents of a run's directory, read while a page is open."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from offloop.bus.errors import OffloopError
from offloop.bus.index.annotations import Annotations, read_annotations
from offloop.bus.index.checkpoints import Checkpoint, find_checkpoints
from offloop.bus.runs.alerts import RunAlert, read_alerts
from offloop.bus.runs.directory import RunInfo, read_run
from offloop.bus.runs.flight import PROFILES, STACKS, list_dumps, read_verdict

_FRESH_SECONDS = 1.5
_MOST_KNOWN = 200


class RunFolder(NamedTuple):
    path: Path
    run: RunInfo | None  # None if it cannot be read
    annotations: Annotations
    checkpoints: tuple[Checkpoint, ...]
    alerts: list[RunAlert]
    files: list[tuple[str, float, str]] = []  # noqa: RUF012  never changed
    """Stacks and profiles: name, time, and verdict of stacks."""


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
        return RunFolder(path, None, Annotations(), (), [])
    return RunFolder(path, run, read_annotations(path), find_checkpoints(run), read_alerts(path), list(_files(path)))


def _files(path: Path) -> Iterator[tuple[str, float, str]]:
    for kind in (STACKS, PROFILES):
        for file in list_dumps(path, kind):
            # It may have just been removed.
            with contextlib.suppress(OSError):
                yield file.name, file.lstat().st_mtime, read_verdict(file) if kind == STACKS else ""
