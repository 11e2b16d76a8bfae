"""A full-screen terminal, restored afterwards."""

import atexit
import contextlib
import io
import os
import re
import select
import signal
import sys
import termios
import threading
import tty
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from offloop.bus.errors import ConfigurationError, require

if TYPE_CHECKING:
    from rich.text import Text


_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_CLEAR = "\x1b[2J"
_ERASE_REST = "\x1b[0m\x1b[K"
_KEYS = {
    **dict.fromkeys(("\x1b[A", "\x1bOA", "k"), "up"),
    **dict.fromkeys(("\x1b[B", "\x1bOB", "j"), "down"),
    "\x1b[5~": "page up",
    **dict.fromkeys(("\x1b[6~", " "), "page down"),
    **dict.fromkeys(("\x1b[H", "\x1b[1~", "\x1bOH"), "home"),
    **dict.fromkeys(("\x1b[F", "\x1b[4~", "\x1bOF"), "end"),
    "\x1b": "escape",
    "\x0c": "redraw",
    **dict.fromkeys(("\r", "\n"), "enter"),
}
_SEQUENCE = re.compile(r"\x1b[\[O][^a-zA-Z~]*[a-zA-Z~]|.", re.DOTALL)
_MOST_KEPT = 1000


def require_terminal() -> None:
    """Raise ConfigurationError where there is no terminal to draw on."""
    instead = "use '--log console' (the callback left out), which writes lines anywhere"
    for name, stream in (("input", sys.stdin), ("output", sys.stdout)):
        if stream is None or stream.closed or not stream.isatty():
            raise ConfigurationError(f"'top' draws on a terminal, and standard {name} is not a terminal: {instead}")
    if os.environ.get("TERM", "dumb") == "dumb":
        raise ConfigurationError(f"'top' draws on a terminal, and TERM=dumb cannot move its cursor: {instead}")
    require("'top'", "dashboard", "rich")


class TerminalScreen:
    """The terminal of standard input and output, from :meth:`open` to :meth:`close`.

    The display would overwrite printed lines: they go to ``on_output``, and the last 1,000 texts are printed when the
    terminal is restored, at the latest when the process ends. Ctrl-Z restores it while the process is stopped."""

    def __init__(self, on_output: Callable[[str], object]) -> None:
        self._on_output = on_output
        self._is_open = False
        self._lock = threading.RLock()
        self._before: list[Any] = []
        self._drawn: list[str] = []
        self._kept: deque[tuple[TextIO, str]] = deque(maxlen=_MOST_KEPT)
        self._streams: dict[str, TextIO] = {}
        self._on_stop_before: Any = None
        self._pending = ""

    def open(self) -> None:
        self._before = termios.tcgetattr(sys.stdin.fileno())
        self._input, self._output = sys.stdin.fileno(), sys.stdout.fileno()
        self._streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        for name, stream in self._streams.items():
            stream.flush()
            setattr(sys, name, _Lines(self, stream))
        atexit.register(self.close)
        if threading.current_thread() is threading.main_thread():
            self._on_stop_before = signal.signal(signal.SIGTSTP, self._on_stop)
        self._is_open = True
        self._enter()

    def close(self) -> None:
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            self._leave()
        atexit.unregister(self.close)
        for name, stream in self._streams.items():
            setattr(sys, name, stream)
        if len(self._kept) == _MOST_KEPT:
            self._kept[0] = self._streams["stderr"], "earlier output is left out:\n"
        for stream, text in self._kept:
            with contextlib.suppress(OSError, ValueError):
                stream.write(text)
                stream.flush()
        self._kept.clear()
        if threading.current_thread() is threading.main_thread() and self._on_stop_before is not None:
            signal.signal(signal.SIGTSTP, self._on_stop_before)

    @property
    def size(self) -> tuple[int, int]:
        try:
            size = os.get_terminal_size(self._output)
        except OSError:
            return 80, 24
        # A terminal without a set size reports 0.
        return size.columns or 80, size.lines or 24

    def draw(self, lines: Sequence["Text"], width: int, height: int) -> None:
        from rich.console import Console

        # Colours of the real terminal; NO_COLOR is obeyed.
        console = Console(
            file=self._streams["stdout"], force_terminal=True, width=width, height=height, legacy_windows=False
        )
        drawn = []
        for line in lines[:height]:
            with console.capture() as captured:
                console.print(line, end="", no_wrap=True, overflow="crop", crop=True, highlight=False)
            # Erasing after a full line would erase its last letter.
            drawn.append(captured.get().replace("\n", "") + ("" if line.cell_len >= width else _ERASE_REST))
        with self._lock:
            if not self._is_open:
                return
            before = self._drawn + [""] * len(drawn)
            changed = [f"\x1b[{place + 1};1H{text}" for place, text in enumerate(drawn) if text != before[place]]
            if len(drawn) < len(self._drawn):
                changed.append(f"\x1b[{len(drawn) + 1};1H\x1b[J")
            self._drawn = drawn
            self._put("".join(changed))

    @property
    def is_blank(self) -> bool:
        return not self._drawn

    def redraw(self) -> None:
        with self._lock:
            self._drawn = []
            if self._is_open:
                self._put(_CLEAR)

    def keys(self, seconds: float) -> Iterator[str]:
        """Return keys pressed within ``seconds``: a letter, or a name such as ``up``; ``gone`` without a terminal."""
        try:
            ready, _, _ = select.select([self._input], [], [], seconds)
            data = os.read(self._input, 1024) if ready else b""
        except (OSError, ValueError):
            ready, data = [self._input], b""
        if ready and not data:
            yield "gone"
        for sequence in _SEQUENCE.findall(data.decode(errors="ignore")):
            yield _KEYS.get(sequence, sequence)

    def keep(self, stream: TextIO, text: str) -> None:
        with self._lock:
            self._kept.append((stream, text))
            *lines, self._pending = (self._pending + text).split("\n")
        for line in lines:
            if line.strip():
                self._on_output(line)

    def _enter(self) -> None:
        tty.setcbreak(self._input)
        self._drawn = []
        self._put(_ENTER)

    def _leave(self) -> None:
        with contextlib.suppress(OSError):
            self._put(_LEAVE)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)

    def _put(self, text: str) -> None:
        data = text.encode()
        while data:
            data = data[os.write(self._output, data) :]

    def _on_stop(self, _number: int, _frame: FrameType | None) -> None:
        with self._lock:
            if self._is_open:
                self._leave()
            os.kill(os.getpid(), signal.SIGSTOP)
            if self._is_open:
                self._enter()


class _Lines(io.TextIOBase):
    def __init__(self, screen: TerminalScreen, stream: TextIO) -> None:
        self._screen = screen
        self.stream = stream

    def write(self, text: str) -> int:
        self._screen.keep(self.stream, text)
        return len(text)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding
