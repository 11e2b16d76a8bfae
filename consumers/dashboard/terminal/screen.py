"""A terminal that is drawn on as a whole, and that is given back as it was."""

import atexit
import contextlib
import io
import os
import select
import signal
import sys
import threading
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
    **dict.fromkeys(("\x1b[C", "\x1bOC"), "right"),
    **dict.fromkeys(("\x1b[D", "\x1bOD"), "left"),
    **dict.fromkeys(("\x1b[5~",), "page up"),
    **dict.fromkeys(("\x1b[6~", " "), "page down"),
    **dict.fromkeys(("\x1b[H", "\x1b[1~", "\x1bOH"), "home"),
    **dict.fromkeys(("\x1b[F", "\x1b[4~", "\x1bOF"), "end"),
    "\x1b": "escape",
    "\x0c": "redraw",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\r": "enter",
    "\n": "enter",
}
_MOST_KEPT = 1000
_LONGEST_LINE = 4096


def require_terminal() -> None:
    """Says what to use instead where there is nothing to draw on.

    Raises :class:`offloop.bus.errors.ConfigurationError`."""
    instead = "use '--log progress' (the callback left out), which writes lines anywhere"
    # A display of the replay before, which stays until the next one takes its place, has the terminal.
    shown = sys.stdout.stream if isinstance(sys.stdout, _Lines) else sys.stdout
    for name, stream in (("input", sys.stdin), ("output", shown)):
        if stream is None or stream.closed or not stream.isatty():
            raise ConfigurationError(f"'top' draws on a terminal, and standard {name} is none: {instead}")
    if os.environ.get("TERM", "dumb") == "dumb":
        raise ConfigurationError(
            f"'top' draws on a terminal, and TERM says that this one cannot move its cursor: {instead}"
        )
    require("'top'", "dashboard", "rich")


class TerminalScreen:
    """The terminal of standard input and output, from :meth:`open` to :meth:`close`.

    What is printed meanwhile would be drawn over: it goes to ``on_output``, line by line, and the last of it is printed
    when the terminal is given back. That happens at the latest when the process ends, by SIGTERM too; Ctrl-Z gives it
    back for as long as the process is stopped.
    """

    def __init__(self, on_output: Callable[[str], object]) -> None:
        self.on_output = on_output
        self.is_typing = False
        """Whether letters that move are taken as letters."""
        self._is_open = False
        self._lock = threading.RLock()
        self._before: list[Any] = []
        self._drawn: list[str] = []
        self._kept: deque[tuple[TextIO, str]] = deque(maxlen=_MOST_KEPT)
        self._is_cut = False
        self._streams: dict[str, TextIO] = {}
        self._handlers: dict[int, Any] = {}
        self._pending = ""

    def open(self) -> None:
        """Takes the terminal."""
        import termios

        self._before = termios.tcgetattr(sys.stdin.fileno())
        self._input, self._output = sys.stdin.fileno(), sys.stdout.fileno()
        self._streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        for name, stream in self._streams.items():
            stream.flush()
            setattr(sys, name, _Lines(self, stream))
        atexit.register(self.close)
        if threading.current_thread() is threading.main_thread():
            for number, handler in ((signal.SIGTERM, self._on_term), (signal.SIGTSTP, self._on_stop)):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, handler)
        self._is_open = True
        self._enter()

    def close(self) -> None:
        """Gives the terminal back, and prints what was kept."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            self._leave()
        atexit.unregister(self.close)
        for name, stream in self._streams.items():
            setattr(sys, name, stream)
        cut = [(self._streams["stderr"], "what was printed before this is left out:\n")] if self._is_cut else []
        for stream, text in (*cut, *self._kept):
            with contextlib.suppress(OSError, ValueError):
                stream.write(text)
                stream.flush()
        self._kept.clear()
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._handlers.items():
                if signal.getsignal(number) in (self._on_term, self._on_stop):
                    signal.signal(number, handler)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        try:
            size = os.get_terminal_size(self._output)
        except OSError:
            return 80, 24
        # A terminal that was never given a size has none.
        return size.columns or 80, size.lines or 24

    def draw(self, lines: Sequence["Text"], width: int, height: int) -> None:
        """Shows lines, each cut to the width; writes those that have changed."""
        from rich.console import Console

        # Colours are what the real terminal has; NO_COLOR is obeyed.
        console = Console(
            file=self._streams["stdout"], force_terminal=True, width=width, height=height, legacy_windows=False
        )
        # What is erased behind a line that reaches the edge would be its last letter.
        drawn = [_rendered(console, line) + ("" if line.cell_len >= width else _ERASE_REST) for line in lines[:height]]
        with self._lock:
            if not self._is_open:
                return
            changed = [
                f"\x1b[{number};1H{text}"
                for number, text in enumerate(drawn, 1)
                if number > len(self._drawn) or self._drawn[number - 1] != text
            ]
            if len(drawn) < len(self._drawn):
                changed.append(f"\x1b[{len(drawn) + 1};1H\x1b[J")
            self._drawn = drawn
            self._put("".join(changed))

    @property
    def is_blank(self) -> bool:
        """Whether nothing has been drawn since it was taken."""
        return not self._drawn

    def redraw(self) -> None:
        """Has the next drawing write everything."""
        with self._lock:
            self._drawn = []
            if self._is_open:
                self._put(_CLEAR)

    def keys(self, seconds: float) -> Iterator[str]:
        """The keys that were pressed, after waiting so long for one: a letter, or a name such as ``up``; ``gone`` when
        the terminal is."""
        try:
            ready, _, _ = select.select([self._input], [], [], seconds)
            data = os.read(self._input, 1024) if ready else b""
        except (OSError, ValueError):
            ready, data = [self._input], b""
        if ready and not data:
            yield "gone"
            return
        text = data.decode(errors="ignore")
        while text:
            sequence = _first_sequence(text)
            text = text[len(sequence) :]
            yield sequence if self.is_typing and sequence.isprintable() else _KEYS.get(sequence, sequence)

    def take(self, stream: TextIO, text: str) -> None:
        """Takes what was to be printed."""
        with self._lock:
            self._is_cut |= len(self._kept) == _MOST_KEPT
            self._kept.append((stream, text))
            *lines, rest = (self._pending + text).split("\n")
            self._pending = rest[-_LONGEST_LINE:]
        for line in lines:
            if line.strip():
                self.on_output(line)

    def _enter(self) -> None:
        import tty

        tty.setcbreak(self._input)
        self._drawn = []
        self._put(_ENTER)

    def _leave(self) -> None:
        import termios

        with contextlib.suppress(OSError):
            self._put(_LEAVE)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)

    def _put(self, text: str) -> None:
        data = text.encode()
        while data:
            data = data[os.write(self._output, data) :]

    def _on_term(self, number: int, _frame: FrameType | None) -> None:
        before = self._handlers[number]
        self.close()
        signal.signal(number, before if before is not None else signal.SIG_DFL)
        signal.raise_signal(number)

    def _on_stop(self, _number: int, _frame: FrameType | None) -> None:
        with self._lock:
            if self._is_open:
                self._leave()
            os.kill(os.getpid(), signal.SIGSTOP)
            if self._is_open:
                self._enter()


class _Lines(io.TextIOBase):
    """Stands in the place of a stream."""

    def __init__(self, screen: TerminalScreen, stream: TextIO) -> None:
        self._screen = screen
        self.stream = stream

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            # Others find out by this which kind of stream it is.
            raise TypeError(f"write() takes a string, not {type(text).__name__}")
        self._screen.take(self.stream, text)
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


def _rendered(console: Any, line: "Text") -> str:
    with console.capture() as captured:
        console.print(line, end="", no_wrap=True, overflow="crop", crop=True, soft_wrap=False, highlight=False)
    return str(captured.get()).replace("\n", "")


def _first_sequence(text: str) -> str:
    """The bytes of one key."""
    if text[0] != "\x1b" or len(text) == 1 or text[1] not in "[O":
        return text[0]
    for place, letter in enumerate(text[2:], 3):
        if letter.isalpha() or letter == "~":
            return text[:place]
    return text
