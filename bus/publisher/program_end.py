"""How the program ended, as far as an exit handler can find out."""

import dis
import sys
import threading
from types import FrameType

LEFT = "the program was left before close(), by sys.exit or an error that it handled"
_RETURNS = {dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap}
_outermost: FrameType | None = None


def watch_main_thread() -> None:
    """Remembers the outermost frame of the main thread, which shows at exit whether the program came to its end."""
    global _outermost
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    _outermost = frame


def error_at_exit(left: BaseException | None = None) -> BaseException | None:
    """The exception that has ended the program, for exit handlers; ``None`` when it came to its end.

    Of a ``SystemExit`` Python has cleared everything by now, also its code; that there was one is seen by where the
    program was left. Nothing says whether it was a failure: that is ``left``, by default what ends a run as stopped."""
    error: BaseException | None = getattr(sys, "last_value", None)
    frame = _outermost
    has_returned = frame is not None and frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] in _RETURNS
    return error if error is not None or has_returned else left or KeyboardInterrupt(LEFT)
