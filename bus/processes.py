"""Processes of this machine, and the start of our own."""

import contextlib
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any


def current_folder() -> str:
    """Return the working directory, even if it was removed and the system still has its name."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            return os.readlink("/proc/self/cwd")
        return "(removed)"


def start_time(pid: int) -> int | None:
    """Return the start of a process in ticks since boot, which identifies it beyond its number; ``None`` if unknown."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def is_running(pid: Any, began: Any = None) -> bool:
    """Return whether the process runs, and started at ``began`` if that is known. A zombie does not run."""
    if not isinstance(pid, int) or pid <= 0:
        return False
    if (fields := _stat(pid)) is not None:
        return fields[0] not in ("Z", "X") and (began is None or int(fields[19]) == began)
    if Path("/proc/self/stat").exists():
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def state(pid: int) -> str:
    """Return the state of a process as one letter, as in ``ps``; empty if it is unknown."""
    return (_stat(pid) or [""])[0]


def catches(pid: int, number: int, *masks: str) -> bool:
    """Return whether the process handles a signal, or has it in other ``masks`` of ``/proc/PID/status``."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    found = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigCgt:", *masks))]
    return any(mask >> (number - 1) & 1 for mask in found)


def _stat(pid: int) -> list[str] | None:
    """Fields after the name in ``/proc/PID/stat``, see ``proc_pid_stat(5)``; the name may contain anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def launch() -> str | None:
    """Return the id of this process's ``torchrun`` start, which its restarted processes share, else ``None``."""
    launch = os.environ.get("TORCHELASTIC_RUN_ID")
    if launch != "none":
        return None if launch is None else launch[:100]
    # Without '--rdzv-id' all starts have the same id.
    parent = os.getppid()
    return f"{os.uname().nodename}/{parent}/{start_time(parent)}"


def restarted_launch() -> str | None:
    """Return :func:`launch` if this process replaces a failed one, else ``None``."""
    return launch() if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else None


def python_path() -> str:
    """Return ``PYTHONPATH`` for a subprocess that needs our packages, also where they are not installed."""
    return os.pathsep.join(part for part in (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")) if part)


def start_module(module: str, *arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
    """Start a module of ours without input, in its own session, so that Ctrl-C does not reach it.

    ``options`` are those of :class:`subprocess.Popen`; ``env`` extends this process's environment."""
    environment = {**os.environ, **options.pop("env", {}), "PYTHONPATH": python_path()}
    # -P: a file in the current folder must not take the place of a package.
    command = [sys.executable, "-P", "-m", module, *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment, **options)


def let_go(process: "subprocess.Popen[bytes]") -> None:
    """Stop watching a process that continues on its own."""
    # A return code keeps Popen from warning about the process.
    process.returncode = process.poll() or 0


def allow_many_connections() -> None:
    """Raise the limit of open files to the maximum: each connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def wait_for_free_core() -> None:
    """Never interrupt another process to run this one, which then waits some milliseconds while all cores are busy."""
    # A policy that someone chose for the training, and that this process inherited, stays.
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
