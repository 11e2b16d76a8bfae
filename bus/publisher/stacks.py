"""A training's side of ``offloop send RUN stacks``: a signal writes the stack of the training to memory."""

import faulthandler
import os
import signal
import sys
import threading
from typing import Any

from offloop.bus.processes import catches

_NCCL = (
    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
    ("TORCH_FR_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"),
)
"""Variables with the beginnings of paths, by the names of newer and of older versions of torch."""

_owner = 0  # process that has registered; a forked one shares nothing with it
_registered: dict[str, Any] | None = None


def register_stacks() -> dict[str, Any] | None:
    """Let the broker have the stack of this thread; return what it must know, or ``None`` where that is impossible.

    The handler is C code of Python's: it does not need the GIL, so a hanging process answers too. It stays
    until the end of the process, because without it the signal would kill."""
    global _owner, _registered
    if sys.platform != "linux":
        return None
    if _owner != os.getpid():
        known = None if _registered is None else _registered["signal"]
        _owner, _registered = os.getpid(), _register(known or _free_signal())
    if _registered is None:
        return None
    nccl = [next(filter(None, map(os.environ.get, names)), "") for names in _NCCL]
    return {**_registered, "thread": threading.get_native_id(), "nccl": nccl}


def _register(number: int | None) -> dict[str, Any] | None:
    if number is None:
        return None
    token = os.urandom(16)
    try:
        # The memory ends with the last process that has it, and grows by each request, whose number is limited.
        memory = os.memfd_create("offloop-stacks", os.MFD_CLOEXEC)
        os.write(memory, token)
        # Not all threads: those that run meanwhile are read without a lock, which has crashed a process.
        faulthandler.register(number, file=memory, all_threads=False, chain=False)
    except OSError:
        return None
    return {"signal": number, "fd": memory, "token": token}


def _free_signal() -> int | None:
    """Return a real-time signal that this process neither handles nor ignores."""
    # The first ones are those that other libraries choose.
    numbers = range(signal.SIGRTMIN + 10, signal.SIGRTMAX)
    return next((one for one in numbers if not catches(os.getpid(), one, "SigIgn:", "SigBlk:")), None)
