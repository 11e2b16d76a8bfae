"""Processes of a benchmark, and the cores that they run on. Linux only; imports nothing of offloop."""

import contextlib
import os
from pathlib import Path

MARK = "OFFLOOP_BENCHMARK"  # environment variable of all processes of a measurement
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def marked(mark: str) -> list[int]:
    """Return the processes that were started with this value of ``MARK``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def pin_apart(mark: str) -> bool:
    """Keep the calling thread on the last core, and all other threads and processes of the measurement off it.

    Returns:
        Whether there is a second core to do so."""
    if len(CORES) < 2:
        return False
    for process in {*marked(mark), os.getpid()}:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(thread), CORES[:-1])
    os.sched_setaffinity(0, CORES[-1:])
    return True


def pin_nowhere() -> None:
    """Let the calling thread, and what it starts, run on all cores again."""
    if CORES:
        os.sched_setaffinity(0, CORES)
