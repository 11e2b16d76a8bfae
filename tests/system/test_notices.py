"""What is said while a training shows its progress has lines of its own, and a training introduces itself."""

import contextlib
import os
import signal
import sys
from itertools import groupby
from pathlib import Path

import pyte
import pytest
from brokers import broker_pid
from helpers import wait_for
from paths import SUPPORT
from terminals import Terminal
from training import gold_trainer

SCRIPT = """
import logging, sys
sys.path.insert(0, {tests!r})
from offloop.bus.types.event import Event
from training import Act, gold_trainer
import time

logging.basicConfig(format="LOG %(message)s")  # its handler holds the terminal from before the bar is there

def slow(event, state, logger):
    time.sleep(0.005)
    if int(state.timestamp.batch) == 30:
        print("PRINTED by an algorithm")

trainer = gold_trainer(
    2400, 6, algorithms=Act(slow, Event.BATCH_END), max_duration="1000000ba", publish=True, run_name="r",
    runs_dir={runs!r}, progress_bar=True, save_folder={saved!r}, save_interval="100000ba",
)
with trainer:
    trainer.fit()
"""


def test_notices_never_share_a_line_with_the_bar(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    script = SCRIPT.format(tests=str(SUPPORT), runs=str(runs), saved=str(tmp_path / "saved"))
    with contextlib.closing(Terminal(sys.executable, "-c", script, columns=300)) as terminal:
        wait_for(lambda: (terminal.text, b"PRINTED" in terminal.written)[1], "the bar and a printed line", 100)
        os.kill(broker_pid(runs / "r"), signal.SIGKILL)
        wait_for(lambda: (terminal.text, b"LOG " in terminal.written)[1], "the broker's end to be told")
        terminal.wait_for("left  loss")
        terminal.press("\x03")
        terminal.wait_for_end()
    lines = lines_of(terminal.written)
    assert lines[0].startswith("run r: recording to ")
    assert "watch it with: consumer --callbacks speed,lr --runs-dir" in lines[0]
    said = [line for line in lines if any(word in line for word in ("PRINTED", "LOG", "SIGINT:", "was stopped"))]
    # More than one line of the log where the next broker takes its time.
    kinds = [word for word, _ in groupby(line.split()[0] for line in said)]
    assert kinds == ["PRINTED", "LOG", "SIGINT:", "run"], lines
    assert said[-1] == "run r was stopped: signal SIGINT"
    assert not any("[" in line and "....]" in line for line in lines), "the bar is wiped at the end"


def lines_of(written: bytes) -> list[str]:
    """What a terminal that is high enough shows after that."""
    screen = pyte.Screen(300, 5000)
    pyte.ByteStream(screen).feed(written)
    return [line.rstrip() for line in screen.display if line.strip()]


def introduced(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "recording to" in line]


def test_a_training_introduces_itself_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gold_trainer(publish=True, runs_dir=tmp_path, run_name="r", progress_bar=True) as trainer:
        assert introduced(capsys) == [], "it has not begun"
        trainer.fit()
        trainer.fit("1ep")
    assert len(introduced(capsys)) == 1
