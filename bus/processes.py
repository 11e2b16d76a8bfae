"""Processes: which ones run, how ours are started, and how many files this one may have open."""

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


def current_folder() -> str:
    """The folder that this process works in, also where that was removed and the system still has its name."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            return os.readlink("/proc/self/cwd")
        return "(removed)"


def start_time(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks since the machine did; ``None`` where that cannot be known.

    With it a number that was given to another process later is distinguished from the process that was meant."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def is_running(pid: Any, began: Any = None) -> bool:
    """The process runs, and began at ``began`` if that is known. An unreaped one does not run."""
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


def _stat(pid: int) -> list[str] | None:
    """What follows the name in the process's ``stat``, see ``proc_pid_stat(5)``; the name may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


class Program(NamedTuple):
    """A process of this machine that this user may look at."""

    pid: int
    parent: int
    folder: str
    """The folder that it works in."""
    command: tuple[str, ...]


def programs() -> Iterator[Program]:
    """The processes of this machine; none where there is no ``/proc``."""
    for path in Path("/proc").glob("[0-9]*"):
        # Another user's, or one that has just ended.
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_bytes().decode(errors="backslashreplace").split("\0")[:-1]
            if command and (fields := _stat(int(path.name))) is not None:
                yield Program(int(path.name), int(fields[1]), os.readlink(path / "cwd"), tuple(command))


def launch() -> str | None:
    """The start of ``torchrun``, or of what is built on it, that this process is of: the same again in processes that
    it starts in place of failed ones. ``None`` in others."""
    launch = os.environ.get("TORCHELASTIC_RUN_ID")
    if launch != "none":
        return None if launch is None else launch[:100]
    # Without '--rdzv-id' all starts have the same id.
    parent = os.getppid()
    return f"{os.uname().nodename}/{parent}/{start_time(parent)}"


def restarted_launch() -> str | None:
    """:func:`launch` of a process that was started in place of a failed one; ``None`` in others."""
    return launch() if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else None


def python_path() -> str:
    """``PYTHONPATH`` for a process of ours, which has to find our packages also where they are not installed."""
    return os.pathsep.join(part for part in (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")) if part)


def start_module(module: str, *arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
    """Starts a module of ours in a session of its own, so that Ctrl-C in the terminal does not reach it, without input.
    ``options`` are those of :class:`subprocess.Popen`; ``env`` is added to this process's environment."""
    environment = {**os.environ, **options.pop("env", {}), "PYTHONPATH": python_path()}
    # -P: what lies in the current folder must not take the place of a package.
    command = [sys.executable, "-P", "-m", module, *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment, **options)


def let_go(process: "subprocess.Popen[bytes]") -> None:
    """Lets a process continue without this one."""
    # A return code keeps Popen from warning about it.
    process.returncode = process.poll() or 0


def allow_many_connections() -> None:
    """Lets this process open as many files as the system permits: each connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
