"""Lines at the bottom of a terminal that are redrawn, with all other output above them."""

import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, TextIO, cast

from offloop.bus.printing import LOGGERS, AboveLastLine, columns_of

_TO_LINE_START = "\r"

_ERASE_BELOW = "\x1b[J"


class Screen:
    """The lower lines of the terminal behind ``stream``. For several threads.

    While it is open, output of this process to a terminal through ``sys.stdout`` and ``sys.stderr`` appears above them,
    and so do records of this project's loggers, wherever a handler writes them. The cursor stays visible and no mode is
    changed, so that a killed process leaves a working terminal."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream.stream if isinstance(stream, AboveLastLine) else stream
        self._lock = threading.RLock()
        self._lines: list[str] = []
        self._drawn = 0
        self._at_line_start = True
        self._process = os.getpid()
        for name in LOGGERS:
            logging.getLogger(name).addFilter(self._make_way)
        self._replaced = {name: getattr(sys, name) for name in ("stdout", "stderr") if getattr(sys, name).isatty()}
        for name, original in self._replaced.items():
            setattr(sys, name, cast(TextIO, _Above(original, self)))

    @property
    def width(self) -> int:
        """Maximum length of a line; a line that reached the last column would wrap."""
        return columns_of(self.stream) - 1

    def draw(self, lines: Sequence[str]) -> None:
        with self._lock:
            self._lines = list(lines)
            if self._at_line_start:
                self._put(self._erased() + self._drawing())

    def leave(self, lines: Sequence[str]) -> None:
        """Print lines that stay, above the drawn ones."""
        if lines:
            self.write(self.stream, "".join(f"{line}\n" for line in lines))

    def write(self, stream: TextIO, text: str) -> int:
        """Print a text that stays. The drawn lines return with its next line break."""
        if os.getpid() != self._process:
            # A forked child has a copy of the lines, and perhaps of a locked lock.
            return stream.write(text)
        with self._lock:
            if self._drawn:
                self._put(self._erased())
            written = stream.write(text)
            if text:
                self._at_line_start = text.endswith("\n")
            if self._at_line_start and self._lines:
                stream.flush()
                self._put(self._drawing())
            return written

    def close(self) -> None:
        with self._lock:
            self.draw([])
            for name, original in self._replaced.items():
                current = getattr(sys, name)
                if isinstance(current, _Above) and current.screen is self:
                    setattr(sys, name, original)
            self._replaced = {}
            for name in LOGGERS:
                logging.getLogger(name).removeFilter(self._make_way)

    def _make_way(self, _record: logging.LogRecord) -> bool:
        """Erase the lines before a record, as a handler may write past the streams; the next drawing restores them."""
        if os.getpid() == self._process:
            with self._lock:
                self._put(self._erased())
        return True

    def _erased(self) -> str:
        if not self._drawn:
            return ""
        up = f"\x1b[{self._drawn - 1}A" if self._drawn > 1 else ""
        self._drawn = 0
        return f"{_TO_LINE_START}{up}{_ERASE_BELOW}"

    def _drawing(self) -> str:
        # A line that wraps would be one more to erase.
        width = self.width
        self._drawn = len(self._lines)
        return "\n".join(line[:width] for line in self._lines)

    def _put(self, text: str) -> None:
        if text:
            self.stream.write(text)
            self.stream.flush()


class _Above:
    def __init__(self, stream: TextIO, screen: Screen) -> None:
        self._stream = stream
        self.screen = screen

    def write(self, text: str) -> int:
        return self.screen.write(self._stream, text)

    def writelines(self, lines: Sequence[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
