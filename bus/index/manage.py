"""Rename and remove the directories of runs."""

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from offloop.bus.errors import ConfigurationError, RunDirectoryError, RunIsLiveError, RunNotFoundError
from offloop.bus.files import check_owner, open_directory, open_file
from offloop.bus.protocol.frames import check_run_name
from offloop.bus.runs import lock as run_lock
from offloop.bus.runs.directory import LOCK_FILE, RUN_FILE, read_run

_PATIENCE_SECONDS = 2.0  # a broker keeps the lock for a moment after a run has ended


def check_ended(path: Path) -> str | None:
    """Return the id of an ended run. Raises RunIsLiveError for a live one."""
    run = read_run(path)
    if run.away or run.last.status == "running":
        raise _is_live(run.name)
    return run.id


def rename_run(path: Path, name: str) -> Path:
    """Rename the directory of a run and return its new path. Recordings keep the old name."""
    check_run_name(name)
    check_ended(path)
    # The path may be "." or go through links; read_run() has refused a directory that is a link.
    path = path.resolve()
    target = path.with_name(name)
    with _locked(path):
        if os.path.lexists(target):
            raise ConfigurationError(f"{target} exists already: choose another name")
        os.rename(path, target)
    return target


def remove_run(path: Path, run_id: str | None) -> None:
    """Remove the directory of the run with that id, if it has one, not following symbolic links."""
    if check_ended(path) != run_id:
        raise RunNotFoundError(
            f"run {path.name!r} was deleted meanwhile, and another one has its name: look at it before you delete it",
            run=path.name,
        )
    path = path.resolve()
    with _locked(path) as directory:
        # These two keep the run listed and brokers away until nothing else is left.
        last = [RUN_FILE, LOCK_FILE]
        for name in [name for name in os.listdir(directory) if name not in last] + last:
            if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=directory)
            else:
                os.unlink(name, dir_fd=directory)
        os.rmdir(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    with contextlib.ExitStack() as opened:
        try:
            directory = open_directory(path)
            opened.callback(os.close, directory)
            check_owner(directory)
            lock = open_file(LOCK_FILE, os.O_RDWR | os.O_CREAT, dir_fd=directory)
            opened.callback(os.close, lock)
            until = time.monotonic() + _PATIENCE_SECONDS
            while not run_lock.take(lock):
                if time.monotonic() >= until:
                    raise _is_live(path.name)
                time.sleep(0.02)
            yield directory
        except OSError as error:
            which = f" ({os.fsdecode(error.filename)})" if isinstance(error.filename, str | bytes) else ""
            raise RunDirectoryError(f"{path} cannot be changed: {error.strerror or error}{which}", path=path) from None


def _is_live(name: str) -> RunIsLiveError:
    return RunIsLiveError(
        f"run {name!r} is live: wait until it ends, or end it with 'offloop send {name} stop'", run=name
    )
