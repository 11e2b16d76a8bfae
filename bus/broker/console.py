"""Console output of ranks: read from their pipes, folded as a terminal would, and written to files."""

import codecs
import contextlib
import errno
import logging
import os
import re
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from offloop.bus.files import open_file
from offloop.bus.runs.console import REMOVED, SCREEN_LINES, console_path, open_pipe, removed_before
from offloop.bus.runs.writing import RunDirectory

_log = logging.getLogger("offloop.broker")

MAX_BYTES = 16 * 1024 * 1024  # size of a file from which its older half is removed

_WIDEST = 16 * 1024  # characters of a line; longer ones are divided
_READ_BYTES = 64 * 1024
_LAST_SECONDS = 2.0  # for the rest of the pipes at the end of the run
_SCREEN_BYTES = 4 * SCREEN_LINES * (_WIDEST + 1)
_UNKNOWN = b"\0"  # part of a file after a failed write

_PARTS = re.compile(
    "\x1b(\\[)([0-?]{0,30})[ -/]{0,3}([@-~])"  # cursor, erasing, colours
    "|\x1b\\][^\x07\x1b]{0,500}(?:\x07|\x1b\\\\)"  # titles, links
    "|\x1b([ -/]{0,3}[0-Z\\\\^-~])"
    "|([\n\r\b])|([^\x1b\n\r\b]+)|\x1b"
)
_INCOMPLETE = re.compile("\x1b(?:\\[[0-?]{0,30}[ -/]{0,3}|\\][^\x07\x1b]{0,500}\x1b?|[ -/]{0,3})\\Z")
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), 127])


class Screen:
    """The last lines of a terminal's output, in which progress bars move the cursor.

    Knows what bars use: carriage return, backspace, moving up and down, inserting and erasing lines. Other escape
    sequences are removed."""

    def __init__(self, lines: Sequence[str] = ("",)) -> None:
        self.lines: list[str] = list(lines)
        self._row, self._column = len(self.lines) - 1, len(self.lines[-1])
        self._saved = self._row, self._column
        self._rest = ""

    def feed(self, text: str) -> str:
        """Show a text, which may end anywhere. Returns the lines that have left the screen at its top."""
        text = self._rest + text
        incomplete = _INCOMPLETE.search(text)
        self._rest = "" if incomplete is None else incomplete[0]
        left: list[str] = []
        for part in _PARTS.finditer(text, 0, len(text) - len(self._rest)):
            bracket, given, final, escape, control, plain = part.groups("")
            if plain:
                self._write(plain.translate(_CONTROLS))
            else:
                self._control(bracket + final + escape + control, given)
            while len(self.lines) > SCREEN_LINES:
                left.append(self.lines.pop(0))
                self._row = max(0, self._row - 1)
                self._saved = max(0, self._saved[0] - 1), self._saved[1]
        return "".join(f"{line}\n" for line in left)

    def _write(self, text: str) -> None:
        while text:
            if self._column >= _WIDEST:
                self._control("\n", "")
            line, column = self.lines[self._row].ljust(self._column), self._column
            now, text = text[: _WIDEST - column], text[_WIDEST - column :]
            self._column += len(now)
            self.lines[self._row] = line[:column] + now + line[self._column :]

    def _control(self, kind: str, given: str) -> None:
        lines, row, column = self.lines, self._row, self._column
        count = min(int(given), SCREEN_LINES) if given.isdigit() else 0
        match kind:
            case "\n" | "D":
                if row == len(lines) - 1:
                    lines.append("")
                self._row, self._column = row + 1, 0 if kind == "\n" else column
            case "\r":
                self._column = 0
            case "\b":
                self._column = max(0, column - 1)
            case "[A":
                self._row = max(0, row - max(1, count))
            case "[B":
                self._row = min(len(lines) - 1, row + max(1, count))
            case "[L":
                lines[row:row] = [""] * max(1, count)
                self._column = 0
            case "[J" | "[K" if count == 0:
                lines[row] = lines[row][:column]
                if kind == "[J":
                    del lines[row + 1 :]
            case "[K":
                lines[row] = "" if count == 2 else " " * (column + 1) + lines[row][column + 1 :]
            case "7":
                self._saved = row, column
            case "8":
                self._row, self._column = min(self._saved[0], len(lines) - 1), self._saved[1]


class ConsoleFile:
    """The file of one rank's output, made at the first of it. A new broker continues it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._file, size, lines = -1, 0, [b""]
        with contextlib.suppress(FileNotFoundError):
            self._file = open_file(path, os.O_RDWR)
            size, (_, first) = os.fstat(self._file).st_size, removed_before(self._file)
            begin = max(first, size - _SCREEN_BYTES)
            lines = os.pread(self._file, _SCREEN_BYTES, begin).split(b"\n")[-SCREEN_LINES:]
        self._screen = Screen([line.decode("utf-8", "replace") for line in lines])
        self._shown = b"\n".join(lines)
        self._at = size - len(self._shown)  # where the screen begins in the file
        self._unwritten = b""

    def add(self, data: bytes) -> None:
        """Add output. On a full disk, the newest is kept until it can be written."""
        left = self._unwritten + self._screen.feed(self._decode(data)).encode()
        text = left + "\n".join(self._screen.lines).encode()
        try:
            if self._file < 0:
                self._file = open_file(self._path, os.O_RDWR | os.O_CREAT)
            if text.startswith(self._shown):
                self._write(text[len(self._shown) :], self._at + len(self._shown))
            else:
                # Shortened before, so that a reader finds no remains of the former text.
                if os.fstat(self._file).st_size > self._at + len(text):
                    os.ftruncate(self._file, self._at + len(text))
                self._write(text, self._at)
            self._at, self._shown, self._unwritten = self._at + len(left), text[len(left) :], b""
            left = b""
            if self._at >= MAX_BYTES:
                self._remove_half()
        except OSError as error:
            if self._shown != _UNKNOWN:
                _log.warning("%s cannot be written: %s", self._path, error.strerror)
            self._shown, self._unwritten = _UNKNOWN, left[-_SCREEN_BYTES:]

    def _write(self, data: bytes, at: int) -> None:
        if os.pwrite(self._file, data, at) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _remove_half(self) -> None:
        """Replace the file by another one with its newer half."""
        removed, first = removed_before(self._file)
        kept = os.pread(self._file, self._at + len(self._shown), self._at // 2).split(b"\n", 1)[-1]
        size = self._at + len(self._shown) - first
        text = REMOVED.format(removed + size - len(kept)).encode() + kept
        draft = self._path.with_suffix(".new")
        with open(open_file(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(text)
        os.replace(draft, self._path)
        full, self._file = self._file, open_file(self._path, os.O_RDWR)
        os.close(full)
        self._at = len(text) - len(self._shown)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)


class ConsoleRecorder:
    """Reads the pipes of an attempt's ranks, and writes their files."""

    def __init__(self, directory: RunDirectory, attempt: int) -> None:
        self._directory, self._attempt = directory, attempt
        self._pipes: deque[tuple[Path, int, ConsoleFile]] = deque()

    def attach(self, rank: int, *, is_new: bool) -> str:
        """Make the pipe of a rank, unless it exists, and return its name. Raises OSError."""
        path = self._directory.path / f"console-{rank}.pipe"
        if path not in (known for known, _, _ in self._pipes):
            if is_new:
                # A killed broker of an earlier attempt has left it.
                path.unlink(missing_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, 0o600)
            file = ConsoleFile(console_path(path.parent, self._attempt, rank))
            self._pipes.append((path, open_pipe(path), file))
        return path.name

    def read(self, seconds: float) -> None:
        """Read the pipes in turn, until they are empty or the time has passed."""
        until, idle = time.monotonic() + seconds, 0
        while idle < len(self._pipes) and time.monotonic() < until:
            _, pipe, file = self._pipes[0]
            self._pipes.rotate(-1)
            idle += 1
            with contextlib.suppress(BlockingIOError):
                file.add(os.read(pipe, _READ_BYTES))
                idle = 0

    def finish(self) -> None:
        """Read the rest, and remove the pipes."""
        self.read(_LAST_SECONDS)
        for path, pipe, file in self._pipes:
            os.close(pipe)
            file.close()
            with contextlib.suppress(OSError):
                path.unlink()
        self._pipes.clear()
