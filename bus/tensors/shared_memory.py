"""Memory that other processes of the same user can map, freed with the last process that uses it.

On Linux it is a memfd: it has no name, so a killed process leaves nothing behind; others open it as ``/proc/PID/fd/N``.
Elsewhere it is a file in the temporary directory, removed at the end, or after a kill by the next process that makes
such memory."""

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

NO_DESCRIPTOR = -1  # descriptor of memory in a file

SHARE = 0.9  # share of the available memory that one segment may take

_CGROUP = Path("/sys/fs/cgroup")
_NAME = "offloop-segment"
_LINK = f"/memfd:{_NAME} (deleted)"
_MAP_FIXED = 0x10
_MADV_POPULATE_WRITE = 23
_PIECE = 4 << 20


def create_memory(size: int, token: bytes, allocate: int | None = None) -> tuple[int, int]:
    """Create memory of ``size`` bytes, identified by ``token``; return its descriptor, and the number for others.

    It is allocated now, completely or the first ``allocate`` bytes: the rest by :func:`allocate_memory` before it is
    written."""
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
    check_available(size)
    # If it were missing, a write to it would end the process by a signal.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, offset, size)


def check_available(size: int) -> None:
    """Raise OSError if less memory is available: the kernel would not refuse, but kill processes later."""
    if size > (available := memory_available()) * SHARE:
        raise OSError(errno.ENOMEM, f"{available} bytes are available, and a tenth of that is left to others")


def memory_available() -> float:
    """Return the bytes that this process can still allocate without swapping, if the system reports it."""
    available = math.inf
    with contextlib.suppress(OSError, LookupError, ValueError):
        meminfo = Path("/proc/meminfo").read_text()
        available = 1024 * int(meminfo.partition("MemAvailable:")[2].split(maxsplit=1)[0])
    # In a container: "memory.max" and "memory.stat" in the kernel's description of cgroups, version 2.
    with contextlib.suppress(OSError, LookupError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        cache = int((_CGROUP / "memory.stat").read_text().partition("inactive_file ")[2].split(maxsplit=1)[0])
        available = min(available, limit - int((_CGROUP / "memory.current").read_text()) + cache)
    return available


def discard_memory(descriptor: int, token: bytes) -> None:
    """Free memory of this process; other processes keep it while they have it mapped."""
    os.close(descriptor)
    if not HAS_MEMFD:
        _path(os.getpid(), token).unlink(missing_ok=True)


def open_memory(pid: int, shared: int, token: bytes) -> int:
    """Open what should be memory of a process, for reading. The caller must check its contents."""
    if not HAS_MEMFD:
        return os.open(_path(pid, token), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    _keep_from_forks()
    # Opening a device or a pipe may wait or have effects. O_PATH allows to check the file without opening it, and it
    # cannot be replaced in between.
    place = os.open(f"/proc/{pid}/fd/{shared}", os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            raise OSError("it is not shared memory")
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(place)


def map_memory(descriptor: int, size: int, *, writable: bool = False) -> mmap.mmap:
    """Map memory from its start. While anything refers to the map, it keeps the file and its lock.

    With ``writable`` all pages are mapped on return, where the system supports it; other threads run meanwhile."""
    if not writable:
        return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    if HAS_MEMFD:
        # In pieces, because other allocations of the process wait for each call. MAP_POPULATE would make all other
        # Python threads wait.
        libc, start = _libc(), ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for offset in range(0, size, _PIECE):
            if libc.madvise(start + offset, min(_PIECE, size - offset), _MADV_POPULATE_WRITE) != 0:
                break  # before Linux 5.14 each page is mapped at its first write
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
    """Register the cleanup of forked processes, on first use: it takes each of them some time."""
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """Remove inherited memory from a forked process, so that a worker keeps neither the memory nor a lock.

    Objects that refer to it will still close and unmap it. So descriptors are replaced by ``/dev/null``, and maps by
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
