"""Memory that other processes of the same user can map, freed with the last process that has it.

On Linux it is a memfd: it has no name anywhere, so there is nothing that a killed process could leave behind, and
others reach it as ``/proc/PID/fd/N``. Elsewhere it is a file in the temporary directory, which is removed at the end,
or, after a kill, by the next process that makes such memory."""

import contextlib
import ctypes
import errno
import functools
import math
import mmap
import os
import stat
import tempfile
from pathlib import Path

from offloop.bus import processes

HAS_MEMFD = hasattr(os, "memfd_create")

NO_DESCRIPTOR = -1
"""Stands for the descriptor of memory that is a file."""

SHARE = 0.9
"""Of the memory that is available: this much may be taken for one segment."""

_CGROUP = Path("/sys/fs/cgroup")
_NAME = "offloop-segment"
_LINK = f"/memfd:{_NAME} (deleted)"
_MAP_FIXED = 0x10
_MADV_POPULATE_WRITE = 23
_PIECE = 4 << 20


def create_memory(size: int, token: bytes, allocate: int | None = None) -> tuple[int, int]:
    """Makes memory of ``size`` bytes, identified by ``token``. Returns the descriptor of it, and the number by which
    others find it. All of it is allocated at once, or the first ``allocate`` bytes: then :func:`allocate_memory` is to
    come before more is written.

    Raises OSError: there is not so much."""
    if HAS_MEMFD:
        _keep_from_forks()
        descriptor = shared = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    else:
        for path in _directory().iterdir():
            pid = path.name.partition("-")[0]
            if pid.isdigit() and not processes.is_running(int(pid)):
                path.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor, shared = os.open(_path(os.getpid(), token), flags, 0o600), NO_DESCRIPTOR
    try:
        os.ftruncate(descriptor, size)
        allocate_memory(descriptor, 0, size if allocate is None else allocate)
    except BaseException:
        discard_memory(descriptor, token)
        raise
    return descriptor, shared


def allocate_memory(descriptor: int, offset: int, size: int) -> None:
    """Allocates a part of memory that was made with ``allocate``. Raises OSError: there is not so much."""
    check_available(size)
    # What is not there in full would be missed only when it is written to, by a signal that ends the process.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, offset, size)


def check_available(size: int) -> None:
    """Raises OSError where less memory is available: the kernel would not refuse, but end processes until there is
    room."""
    if size > (available := memory_available()) * SHARE:
        raise OSError(errno.ENOMEM, f"{available} bytes are available, and a tenth of that is left to others")


def memory_available() -> float:
    """Bytes that this process can still allocate without swapping, if the system reports it."""
    available = math.inf
    with contextlib.suppress(OSError, LookupError, ValueError):
        meminfo = Path("/proc/meminfo").read_text()
        available = 1024 * int(meminfo.partition("MemAvailable:")[2].split(maxsplit=1)[0])
    # In a container, see "memory.max" and "memory.stat" in the kernel's description of cgroups, version 2.
    with contextlib.suppress(OSError, LookupError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        cache = int((_CGROUP / "memory.stat").read_text().partition("inactive_file ")[2].split(maxsplit=1)[0])
        available = min(available, limit - int((_CGROUP / "memory.current").read_text()) + cache)
    return available


def discard_memory(descriptor: int, token: bytes) -> None:
    """Gives memory back that this process has made; who has mapped it keeps it."""
    os.close(descriptor)
    if not HAS_MEMFD:
        _path(os.getpid(), token).unlink(missing_ok=True)


def open_memory(pid: int, shared: int, token: bytes) -> int:
    """Opens what may be the memory of a process, to be read; that it is has to be seen from what is in it.

    Raises OSError: it does not exist, or is not a regular file."""
    if not HAS_MEMFD:
        return os.open(_path(pid, token), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    _keep_from_forks()
    # To open a device or a pipe may wait, or do something. With O_PATH it is looked at without being opened, and it
    # cannot become something else in between.
    place = os.open(f"/proc/{pid}/fd/{shared}", os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            raise OSError("it is not shared memory")
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(place)


def map_memory(descriptor: int, size: int, *, writable: bool = False) -> mmap.mmap:
    """Maps memory from its beginning. The map keeps the descriptor's file open, and with it its lock, for as long as
    there is anything that refers to the map. With ``writable`` the system has no work left with it when this
    returns, where that can be requested; other threads continue meanwhile."""
    if not writable:
        return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    if HAS_MEMFD:
        # In pieces, because other allocations of the process wait for the piece; and not by MAP_POPULATE,
        # because Python's other threads would wait for all of it.
        libc, start = _libc(), ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for offset in range(0, size, _PIECE):
            if libc.madvise(start + offset, min(_PIECE, size - offset), _MADV_POPULATE_WRITE) != 0:
                break  # before Linux 5.14: each page is mapped when it is written to
    return memory


# -- files, without memfds -------------------------------------------------------------------------------------------


def _path(pid: int, token: bytes) -> Path:
    return _directory() / f"{pid}-{token.hex()}"


def _directory() -> Path:
    path = Path(tempfile.gettempdir()) / f"offloop-segments-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} is not this user's alone: remove it")
    return path


# -- forks ------------------------------------------------------------------------------------------------------------


@functools.cache
def _keep_from_forks() -> None:
    """From the first such memory on: to look for it takes a forked process some time."""
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """Removes inherited memory from a forked process, so that a worker keeps neither the memory nor a lock.

    Objects that refer to it will still close and unmap it: so descriptors are replaced by ``/dev/null``, and maps by
    empty private memory."""
    with contextlib.suppress(OSError):
        inherited = [int(name) for name in os.listdir("/proc/self/fd") if _is_memory(name)]
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(_LINK)]
        if inherited:
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            for descriptor in inherited:
                os.dup2(null, descriptor, inheritable=False)
            os.close(null)
        for addresses, *_ in maps:
            start, end = (int(address, 16) for address in addresses.split("-"))
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0) | _MAP_FIXED
            _libc().mmap(start, end - start, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)


def _is_memory(name: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{name}") == _LINK
    except OSError:
        return False


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    return libc
