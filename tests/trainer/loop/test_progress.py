"""What a training shows of itself on standard error."""

import errno
import io
import os
import re

import pytest
import torch
from gold import GoldMLP, gold_loader
from training import Act, FakeClock, fitted, gold_evaluators

from offloop.bus.types.event import Event
from offloop.trainer import State
from offloop.trainer.device.device import CpuDevice
from offloop.trainer.loop.progress import ProgressDisplay


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make_state() -> State:
    state = State(model=GoldMLP(), device=CpuDevice(), seed=1, run_name="r")
    state.max_duration = "4ba"
    state.batch_loss = torch.tensor(1.25)
    return state


def test_a_run_prints_a_line_for_each_epoch_and_one_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    fitted(progress_bar=True, eval_dataloader=gold_loader("eval_a", 12, 5))
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert len(lines) == 4
    assert max(map(len, lines)) <= 80
    assert re.fullmatch(r"epoch   0  loss 1\.39\d* +MulticlassAccuracy [\d.]+  CrossEntropy [\d.]+", lines[0])
    assert re.match(r"done: 2 ep, 8 ba, 48 sp in [\d.]+ s  loss 1\.38\d* +Multi", lines[2])
    assert re.fullmatch(r"    CrossEntropy [\d.]+", lines[3])


def test_long_epochs_get_a_line_every_five_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock(0)

    def tick(event: Event, state: State, logger: object) -> None:
        clock.seconds += 1

    act = Act(tick, Event.BATCH_START)
    fitted(72, clock=clock, algorithms=act, max_duration="1ep", progress_bar=True)
    batches = re.findall(r"^ *(\d+)%  epoch 0  batch (\d+)  \d+s left  loss ", capsys.readouterr().err, re.MULTILINE)
    assert batches == [("42", "5"), ("83", "10")]


def test_a_terminal_gets_a_bar_that_is_redrawn_in_place_and_wiped() -> None:
    clock, terminal = FakeClock(0), Terminal()
    state = make_state()
    progress = ProgressDisplay(state, clock, terminal)
    assert progress.next_draw == 100_000_000
    state.timestamp = state.timestamp.advance_batch(6, 0, 10)
    progress.draw()
    assert terminal.getvalue() == "\r[=====...............]   25%  epoch 0  batch 1  0s left  loss 1.25\x1b[K"
    clock.seconds = 2
    progress.draw()
    assert progress.next_draw == 2_100_000_000
    progress.close()
    progress.close()
    assert terminal.getvalue().endswith("loss 1.25\x1b[K\r\x1b[J")
    assert "\n" not in terminal.getvalue()


class FullDisk(Terminal):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_training_continues_where_its_progress_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", FullDisk())
    assert int(fitted(progress_bar=True).state.timestamp.batch) == 8


def test_an_evaluation_is_shown_once_and_a_stop_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def stop(event: Event, state: State, logger: object) -> None:
        if int(state.timestamp.batch) == 14:
            state.stop_training()

    fitted(
        max_duration="9ep",
        eval_dataloader=gold_evaluators({"eval_b": {"n": 8, "batch_size": 4}}),
        eval_interval="2ep",
        algorithms=Act(stop, Event.BATCH_START),
        progress_bar=True,
    )
    *epochs, last, more = capsys.readouterr().err.splitlines()
    assert ["MulticlassAccuracy" in line for line in epochs] == [False, True, False]
    assert last.startswith("stopped: 3 ep, 15 ba, 90 sp of 9ep in ")
    assert "MulticlassAccuracy" in last + more
