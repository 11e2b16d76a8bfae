"""Console output as a terminal would show it, and its files."""

import errno
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyte
from hypothesis import given
from hypothesis import strategies as st

from offloop.bus.broker import console
from offloop.bus.broker.console import ConsoleFile, Screen
from offloop.bus.printing import AboveLastLine
from offloop.bus.runs.console import SCREEN_LINES, console_path, last_traceback, read_console

PARTS = (
    *("\r", "\n", "\b", "\x1b[A", "\x1b[2A", "\x1b[K", "\x1b[1K", "\x1b[2K", "\x1b[J", "\x1b[L"),
    *("\x1b[1;31m", "\x1b[m"),
)
ODD = (
    *("\x1b", "\x1b[", "\x1b[3", "\x1b]0;title\x07", "\x1b]8;;http://a\x1b\\", "\x1b(B", "é", "漢", "\x00", "\t"),
    "\x1b[1B",
)


class Terminal:
    """A terminal of many lines, for :class:`AboveLastLine`."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...

    def fileno(self) -> int:
        raise OSError


def above(line: str) -> str:
    terminal: Any = Terminal()
    AboveLastLine(terminal).write(f"{line}\n")
    return str(terminal.text)


@given(st.lists(st.sampled_from([*PARTS, above("note")]) | st.text("abcdef ", min_size=1, max_size=8), max_size=15))
def test_a_screen_shows_what_a_terminal_shows(parts: list[str]) -> None:
    terminal = pyte.Screen(130, 40)
    terminal.set_mode(pyte.modes.LNM)
    pyte.Stream(terminal).feed("".join(parts))
    screen = Screen()
    text = screen.feed("".join(parts)) + "\n".join(screen.lines)
    shown = [line.rstrip() for line in terminal.display]
    assert [line.rstrip() for line in text.split("\n")] == shown[: text.count("\n") + 1]
    assert not any(shown[text.count("\n") + 1 :])


@given(st.lists(st.sampled_from([*PARTS, *ODD]) | st.text(max_size=40), max_size=60), st.data())
def test_output_may_be_read_in_any_parts(tmp_path_factory: Any, parts: list[str], data: st.DataObject) -> None:
    whole = "".join(parts).encode("utf-8", "backslashreplace") + b"\xff\xc3"
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=8))
    folder = tmp_path_factory.mktemp("console")
    files = [ConsoleFile(folder / "console-1-0.log"), ConsoleFile(folder / "console-1-1.log")]
    files[0].add(whole)
    for begin, end in pairwise([0, *sorted(cuts), len(whole)]):
        files[1].add(whole[begin:end])
    for file in files:
        file.close()
    texts = [(folder / f"console-1-{rank}.log").read_bytes() for rank in (0, 1)]
    assert texts[0] == texts[1]
    text = texts[0].decode()
    assert all(character.isprintable() or character in "\n\t" or character >= "\x80" for character in text)


def test_of_long_output_the_newest_is_kept_and_a_reader_follows(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(console, "MAX_BYTES", 3000)
    path = console_path(tmp_path, 1, 0)
    file = ConsoleFile(path)
    lines = [f"line {number}" for number in range(1000)]
    followed, place = "", 0
    for number, line in enumerate(lines):
        if number % 300 == 299:
            # As a new broker does.
            file.close()
            file = ConsoleFile(path)
        file.add(f"{line[:3]}".encode())
        file.add(f"{line[3:]}\n".encode())
        if number % 7 == 0:
            part = read_console(path, place)
            assert part.begin == place
            followed, place = followed + part.settled, part.end
    part = read_console(path, place)
    assert f"{followed}{part.settled}{part.rest}".splitlines() == lines
    assert path.stat().st_size < 3500
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    # Older text, from its end to its begin.
    newest = read_console(path)
    assert newest.is_first
    removed = f"[{newest.begin:,} bytes of earlier output were removed]\n"
    assert path.read_text() == removed + newest.settled + newest.rest
    assert ("\n".join(lines) + "\n")[newest.begin :] == newest.settled + newest.rest
    pieces, part = [""], newest._replace(begin=newest.end, is_first=False)
    while not part.is_first:
        part = read_console(path, before=part.begin, most=500)
        pieces.insert(0, part.settled)
    assert "".join(pieces) == newest.settled
    assert read_console(path, 5).begin == newest.begin
    assert read_console(path, 10**30)[:2] == ("", "")
    file.close()


def test_output_is_written_later_after_a_full_disk(tmp_path: Path, monkeypatch: Any) -> None:
    file = ConsoleFile(tmp_path / "console-1-0.log")
    file.add(b"before\n")
    write = os.pwrite

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", refuse)
    for number in range(SCREEN_LINES):
        file.add(f"meanwhile {number}\n".encode())
    monkeypatch.setattr(os, "pwrite", write)
    file.add(b"after\n")
    file.close()
    meanwhile = [f"meanwhile {number}" for number in range(SCREEN_LINES)]
    assert (tmp_path / "console-1-0.log").read_text().splitlines() == ["before", *meanwhile, "after"]


def test_a_very_long_line_is_divided(tmp_path: Path) -> None:
    file = ConsoleFile(tmp_path / "console-1-0.log")
    file.add(b"x" * 1_000_000)
    file.close()
    lines = (tmp_path / "console-1-0.log").read_text().split("\n")
    assert "".join(lines) == "x" * 1_000_000
    assert max(map(len, lines)) <= 1 << 14


def test_the_traceback_is_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    first = "Traceback (most recent call last):\n  File 'a'\nRuntimeError: connection lost\n"
    (tmp_path / "console-1-0.log").write_text(first)
    (tmp_path / "console-1-3.log").write_text("epoch 1\nTraceback (most recent call last):\n  x\nValueError: boom\n")
    (tmp_path / "console-2-0.log").write_text("fine\n")
    assert (
        last_traceback(tmp_path, 1, "ValueError: boom") == "Traceback (most recent call last):\n  x\nValueError: boom"
    )
    assert last_traceback(tmp_path, 1, "another") == first.rstrip()
    assert last_traceback(tmp_path, 2, "ValueError: boom") == ""
