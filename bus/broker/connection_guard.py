"""Keeps a broker's memory and file descriptors within bounds, whatever its peers send: it closes connections.

libzmq takes in what a connection sends until its process has no memory left, unless a socket has a receive limit
(``ZMQ_RCVHWM``); and with one, any peer can make libzmq 4.3 abort the process (see "Floods" in ``docs/design.md``). So
there is no limit in libzmq, and this one outside of it. Closing a connection costs an honest peer nothing but time: its
socket connects again, and what was lost on the way is asked for by its number.
"""

import contextlib
import ctypes
import fcntl
import logging
import os
import resource
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

_log = logging.getLogger("offloop.broker")

LOOK_SECONDS = 0.05
SWITCH_SECONDS = 1e-4
MEMORY_BUDGET = 256 << 20
"""How many bytes a broker may grow by within a short time before connections are closed."""
FORGIVEN_A_SECOND = 1 << 20
TRIM_BYTES = 32 << 20
TRIM_SECONDS = 1.0
MOST_TRIM_SECONDS = 20.0
TRIMMING_SHARE = 0.01
"""How much of the time may go into giving memory back."""
STUCK_BYTES = 64 << 10
DESCRIPTORS_SECONDS = 0.5
COUNTING_SHARE = 0.05
"""How much of the time may go into counting descriptors."""
NEWCOMER_SECONDS = 2.0
"""How long a connection may take to say who it is while descriptors are short, but not all but used up."""

_RECEIVED = struct.Struct("=128xQ")
"""``tcpi_bytes_received`` in Linux's ``struct tcp_info``."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


class _Connection(NamedTuple):
    """One of libzmq's, as the system knows it."""

    descriptor: int
    inode: int
    is_control: bool


class ConnectionGuard(threading.Thread):
    """A thread that closes connections of the broker's sockets ``control`` and ``stream`` (their addresses) while the
    process takes up too much memory or too many descriptors. It is a thread so that it works while a disk keeps the
    broker waiting. Where the system has no ``/proc``, it does nothing."""

    def __init__(self, control: str, stream: str) -> None:
        super().__init__(name="connection guard", daemon=True)
        self.is_overrun = False
        """Whether more has come in than is to be kept: what peers sent that are gone is to be dropped unread."""
        self._places = {_place(control): True, _place(stream): False}
        self._known: dict[int, int] = {}
        self._done = threading.Event()
        self._received: dict[int, int] = {}
        self._first_seen: dict[int, float] = {}
        self._trim_at = self._minded = self._count_at = 0.0
        # Descriptors of our own, for when there are no others.
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._spare = os.dup(self._nothing)
        self._spare_in_use = threading.Lock()
        self._statistics: int | None = None
        with contextlib.suppress(OSError):
            self._statistics = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._at_first = self._calm = self._before = self._resident()

    # -- what the broker reports -------------------------------------------------------------------------------------

    def know(self, descriptor: int) -> None:
        """Notes that a connection is that of a publisher or consumer."""
        with contextlib.suppress(OSError):
            self._known[descriptor] = os.fstat(descriptor).st_ino

    def close_connection(self, descriptor: int, is_still_its: Callable[[], bool]) -> bool:
        """Closes a connection of the broker's; its peer may connect again. libzmq may have closed it meanwhile, and its
        descriptor may be another connection's: ``is_still_its`` is asked when that cannot happen any more. Returns
        whether it was closed."""
        with self._borrowed(descriptor) as connection:
            if connection is None or self._is_control(connection) is None or not is_still_its():
                return False
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            return True

    def close(self) -> None:
        """Ends the thread."""
        self._done.set()
        if self.is_alive():
            self.join()
        for descriptor in (self._spare, self._nothing, self._statistics):
            if descriptor is not None:
                os.close(descriptor)

    # -- what it looks at ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Looks at memory and descriptors again and again."""
        # To look at a connection takes several system calls, and after each the broker's own thread, which is
        # busy then, has to let go of the interpreter.
        sys.setswitchinterval(SWITCH_SECONDS)
        while not self._done.wait(LOOK_SECONDS):
            now = time.monotonic()
            self._mind_memory(now)
            if now >= self._count_at:
                self._mind_descriptors(now)
                self._count_at = now + (time.monotonic() - now) / COUNTING_SHARE

    def _mind_memory(self, now: float) -> None:
        resident = self._resident()
        self._calm = min(resident, self._calm + round(FORGIVEN_A_SECOND * LOOK_SECONDS))
        # Of what is forgiven, too: most of it may be freed at last.
        if resident - self._at_first > TRIM_BYTES and now >= self._trim_at and self._trim is not None:
            # glibc keeps what was freed for the next time; after a flood that is most of it.
            began = time.thread_time()
            self._trim(0)
            pause = (time.thread_time() - began) / TRIMMING_SHARE
            # What takes long in the middle of a flood gives little back: most is freed when it has ended.
            self._trim_at = now + min(max(TRIM_SECONDS, pause), MOST_TRIM_SECONDS)
            resident = self._resident()
        is_growing, self._before = resident > self._before + (1 << 20), resident
        self.is_overrun = resident - self._calm > (MEMORY_BUDGET // 2 if self.is_overrun else MEMORY_BUDGET)
        if resident - self._calm < MEMORY_BUDGET // 2:
            self._received.clear()
        elif not self._received:
            self._received = {one.inode: self._bytes_received(one) for one in self._connections()}
        elif is_growing and resident - self._calm > MEMORY_BUDGET:
            self._close_loudest((resident - self._calm) >> 20)

    def _close_loudest(self, grown: int) -> None:
        """Closes the connections that most of what has come since half of the budget was reached came from; and those
        that do not read, when what came does not explain it."""
        connections = list(self._connections())
        received = {one: self._bytes_received(one) for one in connections}
        # Of a peer that has said nothing yet that could be made use of, all of it is still here.
        sent = {
            one: size - self._received.get(one.inode, 0) if self._is_known(one) else size
            for one, size in received.items()
        }
        total = left = sum(sent.values())
        closed = []
        if total > MEMORY_BUDGET // 4:
            for one in sorted(connections, key=sent.__getitem__, reverse=True):
                if left < 0.1 * total:
                    break
                closed.append(one)
                left -= sent[one]
        else:
            closed = [one for one in connections if self._is_stuck(one)]
        for one in closed:
            self._close(one)
        self._received = {one.inode: size for one, size in received.items()}
        if closed:
            _log.warning("closed %d connections: the broker had grown by %d MiB", len(closed), grown)

    def _mind_descriptors(self, now: float) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        used = 0 if limit < 0 else _descriptors(limit)
        is_urgent = used > limit * 7 // 8
        if not is_urgent and now - self._minded < DESCRIPTORS_SECONDS:
            return
        self._minded = now
        if used <= limit // 2:
            self._first_seen.clear()
            return
        connections = list(self._connections())
        self._first_seen = {one.inode: self._first_seen.get(one.inode, now) for one in connections}
        if used <= limit * 3 // 4:
            return
        unknown = [one for one in connections if not self._is_known(one)]
        # The stream does not know who its readers are; they read on where they were when they connect again.
        unknown.sort(key=lambda one: (not one.is_control, self._first_seen[one.inode]))
        old = [one for one in unknown if now - self._first_seen[one.inode] > NEWCOMER_SECONDS]
        closed = old[: used - limit // 2]
        if is_urgent and len(closed) < used - limit * 3 // 4:
            closed = unknown[: used - limit * 3 // 4]
        for one in closed:
            self._close(one)
        if closed:
            _log.warning(
                "closed %d connections that had not said who they are: the broker had %d of %d descriptors left",
                *(len(closed), limit - used, limit),
            )

    # -- connections, as the system knows them ------------------------------------------------------------------------

    def _connections(self) -> Iterator[_Connection]:
        for descriptor in _open_descriptors():
            with self._borrowed(descriptor) as connection:
                is_control = None if connection is None else self._is_control(connection)
                inode = 0 if connection is None else os.fstat(connection.fileno()).st_ino
            if is_control is not None:
                yield _Connection(descriptor, inode, is_control)

    @contextlib.contextmanager
    def _borrowed(self, descriptor: int) -> Iterator[socket.socket | None]:
        """A socket of libzmq's under another descriptor: libzmq may close its own at any time, and its number may be
        another file's a moment later."""
        with self._spare_in_use:
            try:
                os.dup2(descriptor, self._spare, inheritable=False)
                borrowed = socket.socket(fileno=self._spare)
            except OSError:
                yield None
                return
            try:
                yield borrowed
            finally:
                borrowed.detach()
                # As long as we have it, libzmq's closing does not end the connection.
                os.dup2(self._nothing, self._spare, inheritable=False)

    def _resident(self) -> int:
        """Bytes of memory that this process takes up; 0 where the system does not tell."""
        return 0 if self._statistics is None else int(os.pread(self._statistics, 100, 0).split()[1]) * _PAGE

    def _close(self, one: _Connection) -> None:
        with self._borrowed(one.descriptor) as connection:
            if connection is not None and os.fstat(connection.fileno()).st_ino == one.inode:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _is_known(self, one: _Connection) -> bool:
        return self._known.get(one.descriptor) == one.inode

    def _is_control(self, connection: socket.socket) -> bool | None:
        """Whether it is a connection of the control endpoint (or else of the stream); ``None`` for anything else."""
        try:
            connection.getpeername()
            own = connection.getsockname()
        except OSError:
            return None
        return self._places.get(own if isinstance(own, str) else str(own[1]) if isinstance(own, tuple) else "")

    def _bytes_received(self, one: _Connection) -> int:
        """How many bytes have come from it; 0 where the system does not tell (Unix sockets)."""
        with self._borrowed(one.descriptor) as connection:
            if connection is None or connection.family == socket.AF_UNIX:
                return 0
            with contextlib.suppress(OSError, struct.error):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
                return int(_RECEIVED.unpack(info)[0])
            return 0

    def _is_stuck(self, one: _Connection) -> bool:
        """Whether what the broker answers is not read there, or that is unknown."""
        with self._borrowed(one.descriptor) as connection:
            if connection is None:
                return False
            if connection.family == socket.AF_UNIX:
                return True
            with contextlib.suppress(OSError):
                waiting = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
                return int(struct.unpack("=i", waiting)[0]) > STUCK_BYTES
            return False


def _place(address: str) -> str:
    """What distinguishes an address's connections from others: the port, or the socket's path."""
    return address.removeprefix("ipc://") if address.startswith("ipc://") else address.rpartition(":")[2]


def _open_descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        # None is left to list them with.
        return list(range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


def _descriptors(limit: int) -> int:
    """How many are in use."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:
        return 0
    except OSError:
        return limit
