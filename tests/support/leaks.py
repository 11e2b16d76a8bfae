"""Finds what a test left behind: processes, also those that were handed to init, and open ZeroMQ sockets."""

import contextlib
import os
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import psutil
import zmq

_STAY_UNTIL_EXIT = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    # torch's compiler waits for ever once these have been killed.
    "torch/_inductor/compile_worker",
)
"""Helpers of which each interpreter has one set until it exits."""
_sockets: "weakref.WeakSet[zmq.Socket[Any]]" = weakref.WeakSet()


def record_sockets() -> None:
    """Notes every ZeroMQ socket that is made from now on: cheaper than searching all objects after every test."""
    create = zmq.Socket.__init__

    def create_and_note(self: "zmq.Socket[Any]", *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        _sockets.add(self)

    zmq.Socket.__init__ = create_and_note  # type: ignore[method-assign]


class LeakWatch:
    """What there was before a test, to tell what it left behind.

    A process belongs to the test if it descends from this one, but from none that was there before, or if ``token``
    stands in its environment, command line or working directory: those stay when its parent is gone."""

    def __init__(self, token: str, grace: float) -> None:
        self._token = token
        self._grace = grace
        self._pids = set(psutil.pids())
        self._open = set(_open_sockets())

    def processes(self) -> list[psutil.Process]:
        """Processes that are still there after the time that is left to those which are just ending."""
        deadline = time.monotonic() + self._grace
        while leaked := list(self._own(set(psutil.pids()) - self._pids)):
            if time.monotonic() > deadline:
                return leaked
            time.sleep(0.01)
        return []

    def kill(self, processes: list[psutil.Process]) -> None:
        """Ends them and waits until they are gone, so that the next test starts with a clean slate."""
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.processes()

    def sockets(self) -> list["zmq.Socket[Any]"]:
        """Sockets that were not closed."""
        return [socket for socket in _open_sockets() if socket not in self._open]

    def _own(self, pids: Iterable[int]) -> Iterator[psutil.Process]:
        for pid in pids:
            # It may end at any moment, and other users' processes may not be looked at: neither is ours.
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE and self._belongs_here(process):
                    yield process

    def _belongs_here(self, process: psutil.Process) -> bool:
        command = process.cmdline()
        if not command and process.exe():
            # It is about to execute another program, and the system does not tell yet what its environment is.
            return True
        if any(name in argument for argument in command for name in _STAY_UNTIL_EXIT):
            return False
        parents = [parent.pid for parent in process.parents()]
        # What a browser that several tests share starts, it starts for itself, and at any time.
        if os.getpid() in parents and not self._pids.intersection(parents[: parents.index(os.getpid())]):
            return True
        return any(self._token in text for text in (*command, *process.environ().values(), process.cwd()))


def _open_sockets() -> list["zmq.Socket[Any]"]:
    return [socket for socket in list(_sockets) if not socket.closed]
