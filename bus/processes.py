"""Which process is meant, and whether it is still there."""

import os
from pathlib import Path
from typing import Any

__all__ = ["is_running", "started"]


def started(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks since the machine did; ``None`` where that cannot be known.

    With it a number that was given to another process later is told from the process that was meant."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def is_running(pid: Any, began: Any = None) -> bool:
    """Whether the process is there, has not ended without being waited for, and began at ``began`` if that is known."""
    if not isinstance(pid, int) or pid <= 0:
        return False
    fields = _stat(pid)
    if fields is None:
        return not Path("/proc/self/stat").exists() and _answers(pid)
    return fields[0] not in ("Z", "X") and (began is None or int(fields[19]) == began)


def _stat(pid: int) -> list[str] | None:
    """What follows the name in the process's ``stat``, see ``proc_pid_stat(5)``; the name may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
