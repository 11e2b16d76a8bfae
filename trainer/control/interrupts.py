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
    """Whether a signal has requested the end of the training."""

    def __init__(self) -> None:
        self.requested = False
        self.reason = "a signal to another rank"

    def explains(self, error: RuntimeError) -> bool:
        """Whether an error is torch's report that worker processes of a dataloader ended at a signal, which a terminal
        sends to them as well."""
        return self.requested and str(error).startswith("DataLoader worker (pid")


@contextlib.contextmanager
def defer_signals(state: State, with_checkpoint: bool = True) -> Iterator[Interruption]:
    """Within this the first Ctrl-C or SIGTERM ends the training after the current batch; the second one is handled as
    before: by default it ends the program at once.

    Forked processes, such as a dataloader's workers, ignore their first Ctrl-C, because the training needs them for the
    batch at hand; SIGTERM is handled as before. An ignored signal stays ignored. In another thread than the main one
    nothing is changed, as signals do not reach it."""
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
            # This one only: torch has set the other in its workers, in a way that Python does not know of.
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
        # torch raises, wherever the program is, when a worker has died: but the batch at hand has to be finished.
        before_children[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _do_nothing)
        # Not stop_training(): the batch at hand has to end as if the training went on.
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
        # It names itself, and would keep the state until the next garbage collection.
        del ask


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A handler of Python's: one of the system's in its place would be reported for a signal that is under way."""


def _restore(handlers: _Handlers, ours: Any) -> None:
    for number, handler in handlers.items():
        if signal.getsignal(number) is ours:
            # A handler that was not set from Python cannot be named; the default one is what is left then.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
