"""Where the checkpoints of a run are, in a file in its directory: they may be anywhere."""

import fcntl
import logging
import os
from pathlib import Path

import msgspec

from bus.files import check_owner, open_directory, open_file, replace_file

_log = logging.getLogger("offloop")

FOLDERS_FILE = "checkpoint_folders.json"
_MOST = 20
_MAX_BYTES = 1 << 20


def note_folder(run: Path, folder: Path) -> None:
    """Writes down that checkpoints of a run are in a folder. When it is known already, the file's time changes, so that
    those who look at it notice that there is something new. What cannot be written is named in the log."""
    try:
        directory = open_directory(run)
        try:
            check_owner(directory)
            fcntl.flock(directory, fcntl.LOCK_EX)
            before = [str(one) for one in read_folders(run)]
            new = [*(one for one in before if one != str(folder.absolute())), str(folder.absolute())]
            if new == before:
                os.utime(FOLDERS_FILE, dir_fd=directory)
            else:
                replace_file(directory, FOLDERS_FILE, msgspec.json.encode(new[-_MOST:]).decode())
        finally:
            os.close(directory)
    except (OSError, UnicodeEncodeError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        _log.info("%s cannot be written: %s", run / FOLDERS_FILE, what)


def read_folders(run: Path) -> list[Path]:
    """The folders that were written down, the newest last; empty where none were, or they cannot be read."""
    try:
        descriptor = open_file(run / FOLDERS_FILE)
    except FileNotFoundError:
        return []
    except OSError as error:
        _log.warning("%s is left out: %s", run / FOLDERS_FILE, error.strerror or error)
        return []
    try:
        found = msgspec.json.decode(os.read(descriptor, _MAX_BYTES), type=list[str])
        return [Path(one) for one in found[-_MOST:] if os.path.isabs(one) and "\0" not in one]
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("%s is left out: %s", run / FOLDERS_FILE, error)
        return []
    finally:
        os.close(descriptor)
