"""Output for people, and log records. Text of a peer or file is escaped, so that it cannot drive the terminal."""

import contextlib
import logging
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, TextIO, TypeGuard

KEPT = 100

LOGGERS = ("offloop", "offloop.broker", "offloop.index", "offloop.segments", "offloop.summary")
"""The loggers of this project, whose records are escaped."""


def escape(text: str) -> str:
    """Escape what a terminal would obey or hide as in a Python string.

    Control characters and line breaks (``\\x1b``, ``\\n``), bidirectional marks (``\\u202e``), characters without
    width, and bytes of a path that are not UTF-8 (``\\udcff``)."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or unicodedata.category(one) == "Zs" else one.encode("unicode_escape").decode()
        for one in text
    )


def one_line(text: str) -> str:
    """Replace line breaks, with the blanks around them, by a blank, and escape the rest."""
    if text.isprintable():
        return text
    return escape(" ".join(filter(None, map(str.strip, text.splitlines()))))


def say(line: str, *, err: bool = False) -> None:
    """Print an escaped line. Characters that the stream's encoding lacks are escaped too.

    Without the stream, or where standard error cannot be written, nothing is printed: a notice stops no training.
    Raises OSError if standard output cannot be written."""
    try:
        _write_line(line, sys.stderr if err else sys.stdout)
    except (OSError, ValueError):  # a closed file is a ValueError
        if not err:
            raise


def notice(line: str) -> None:
    """Print a line on standard output as :func:`say`, for a training, which continues if it cannot be written."""
    with contextlib.suppress(OSError, ValueError):
        say(line)


def _write_line(line: str, stream: TextIO | None) -> None:
    if stream is None:  # it was closed when this process started
        return
    text = f"{escape(line)}\n"
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = text.encode(stream.encoding, "backslashreplace").decode(stream.encoding)
    if _is_shared and any(stream is one for one in (sys.__stdout__, sys.__stderr__)) and is_screen(stream):
        text = "".join(_above_last_line(line, stream) for line in text.splitlines())
    stream.write(text)
    stream.flush()


_USUAL_COLUMNS = 80
_STYLE = re.compile(r"\x1b\[[\d;]*m")
_is_shared = False


def share_terminal() -> None:
    """Declare that another program may draw a progress bar on the terminal.

    From now on :func:`say`, and log records of ours without a handler, leave the terminal's last line whole."""
    global _is_shared
    _is_shared = True


def is_screen(stream: TextIO | None) -> TypeGuard[TextIO]:
    """Return whether a stream is a terminal with a movable cursor."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def columns_of(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _USUAL_COLUMNS
    except OSError:
        return _USUAL_COLUMNS


class AboveLastLine:
    """A stream that writes whole lines above the terminal's last line, where a progress bar may be.

    Text with a carriage return is written unchanged."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._begun = ""

    def write(self, text: str) -> int:
        if "\r" in text:
            return self.stream.write(text)
        *lines, self._begun = (self._begun + text).split("\n")
        self.stream.write("".join(_above_last_line(line, self.stream) for line in lines))
        self.stream.flush()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def close(self) -> None:
        """Print the pending text. The stream stays open."""
        if self._begun:
            self.write("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _above_last_line(line: str, stream: TextIO) -> str:
    """Escape sequences that insert a line above the cursor's line; that line and the cursor move down."""
    line, columns = line.expandtabs(), columns_of(stream)
    width = sum(1 + (unicodedata.east_asian_width(letter) in "WF") for letter in _STYLE.sub("", line))
    rows = max(1, -(-width // columns))
    # Down and up in the same column: at the lower end of the terminal this scrolls.
    return f"{rows * _DOWN}\x1b[{rows}A{_SAVE}\r\x1b[{rows}L{line}{_RESTORE}\x1b[{rows}B"


_DOWN, _SAVE, _RESTORE = "\x1bD", "\x1b7", "\x1b8"


def escape_records(*names: str) -> None:
    """Escape the messages and tracebacks of these loggers."""
    for name in names:
        logging.getLogger(name).addFilter(_escape_record)


def _escape_record(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if not message.isprintable():
        record.msg, record.args = escape(message), None
    if record.exc_info and not record.exc_text:
        record.exc_text = "\n".join(map(escape, logging.Formatter().formatException(record.exc_info).split("\n")))
    if not _is_shared or record.exc_info or logging.getLogger(record.name).hasHandlers():
        return True
    # As the logging module prints records without a handler.
    if (last := logging.lastResort) is not None and record.levelno >= last.level:
        say(record.getMessage(), err=True)
    return False


escape_records(*LOGGERS)


LONGEST_NAME = 60  # of a metric or hyperparameter in the first column of a table


def cut_in_the_middle(text: str, longest: int) -> str:
    """Shorten a name, keeping its beginning and end, where names of runs differ."""
    if len(text) <= longest:
        return text
    end = (longest - 3) // 2
    return f"{text[: longest - 3 - end]}...{text[len(text) - end :]}"


GAP = "  "
_INDENT = " " * 4


def wrap(cells: Iterable[str]) -> list[str]:
    """Join cells to lines as wide as the terminal (80 without one), never dividing a cell."""
    width = shutil.get_terminal_size().columns
    lines: list[str] = []
    for cell in cells:
        if lines and len(lines[-1]) + len(GAP) + len(cell) <= width:
            lines[-1] += GAP + cell
        else:
            lines.append(_INDENT + cell if lines else cell)
    return lines


def widest_cell() -> int:
    return max(shutil.get_terminal_size().columns - len(_INDENT), 1)


def shorten(lines: Iterable[str], what: str, most: int = KEPT) -> list[str]:
    kept = Damage(what, most)
    for line in lines:
        kept.add(line)
    return kept.lines()


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def say_table(rows: Iterable[Sequence[str]]) -> None:
    for line in table([tuple(map(one_line, row)) for row in rows]):
        say(line)


def cut_at_end(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def short_text(text: str) -> str:
    return cut_at_end(one_line(text), 60)


class Damage:
    """Keeps the first lines and counts the others."""

    def __init__(self, what: str = "places like these", most: int = KEPT) -> None:
        self._what, self._most = what, most
        self._kept: list[str] = []
        self._more = 0

    def __bool__(self) -> bool:
        return bool(self._kept)

    def add(self, line: str) -> None:
        if len(self._kept) < self._most:
            self._kept.append(line)
        else:
            self._more += 1

    def add_all(self, other: "Damage") -> None:
        for line in other._kept:
            self.add(line)
        self._more += other._more

    def lines(self) -> list[str]:
        return [*self._kept, f"and {self._more:,} more {self._what}"] if self._more else list(self._kept)
