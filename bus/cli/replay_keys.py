"""Single keys in a terminal that let a replay stand still, go on, or pass one event."""

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from bus.errors import ConfigurationError

if TYPE_CHECKING:
    from bus.replay.pace import Pace

__all__ = ["KEYS_HELP", "ReplayKeys", "has_keyboard"]

KEYS_HELP = "space or Enter goes on and pauses, '.' gives one event, q or Ctrl-C leaves"

LOOK_SECONDS = 0.5


def has_keyboard() -> bool:
    """Whether standard input is a terminal that listens to us: not in the background, where to read from it would stop
    the process."""
    if not sys.stdin or not sys.stdin.isatty():
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:
        return False


class ReplayKeys:
    """While it is entered, keys on standard input drive a pace: see :data:`KEYS_HELP`. ``leave`` is called for ``q``,
    in a thread of its own; ``say`` is given the line that tells people which keys there are. Ctrl-C stays what it is.

    Raises:
        ConfigurationError: when entered, that standard input is no terminal.
    """

    def __init__(self, pace: "Pace", leave: Callable[[], object], say: Callable[[str], object]) -> None:
        self._pace, self._say = pace, say
        self._actions = {b" ": pace.toggle, b"\n": pace.toggle, b"\r": pace.toggle, b".": pace.step, b"q": leave}
        self._thread = threading.Thread(target=self._listen, name="offloop-keys", daemon=True)

    def __enter__(self) -> "ReplayKeys":
        if not has_keyboard():
            raise ConfigurationError(
                "keys are read from a terminal, and standard input is none: nobody could let the replay go on; "
                "leave out '--paused', '--rate 1' replays it as fast as it was"
            )
        self._terminal = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._terminal)
        tty.setcbreak(self._terminal)
        self._over, self._end = os.pipe()
        self._thread.start()
        self._continued = signal.signal(signal.SIGCONT, self._on_continue)
        self._say(f"{'standing still: ' if self._pace.paused else ''}{KEYS_HELP}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGCONT, self._continued)
        os.close(self._end)
        self._thread.join()
        os.close(self._over)
        # In the background it is the shell's, which has set it for itself, and would stop whoever changes it.
        if has_keyboard():
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._before)

    def _on_continue(self, *_: object) -> Any:
        # A shell takes the terminal back to lines when it stops us.
        if has_keyboard():
            with contextlib.suppress(termios.error):  # the terminal is gone
                tty.setcbreak(self._terminal)

    def _listen(self) -> None:
        # To read in the background fails then, and does not stop the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTIN})
        while not self._is_over(has_keyboard()):
            try:
                key = os.read(self._terminal, 1)
            except OSError:
                # In the background.
                continue
            if not key:
                return
            action = self._actions.get(key)
            if action is not None:
                action()

    def _is_over(self, listens: bool) -> bool:
        """Waits for a key, where the terminal listens to us, or until it does; whether it is over instead."""
        while True:
            watched = [self._terminal, self._over] if listens else [self._over]
            ready, _, _ = select.select(watched, [], [], None if listens else LOOK_SECONDS)
            if self._over in ready:
                return True
            if ready:
                return False
            listens = has_keyboard()
            if listens:
                self._on_continue()
