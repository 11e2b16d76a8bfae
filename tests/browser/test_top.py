"""The terminal dashboard in a real terminal, on real runs, by the real command."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from consumers_stream import record_run, snapshots_of_training
from helpers import wait_for
from terminals import Terminal
from training import Act, gold_trainer

from offloop.bus import Event
from offloop.trainer import State

CONSUMER = str(Path(sys.executable).with_name("consumer"))


@pytest.fixture
def open_terminal(runs_dir: Path) -> Iterator[Callable[..., Terminal]]:
    with contextlib.ExitStack() as opened:

        def open_one(*arguments: str, callbacks: str = "top", **options: Any) -> Terminal:
            terminal = Terminal(CONSUMER, "--callbacks", callbacks, *arguments, **options)
            opened.callback(terminal.close)
            return terminal

        yield open_one


@pytest.fixture
def recording(runs_dir: Path) -> str:
    return str(record_run(runs_dir, "apples", snapshots_of_training(8, 4)))


def loss_on(text: str) -> str:
    """The value beside ``loss``, or nothing while only a part of a frame has been read."""
    found = [line.split()[1:2] for line in text.splitlines() if line.split()[:1] == ["loss"]]
    return "".join(found[0]) if found else ""


@pytest.mark.timeout(180)
def test_it_shows_a_live_run_follows_the_terminal_leaves_the_run_alone_and_commands_it(
    runs_dir: Path, open_terminal: Callable[..., Terminal]
) -> None:
    def press_keys() -> None:
        terminal = open_terminal("--wait")
        text = terminal.wait_for("● live", "fruit", "loss ", "training begins", "backward")
        assert "of 1000ep" in text
        assert "publishing" in text
        before = loss_on(text)
        wait_for(lambda: loss_on(terminal.text) not in ("", before), "another loss")

        terminal.resize(120, 40)
        wait_for(lambda: len(terminal.wait_for("q quit").splitlines()[0].rstrip()) > 100, "a header of the new width")
        terminal.resize(50, 12)
        wait_for(lambda: "q quit" in terminal.text.splitlines()[-1], "the keys in the new last line")
        terminal.resize(80, 24)

        terminal.press("e")
        wait_for(lambda: "loss " not in terminal.text, "the log alone")
        terminal.wait_for("epoch 0 begins")
        terminal.press("\x1b")
        terminal.wait_for("loss ")

        terminal.press("q")
        assert terminal.wait_for_end() == 0
        assert terminal.is_restored
        assert "detached from run fruit" in terminal.output_after()

        terminal = open_terminal()
        terminal.wait_for("● live", "loss ")
        terminal.press("p")
        terminal.wait_for("pause the training of fruit? y pauses it")
        terminal.press("n")
        wait_for(lambda: "pause the training" not in terminal.text, "the question to go")
        terminal.press("py")
        terminal.wait_for("paused", "'pause' took effect")
        terminal.press("p")
        terminal.wait_for("● live", "'resume' took effect")
        terminal.press("Sy")
        terminal.wait_for("■ stopped  fruit  top by ", "'stop' took effect")
        terminal.press("q")
        assert terminal.wait_for_end() == 0
        assert terminal.is_restored
        assert "run fruit stopped" in terminal.output_after()

    def step(event: Event, state: State, logger: object) -> None:
        time.sleep(0.02)
        if pressing.done():
            state.stop_training()

    options = {"publish": True, "run_name": "fruit", "max_duration": "1000ep"}
    with ThreadPoolExecutor(1) as other:
        # So many batches in an epoch that the first lines stay in the log.
        with gold_trainer(24_000, 6, algorithms=[Act(step, Event.BATCH_END)], **options) as trainer:
            pressing = other.submit(press_keys)
            trainer.fit()
        pressing.result()


def test_a_terminal_that_goes_away_ends_it(recording: str, open_terminal: Callable[..., Terminal]) -> None:
    # As under nohup: the signal of the terminal's end does not end the process.
    deaf = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        terminal = open_terminal("--replay", recording)
    finally:
        signal.signal(signal.SIGHUP, deaf)
    terminal.wait_for("✓ finished", "events handled")
    terminal.hang_up()
    assert terminal.process.wait(60) == 0


def test_a_stopped_process_gives_the_terminal_back_for_as_long(
    recording: str, open_terminal: Callable[..., Terminal]
) -> None:
    terminal = open_terminal("--replay", recording)
    terminal.wait_for("✓ finished")
    terminal.press("\x1a")
    wait_for(lambda: (terminal.text, terminal.is_restored)[1], "the terminal to be given back")
    terminal.process.send_signal(signal.SIGCONT)
    wait_for(lambda: (terminal.text, not terminal.is_restored)[1], "the terminal to be taken again")
    terminal.wait_for("✓ finished", "loss ")
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.wait_for_end() == 0
    assert terminal.is_restored


def test_a_defect_while_drawing_gives_the_terminal_back_and_is_shown(
    recording: str, open_terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(
        "import offloop.consumers.dashboard.terminal.display as display\n"
        "from offloop.consumers.dashboard.terminal.top import Top\n"
        "def frame(*_):\n"
        "    raise ZeroDivisionError('no frame')\n"
        "display.frame = frame\n"
    )
    # Python colours its tracebacks from 3.13 on.
    plain = {"PYTHON_COLORS": "0"}
    terminal = open_terminal("--replay", recording, callbacks=f"{tmp_path / 'broken.py'}:Top", environment=plain)
    assert terminal.wait_for_end() == 1
    assert terminal.is_restored
    assert "ZeroDivisionError: no frame" in terminal.output_after()
