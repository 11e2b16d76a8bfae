"""What is printed for people and written to logs. Text of a peer, a recording or a file cannot drive the terminal that
shows it: control characters are escaped, also where the output goes to a file or a pipe."""

import logging
import sys
import unicodedata
from collections.abc import Iterable, Sequence

KEPT = 100

LOGGERS = ("offloop", "offloop.broker", "offloop.index", "offloop.segments", "offloop.summary")
"""The loggers of this project. What is logged through them is escaped."""


def escape(text: str) -> str:
    """The text with everything that a terminal would obey or hide written as in a Python string: control characters and
    line breaks (``\\x1b``, ``\\n``), bidirectional marks (``\\u202e``), characters without width, and the bytes of a
    path that are not UTF-8 (``\\udcff``)."""
    if text.isprintable():
        return text
    return "".join(letter if _is_shown(letter) else letter.encode("unicode_escape").decode() for letter in text)


def _is_shown(letter: str) -> bool:
    return letter.isprintable() or unicodedata.category(letter) == "Zs"


def one_line(text: str) -> str:
    """The text with a blank for each line break and the blanks around it, and all else escaped."""
    if text.isprintable():
        return text
    return escape(" ".join(filter(None, map(str.strip, text.splitlines()))))


def say(line: str, *, err: bool = False) -> None:
    """Prints a line on standard output or standard error, escaped. What the stream's encoding lacks is escaped too."""
    stream = sys.stderr if err else sys.stdout
    text = f"{escape(line)}\n"
    try:
        stream.write(text)
    except UnicodeEncodeError:
        stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
    stream.flush()


def _escape_record(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if not message.isprintable():
        record.msg, record.args = escape(message), None
    return True


for _name in LOGGERS:
    logging.getLogger(_name).addFilter(_escape_record)


def shorten(lines: Iterable[str], what: str, most: int = KEPT) -> list[str]:
    """The first lines, and how many more of ``what`` there are."""
    kept: list[str] = []
    more = 0
    for line in lines:
        if len(kept) < most:
            kept.append(line)
        else:
            more += 1
    return [*kept, f"and {more:,} more {what}"] if more else kept


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


class Damage:
    """A list of lines that keeps the first hundred and counts the others."""

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._more = 0

    def __bool__(self) -> bool:
        return bool(self._kept)

    def add(self, line: str) -> None:
        """Takes a line in."""
        if len(self._kept) < KEPT:
            self._kept.append(line)
        else:
            self._more += 1

    def add_all(self, other: "Damage") -> None:
        """Takes in what another one has."""
        for line in other._kept:
            self.add(line)
        self._more += other._more

    def lines(self) -> list[str]:
        """Those that were kept, and how many more there are."""
        return [*self._kept, f"and {self._more:,} more places like these"] if self._more else list(self._kept)
