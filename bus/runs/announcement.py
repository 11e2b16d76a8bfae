"""Trainers that are starting: what they leave in a runs directory until their run begins, see ``docs/protocol.md``."""

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from offloop.bus import processes
from offloop.bus.files import open_file, replace_file
from offloop.bus.runs.directory import runs_dir

_PREFIX = ".starting-"
_MAX_BYTES = 4096


class Announcement(NamedTuple):
    """A trainer of this machine whose run has not begun yet."""

    pid: int
    name: str
    """What it trains."""

    def __str__(self) -> str:
        return f"trainer {self.name} (pid {self.pid})"


@contextlib.contextmanager
def announce(name: str, where: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """While this is open, consumers that wait for a run in that runs directory know that this process is about to begin
    one. A directory that does not exist is made, and removed if it stays empty."""
    with contextlib.ExitStack() as taken_back:
        # What cannot be written is reported when the run begins; until then nothing depends on it.
        with contextlib.suppress(OSError):
            _write_announcement(name, runs_dir(where), taken_back)
        yield


def _write_announcement(name: str, root: Path, taken_back: contextlib.ExitStack) -> None:
    if not root.exists():
        root.mkdir()
        taken_back.callback(_remove_if_empty, root)
    _remove_left_behind(root)
    file = f"{_PREFIX}{secrets.token_hex(8)}"
    pid = os.getpid()
    entry = {"name": name, "pid": pid, "started": processes.start_time(pid), "host": socket.gethostname()}
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        taken_back.callback((root / file).unlink, missing_ok=True)
        replace_file(directory, file, json.dumps(entry) + "\n")
    finally:
        os.close(directory)


def list_announcements(where: str | os.PathLike[str] | None = None) -> list[Announcement]:
    """The trainers of this machine that are starting with that runs directory. What those on other machines announce
    is passed over, because it cannot be known whether they still exist."""
    entries = (entry for _, entry in _announcements_of_this_machine(runs_dir(where)) if _is_there(entry))
    return sorted(Announcement(one["pid"], str(one.get("name"))) for one in entries)


def _remove_left_behind(root: Path) -> None:
    for path, entry in _announcements_of_this_machine(root):
        if not _is_there(entry):
            path.unlink(missing_ok=True)


def _announcements_of_this_machine(root: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    here = socket.gethostname()
    for path in root.glob(f"{_PREFIX}*"):
        # Another process may take it back meanwhile.
        with contextlib.suppress(OSError, ValueError, RecursionError), open(open_file(path), "rb") as file:
            entry = json.loads(file.read(_MAX_BYTES))
            if isinstance(entry, dict) and entry.get("host") == here:
                yield path, entry


def _is_there(entry: dict[str, Any]) -> bool:
    return processes.is_running(entry.get("pid"), entry.get("started"))


def _remove_if_empty(root: Path) -> None:
    with contextlib.suppress(OSError):
        root.rmdir()
