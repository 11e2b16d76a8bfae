"""Captured console output of a run's ranks: its files, and reading them while they grow.

A rank writes into a pipe, from which its host's broker writes ``console-ATTEMPT-RANK.log`` (``bus/broker/console.py``).
The last lines of that file may still change. Of long output the file has the newest part, behind a line with the size
of the removed one. A place is a number of bytes from the beginning of the output."""

import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from offloop.bus.files import open_file

SCREEN_LINES = 16  # last lines of a file that may still change
REMOVED = "[{:,} bytes of earlier output were removed]\n"

_REMOVED = re.compile(rb"\[([0-9,]{1,25}) bytes of earlier output were removed\]\n")
_FILE = re.compile(r"console-([1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})\.log")
_TRACEBACKS = ("Traceback (most recent call last):", "Fatal Python error: ")
_TRACEBACK_BYTES = 64 * 1024
_TRACEBACK_LINES = 40
_TRACEBACK_RANKS = 64


class ConsolePart(NamedTuple):
    settled: str  # lines that do not change any more, each with its line break
    rest: str  # the last lines, which may still change
    begin: int
    end: int  # where the rest begins: the next part is read from there
    is_first: bool  # no earlier text is kept


def open_pipe(path: Path) -> int:
    """Open a rank's pipe. No read or write waits, and its content stays while one process has it open."""
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)


def console_path(run: Path, attempt: int, rank: int) -> Path:
    """Return the path of a rank's output."""
    return run / f"console-{attempt}-{rank}.log"


def list_ranks(run: Path, attempt: int) -> list[int]:
    """Return the ranks with captured output in an attempt on this host."""
    with contextlib.suppress(OSError):
        found = [match for name in os.listdir(run) if (match := _FILE.fullmatch(name))]
        return sorted(int(match[2]) for match in found if int(match[1]) == attempt)
    return []


def removed_before(descriptor: int) -> tuple[int, int]:
    """Return how many bytes were removed from a file's output, and the size of the line that says so."""
    match = _REMOVED.match(os.pread(descriptor, 100, 0))
    return (0, 0) if match is None else (int(match[1].replace(b",", b"")), match.end())


def read_console(path: Path, after: int = 0, before: int | None = None, most: int | None = None) -> ConsolePart:
    """Read the output from a place to another one, at most the ``most`` last bytes of it: whole lines. Raises OSError.

    Where the place has been removed, it begins later."""
    with open(open_file(path), "rb") as file:
        removed, first = removed_before(file.fileno())
        size = os.fstat(file.fileno()).st_size
        shift = removed - first  # from an offset to a place
        end = size if before is None else max(first, min(size, before - shift))
        begin = min(max(first, after - shift, 0 if most is None else end - most), end)
        file.seek(begin)
        data = file.read(end - begin)
    if begin not in (first, after - shift):
        begin, data = begin + data.find(b"\n") + 1, data[data.find(b"\n") + 1 :]
    rest = b"" if before is not None else b"\n".join(data.split(b"\n")[-SCREEN_LINES:])
    settled = data[: len(data) - len(rest)]
    texts = settled.decode("utf-8", "replace"), rest.decode("utf-8", "replace")
    return ConsolePart(*texts, begin + shift, begin + shift + len(settled), begin == first)


def last_traceback(run: Path, attempt: int, error: str) -> str:
    """Return the last traceback in the output of the rank that has failed by an ``error``, else of another rank."""
    found: list[str] = []
    for rank in list_ranks(run, attempt)[:_TRACEBACK_RANKS]:
        with contextlib.suppress(OSError):
            part = read_console(console_path(run, attempt, rank), most=_TRACEBACK_BYTES)
            text = part.settled + part.rest
            if (at := max(map(text.rfind, _TRACEBACKS))) >= 0:
                found.append("\n".join(text[at:].split("\n")[:_TRACEBACK_LINES]).rstrip())
    return next((one for one in found if error in one), found[0] if found else "")
