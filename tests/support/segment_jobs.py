"""What the other processes do in the tests of shared memory; each is told what by a pipe."""

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from offloop.bus.tensors.segments import SegmentPool, SegmentReference, open_segment


@contextmanager
def running(job: Callable[..., None], *arguments: Any) -> Iterator[tuple[SpawnProcess, Connection]]:
    """Run ``job(pipe, *arguments)`` in another process, which is killed at the end of the block."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=job, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


def filled(pool: SegmentPool, size: int, seq: int) -> dict[str, Any] | None:
    """Publish a segment in which every byte is ``seq``, modulo 256."""
    segment = pool.reserve(size, "weights")
    if segment is None:
        return None
    segment.buffer[:] = bytes([seq % 256]) * size
    return segment.publish(seq)


def writer(pipe: Connection, slots: int, size: int) -> None:
    """Publish a segment for each number that arrives."""
    pool = SegmentPool(slots, is_handled=lambda seq, field: True)
    while True:
        pipe.send(filled(pool, size, pipe.recv()))


def reader(pipe: Connection) -> None:
    """Map each segment that arrives, and answer with the distinct bytes in all that are mapped."""
    held: list[memoryview] = []
    while True:
        held.append(open_segment(SegmentReference.from_wire(pipe.recv())))
        pipe.send([set(bytes(image)) for image in held])


def forker(pipe: Connection) -> None:
    """Fork with one segment being filled, another one published, and a third one mapped.

    The fork reports what it has of them, and exits like an interpreter."""
    pool = SegmentPool(4)
    objects: list[Any] = [pool, pool.reserve(1, "weights"), filled(pool, 1, 1), filled(pool, 1, 2)]
    objects.append(open_segment(SegmentReference.from_wire(objects[-1])))
    pipe.send((os.getpid(), objects[2]))
    if os.fork() == 0:
        pipe.send((os.getpid(), shared_memory_of(os.getpid()), pool.reserve(1, "weights")))
        pipe.recv()
        del pool
        objects.clear()
        gc.collect()
        pipe.send("all gone")
        raise SystemExit
    os.wait()


def shared_memory_of(pid: int) -> list[str]:
    """List the maps and descriptors of segments that a process has."""
    found = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "offloop-segment" in line]
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            link = os.readlink(entry)
        except OSError:
            continue
        if "offloop-segment" in link:
            found.append(f"{entry.name} -> {link}")
    return found
