"""Ctrl-C and SIGTERM while training."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from offloop.bus.printing import say
from offloop.trainer.engine.state import State

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_Handlers = dict[int, Any]


class Interruption:
    def __init__(self) -> None:
        self.requested = False
        self.reason = "a signal to another rank"

    def explains(self, error: RuntimeError) -> bool:
        """Return whether the error reports workers of a dataloader that ended at the same signal from the terminal."""
        return self.requested and str(error).startswith("DataLoader worker (pid")


@contextlib.contextmanager
def defer_signals(state: State, with_checkpoint: bool = True) -> Iterator[Interruption]:
    """End the training after the current batch at the first Ctrl-C or SIGTERM within this block.

    The second signal is handled as before: by default it ends the program at once. Forked processes, such as a
    dataloader's workers, ignore their first Ctrl-C, because the training needs them for the current batch; SIGTERM is
    handled as before. An ignored signal stays ignored. Outside of the main thread nothing changes, as signals do not
    reach it."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    owner = os.getpid()
    found = {number: signal.getsignal(number) for number in _SIGNALS}
    before: _Handlers = {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}
    before_children: _Handlers = {}

    def ask(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            # Only this one: torch has set the other in its workers, unknown to Python.
            _restore({number: before[number]}, ask)  # noqa: F821 - it is deleted at the very end only
            if number == signal.SIGTERM:
                os.kill(os.getpid(), number)
            return
        is_second, interruption.requested = interruption.requested, True
        name = signal.Signals(number).name
        interruption.reason = f"signal {name}"
        _restore(before, ask)  # noqa: F821
        if is_second:
            os.kill(os.getpid(), number)
            return
        # torch raises anywhere when a worker has died, but the current batch must be finished.
        before_children[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _do_nothing)
        # Not stop_training(): the current batch must end as usual.
        state.request_stop(interruption.reason)
        if state.rank > 0:
            return  # the first rank speaks for all
        stopping = f"stopping after this batch{', with a checkpoint' if with_checkpoint else ''}"
        say(f"{name}: {stopping}; again to stop at once", err=True)

    try:
        for number in before:
            signal.signal(number, ask)
        yield interruption
    finally:
        _restore(before, ask)
        _restore(before_children, _do_nothing)
        # It refers to itself, and would keep the state until the next garbage collection.
        del ask


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing, as a Python handler: SIG_DFL here would be reported for a signal that is under way."""


def _restore(handlers: _Handlers, ours: Any) -> None:
    for number, handler in handlers.items():
        if signal.getsignal(number) is ours:
            # A handler that was not set from Python is unknown; only the default one can be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
