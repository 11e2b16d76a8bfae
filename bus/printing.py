"""What is printed for people and written to logs. Text of a peer, a recording or a file cannot drive the terminal that
shows it: control characters are escaped, also where the output goes to a file or a pipe."""

import logging
import sys
import unicodedata

__all__ = ["LOGGERS", "escape", "one_line", "say"]

LOGGERS = ("offloop", "offloop.broker", "offloop.segments")
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
