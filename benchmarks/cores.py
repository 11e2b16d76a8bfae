"""Processes of a benchmark, and the cores that they run on. Linux only; imports nothing of offloop."""

import contextlib
import os
from collections.abc import Sequence
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


def pin_apart() -> None:
    """Keep the calling thread on the last core, and all other threads and processes of its measurement off it."""
    _pin(CORES[-1:], CORES[:-1])


def pin_nowhere() -> None:
    """Let all threads and processes of the measurement run on all cores."""
    _pin(CORES, CORES)


def _pin(own: Sequence[int], others: Sequence[int]) -> None:
    if len(CORES) < 2:
        return
    for process in {*marked(os.environ.get(MARK, "")), os.getpid()}:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(thread), others)
    os.sched_setaffinity(0, own)
