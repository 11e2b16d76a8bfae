"""The lock that marks a run as live. Checking it takes no lock, so a check never blocks a broker."""

import fcntl
import os
import struct
import sys
import time

_PATIENCE_SECONDS = 0.3
"""For a lock that a check holds for an instant, where asking about it means taking it."""
CAN_ASK = sys.platform == "linux"
"""Whether the system has locks of open file descriptions (``F_OFD_SETLK``), which can be asked about."""

_STRUCT_FLOCK = struct.Struct("hhqqi0q")
_WHOLE_FILE = (os.SEEK_SET, 0, 0, 0)


def take(descriptor: int) -> bool:
    """Takes the lock for as long as that open file lives, which is to be writable; whether it could be had. Only where
    a lock cannot be checked without taking it is it waited for, for a moment."""
    if CAN_ASK:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _STRUCT_FLOCK.pack(fcntl.F_WRLCK, *_WHOLE_FILE))
        except (BlockingIOError, PermissionError):
            return False
        return True
    # A check holds it for an instant.
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not _takes_flock(descriptor, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_held(descriptor: int) -> bool:
    """Another open file has the lock of that file, which may have been deleted since it was opened."""
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
