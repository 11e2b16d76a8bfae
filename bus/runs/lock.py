"""The lock that marks a run as live. A check takes no lock, so it never blocks a broker."""

import fcntl
import os
import struct
import sys
import time

_PATIENCE_SECONDS = 0.3  # wait for a check to release the lock, on systems where a check must take it
CAN_ASK = sys.platform == "linux"
"""True if the system has open file description locks (``F_OFD_SETLK``), which can be queried."""

_STRUCT_FLOCK = struct.Struct("hhqqi0q")
_WHOLE_FILE = (os.SEEK_SET, 0, 0, 0)


def take(descriptor: int) -> bool:
    """Take the lock until the open, writable file is closed; return whether it succeeded."""
    if CAN_ASK:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _STRUCT_FLOCK.pack(fcntl.F_WRLCK, *_WHOLE_FILE))
        except (BlockingIOError, PermissionError):
            return False
        return True
    # A check may hold it for an instant.
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not _takes_flock(descriptor, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_held(descriptor: int) -> bool:
    """Return whether another open file has the lock of that file, which may have been deleted."""
    if CAN_ASK:
        asked = _STRUCT_FLOCK.pack(fcntl.F_RDLCK, *_WHOLE_FILE)
        kind: int = _STRUCT_FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK
    if not _takes_flock(descriptor, fcntl.LOCK_SH):
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _takes_flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
