"""How the program ended, as far as an exit handler can find out."""

import dis
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LEFT = "the training was left before close(), by return, sys.exit or an error that was handled"
_RETURNS = {dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap}
_outermost: FrameType | None = None


def watch_main_thread() -> None:
    """Remember the outermost frame of the main thread: at exit it shows whether the program ran to its end."""
    global _outermost
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    _outermost = frame


def error_at_exit(left: BaseException | None = None) -> BaseException | None:
    """Return the exception that ended the program, for exit handlers; ``None`` if it ran to its end.

    Python has cleared a ``SystemExit`` and its code by now. The position of the outermost frame shows that there was
    one. Whether it was a failure is unknown: then ``left`` is returned, by default an error that means stopped."""
    error: BaseException | None = getattr(sys, "last_value", None)
    frame = _outermost
    has_returned = frame is not None and frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] in _RETURNS
    return error if error is not None or has_returned else left or KeyboardInterrupt(LEFT)


@contextmanager
def ignoring_sigterm() -> Iterator[None]:
    """Let exit handlers finish, which they do within seconds, although the program is terminated meanwhile.

    A launcher terminates the other processes of one that failed, and those may be ending for the same reason."""
    try:
        earlier = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if earlier is None else earlier)
