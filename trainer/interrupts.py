"""Ctrl-C and SIGTERM while training."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from trainer.state import State

__all__ = ["Interruption", "finishing_the_batch"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Whether somebody has asked the training to end."""

    def __init__(self) -> None:
        self.came = False


@contextlib.contextmanager
def finishing_the_batch(state: State, with_checkpoint: bool = True) -> Iterator[Interruption]:
    """While this is open, the first Ctrl-C or SIGTERM ends the training after the batch at hand, and says so; the
    second one does what it did before: by default it ends the program at once.

    Signals reach the main thread only; in another thread nothing is changed.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before: dict[int, Any] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        interruption.came = True
        _restore(before)
        # Not stop_training(): the batch at hand has to end as if the training went on.
        state.request_stop()
        if state.rank > 0:
            return  # the first rank speaks for all
        name = signal.Signals(number).name
        stopping = f"stopping after this batch{', with a checkpoint' if with_checkpoint else ''}"
        print(f"{name}: {stopping}; again to stop at once", file=sys.stderr, flush=True)

    before.update({number: signal.signal(number, ask) for number in _SIGNALS})
    try:
        yield interruption
    finally:
        _restore(before)


def _restore(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        # A handler that was not set from Python cannot be named; the default one is what is left then.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
    handlers.clear()
