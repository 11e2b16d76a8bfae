"""Captured console output of a run's ranks: its files, and reading them while they grow.

A rank writes into a pipe, from which its host's broker writes ``console-ATTEMPT-RANK.log`` (``bus/broker/console.py``).
The last lines of that file may still change. A long file becomes ``console-ATTEMPT-RANK.old.log``, and a new one
continues it."""

import contextlib
import errno
import fcntl
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from offloop.bus.files import NotAFileError, open_file

SCREEN_LINES = 16  # last lines of a file that may still change
PIECE_BYTES = 8 * 1024 * 1024  # size from which a file is continued by another one; an older one is kept

_PIPE_BYTES = 1024 * 1024
_FILE = re.compile(r"console-([1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})(?:\.old)?\.log")
_TRACEBACKS = ("Traceback (most recent call last):", "Fatal Python error: ")
_TRACEBACK_BYTES = 64 * 1024
_TRACEBACK_LINES = 40
_TRACEBACK_RANKS = 64


class Place(NamedTuple):
    """A place in a rank's output."""

    piece: int  # inode of the file
    offset: int


class ConsolePart(NamedTuple):
    settled: str
    """Lines that do not change any more, each with its line break."""
    rest: str
    """The last lines, which may still change."""
    begin: Place
    end: Place
    """Begin of ``rest``: read on from there."""
    is_next: bool
    """It begins at the requested place; otherwise the text between has been removed, or is left out."""
    is_first: bool
    """No older text is kept."""


def open_pipe(path: Path) -> int:
    """Open a rank's pipe. No read or write waits, and its content stays while one process has it open."""
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFileError(errno.EINVAL, "it is not a pipe", str(path))
    # The system bounds the pipes of all of a user's processes together.
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return descriptor


def console_path(run: Path, attempt: int, rank: int) -> Path:
    return run / f"console-{attempt}-{rank}.log"


def list_ranks(run: Path, attempt: int) -> list[int]:
    """Return the ranks with captured output in an attempt on this host."""
    with contextlib.suppress(OSError):
        found = [match for name in os.listdir(run) if (match := _FILE.fullmatch(name))]
        return sorted({int(match[2]) for match in found if int(match[1]) == attempt})
    return []


def read_console(
    path: Path, after: Place | None = None, before: Place | None = None, most: int | None = None
) -> ConsolePart | None:
    """Read captured output: of the ``most`` last bytes the whole lines. Returns ``None`` without any. Raises OSError.

    Args:
        path: :func:`console_path`.
        after: Read on from there, if possible.
        before: Read the text before it."""
    with contextlib.ExitStack() as stack:
        files = _open_pieces(path, stack)
        begins, size = {}, 0
        for inode in files:
            begins[inode] = size
            size += os.fstat(files[inode]).st_size
        if not files or (before is not None and before.piece not in begins):
            return None
        end = size if before is None else min(size, begins[before.piece] + before.offset)
        least = 0 if most is None else max(0, end - most)
        begin, is_next = least, False
        if after is not None and after.piece in begins:
            begin = max(least, begins[after.piece] + after.offset)
            is_next = begin == begins[after.piece] + after.offset <= end
        data = b"".join(
            os.pread(files[inode], max(0, end - max(begin, first)), max(0, begin - first))
            for inode, first in begins.items()
        )
    if begin and not is_next and b"\n" in data:
        cut = data.index(b"\n") + 1
        begin, data = begin + cut, data[cut:]
    rest = b"" if before is not None else b"\n".join(data.split(b"\n")[-SCREEN_LINES:])

    def place(at: int) -> Place:
        inode = max((one for one in begins if begins[one] <= at), key=lambda one: begins[one])
        return Place(inode, at - begins[inode])

    settled = data[: len(data) - len(rest)]
    texts = settled.decode("utf-8", "replace"), rest.decode("utf-8", "replace")
    return ConsolePart(*texts, place(begin), place(begin + len(settled)), is_next, begin == 0)


def _open_pieces(path: Path, stack: contextlib.ExitStack) -> dict[int, int]:
    """Open the files of a rank, the older one first: inodes and descriptors."""
    found: dict[int, int] = {}
    # The new one first: if it becomes the old one meanwhile, only the text since then is missing.
    for name in (path, path.with_suffix(".old.log")):
        with contextlib.suppress(FileNotFoundError):
            descriptor = open_file(name)
            stack.callback(os.close, descriptor)
            found.setdefault(os.fstat(descriptor).st_ino, descriptor)
    return dict(reversed(found.items()))


def last_traceback(run: Path, attempt: int, error: str) -> str | None:
    """Return the last traceback in the output of the rank that has failed by an ``error``, else of another rank."""
    found = None
    for rank in list_ranks(run, attempt)[:_TRACEBACK_RANKS]:
        with contextlib.suppress(OSError):
            part = read_console(console_path(run, attempt, rank), most=_TRACEBACK_BYTES)
            text = "" if part is None else part.settled + part.rest
            at = max(map(text.rfind, _TRACEBACKS))
            if at >= 0 and (found is None or error in text[at:]):
                found = "\n".join(text[at:].split("\n")[:_TRACEBACK_LINES]).rstrip()
                if error in found:
                    break
    return found
