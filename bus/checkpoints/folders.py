"""Where the checkpoints of a run are, in a file in its directory: they may be anywhere."""

import fcntl
import logging
import os
from pathlib import Path

import msgspec

from offloop.bus.files import check_owner, open_directory, read_file, replace_file

_log = logging.getLogger("offloop")

FOLDERS_FILE = "checkpoint_folders.json"
_MOST = 20
_MAX_BYTES = 1 << 20


def note_folder(run: Path, folder: Path) -> None:
    """Writes down that checkpoints of a run are in a folder. When it is known already, the file's time changes, so that
    those who look at it notice that there is something new. A file that cannot be read is left as it is, and named in
    the log, as is what cannot be written."""
    try:
        directory = open_directory(run)
        try:
            check_owner(directory)
            fcntl.flock(directory, fcntl.LOCK_EX)
            before = _read(run)
            new = [*(one for one in before if one != str(folder.absolute())), str(folder.absolute())]
            if new == before:
                os.utime(FOLDERS_FILE, dir_fd=directory)
            else:
                replace_file(directory, FOLDERS_FILE, msgspec.json.encode(new[-_MOST:]).decode())
        finally:
            os.close(directory)
    except (OSError, ValueError, RecursionError) as error:
        _log.info("%s cannot be changed: %s", run / FOLDERS_FILE, _why(error))


def read_folders(run: Path) -> list[Path]:
    """The folders that were written down, the newest last; empty where none were, or they cannot be read."""
    try:
        return [Path(one) for one in _read(run)]
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("%s is left out: %s", run / FOLDERS_FILE, _why(error))
        return []


def _read(run: Path) -> list[str]:
    try:
        found = msgspec.json.decode(read_file(run / FOLDERS_FILE, _MAX_BYTES), type=list[str])
    except FileNotFoundError:
        return []
    return [one for one in found[-_MOST:] if os.path.isabs(one) and "\0" not in one]


def _why(error: Exception) -> object:
    return error.strerror if isinstance(error, OSError) else error
