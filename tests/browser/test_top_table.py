"""The table of all runs in a real terminal, by the real command, and the way to a run and back."""

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import running
from helpers import wait_for
from run_folders import write_run
from terminals import Terminal

pytestmark = pytest.mark.timeout(180)

CONSUMER = str(Path(sys.executable).with_name("consumer"))
HOSTILE = "pear\x1b[2J\u202e"


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    """Three runs; a greater rate gives a better accuracy."""
    where = Path(tempfile.mkdtemp(prefix="ol-", dir="/tmp"))
    for name, rate in (("apple", 0.1), ("banana", 0.3), ("cherry", 0.2)):
        write_run(where, name, [1 / batch - rate for batch in (1, 2, 3)], rate, config={"lr": rate})
    yield where
    shutil.rmtree(where)


@pytest.fixture
def runs(template: Path, runs_dir: Path) -> Path:
    """The three, in the usual folder of one test alone."""
    shutil.copytree(template, runs_dir, dirs_exist_ok=True)
    return runs_dir


@pytest.fixture
def open_terminal() -> Iterator[Callable[..., Terminal]]:
    """Opens terminals with ``consumer --callbacks top`` and more arguments."""
    with contextlib.ExitStack() as opened:

        def open_one(*arguments: str, lines: int = 24) -> Terminal:
            terminal = Terminal(CONSUMER, "--callbacks", "top", *arguments, lines=lines)
            opened.callback(terminal.close)
            return terminal

        yield open_one


def order(terminal: Terminal) -> list[str]:
    """The names in the table, from the top."""
    return [line[2:].split()[0] for line in terminal.text.splitlines() if "✓" in line]


def test_runs_are_found_sorted_opened_and_left_again(runs: Path, open_terminal: Callable[..., Terminal]) -> None:
    (runs / "cherry").rename(runs / HOSTILE)
    terminal = open_terminal()
    assert "▸ " in terminal.wait_for("3 runs", "newest first", "banana", "pear\\x1b[2J", "0.3 *")
    # One column after the other, until runs are sorted by what was measured best.
    for _ in range(20):
        if "Accuracy.best↓" in terminal.text:
            break
        before = terminal.text
        terminal.press("\x1b[C")
        wait_for(lambda before=before: terminal.text != before, "another order")
    assert [name[:5] for name in order(terminal)] == ["banan", "pear\\", "apple"]
    terminal.press("r")
    wait_for(lambda: order(terminal)[0] == "apple", "the other way round")
    terminal.press("/lr > 0.1")
    terminal.wait_for("2 of 3 runs", "find: lr > 0.1")
    terminal.press(" and x")
    terminal.wait_for("2 of 3 runs", "no run has 'x'")
    terminal.press("\x7f" * 6 + "\r")
    terminal.wait_for("q quit", "2 of 3 runs")
    terminal.press("\x1b[B")
    terminal.wait_for("▸ banana")
    terminal.press("\r")
    terminal.wait_for("✓ finished  banana", "loss ", "Accuracy", "q back")
    terminal.press("\x1b")
    terminal.wait_for("▸ banana", "2 of 3 runs")
    terminal.press("\r")
    terminal.wait_for("✓ finished  banana")
    terminal.press("q")
    terminal.wait_for("▸ banana", "2 of 3 runs")
    terminal.press("\x1b")
    terminal.wait_for("3 runs", "apple")
    terminal.resize(50, 10)
    wait_for(lambda: "q quit" in terminal.text.splitlines()[-1], "the keys in the new last line")
    assert terminal.written.count(b"\x1b[?1049h") == 1, "one screen for all"
    terminal.press("q")
    assert terminal.wait_for_end() == 0
    assert terminal.is_restored


def test_live_runs_move_and_the_only_one_is_shown_at_once(runs: Path, open_terminal: Callable[..., Terminal]) -> None:
    with running("damson"):
        wait_for(lambda: (runs / "damson" / "run.json").exists(), "the run")
        terminal = open_terminal()
        terminal.wait_for("● live", "damson", "loss ", "q quit", "Esc all runs", timeout=40)
        terminal.press("\x1b")
        terminal.wait_for("4 runs · 1 live", "▸ damson", "apple")

        def loss() -> str:
            return next(line for line in terminal.text.splitlines() if "damson" in line)

        before = loss()
        wait_for(lambda: loss() != before, "another loss")
        terminal.press("\r")
        terminal.wait_for("● live", "loss ", "S stop")
        terminal.press("S")
        terminal.wait_for("stop the training of damson?")
        terminal.press("y")
        terminal.wait_for("■ stopped  damson")
        terminal.press("q")
        terminal.wait_for("▸ damson", "■ stopped")
        shutil.rmtree(runs / "damson")
        terminal.wait_for("3 runs")
        assert "damson" not in terminal.text
        terminal.press("\x03")
        assert terminal.wait_for_end() == 0
        assert terminal.is_restored
