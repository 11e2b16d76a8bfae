"""The console on a terminal, and what it shows of images, tables and texts."""

import sys
from typing import Any

import numpy as np
import pytest
from consumers_stream import batch_end, snapshots_of_training
from logged import LogsWhatItSees

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers import ConsoleLogger, Runner
from offloop.consumers.api.logger import Row, Text
from offloop.consumers.callbacks import TrainerMetrics
from offloop.consumers.loggers import console


def log(destination: ConsoleLogger, *snapshots: Snapshot) -> None:
    Runner(list(snapshots), [LogsWhatItSees()], [destination]).run()


def test_images_tables_and_texts_are_shown_in_one_short_line(capsys: pytest.CaptureFixture[str]) -> None:
    images: dict[str, Any] = {"images": np.zeros((3, 1, 8, 9)), "name": "inputs"}
    images["masks"] = {"truth": np.zeros((3, 8, 9), int)}
    table = {"columns": ["name", "score"], "rows": [["a", 1], ["b", 2]], "name": "scores"}
    text = {"text": "first line\nsecond line\x1b[2J" + "x" * 100, "name": "answer"}
    log(ConsoleLogger(), batch_end(7, rows=[[7, {"loss": 0.5}]], images=images, table=table, text=text))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "step      7  epoch   1  loss       0.5",
        "step      7  inputs: 3 of 9x8, with truth",
        "step      7  scores: 2 rows of name, score",
    ]
    assert lines[3].startswith("step      7  answer: first line second line\\x1b[2Jxxx")
    assert lines[3].endswith("x...")
    assert (len(lines), len(lines[3])) == (4, 76)


def shown_names(line: str) -> list[str]:
    return [word for word in line.split() if "/" in word]


def test_times_and_metrics_of_single_parameters_are_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    hidden = ("time/epoch", "l2_norm/grad/net.0.weight", "activations/max/net.0_input.0")
    shown = ["time/remaining_estimate", "l2_norm/grad/global"]
    log(ConsoleLogger(), batch_end(1, rows=[[1, dict.fromkeys((*hidden, *shown), 1.0)]]))
    assert shown_names(capsys.readouterr().out) == shown
    # The last pattern that matches counts.
    row = {"a/b": 1.0, "a/c": 1.0, "a/cd": 1.0}
    log(ConsoleLogger(hide=["a/*", "!a/c*", "a/cd"]), batch_end(1, rows=[[1, row]]))
    assert shown_names(capsys.readouterr().out) == ["a/c"]


def test_metrics_have_their_short_names_and_are_hidden_by_them(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"loss/train/total": 0.5, "lr-SGD/group0": 0.1, "metrics/a/f1": 0.5}
    hides = ConsoleLogger(every=0, hide=["lr"])
    log(hides, batch_end(1, rows=[[1, row]]), batch_end(2, rows=[[2, {**row, "metrics/b/f1": 1.0}]]))
    assert capsys.readouterr().out.splitlines() == [
        "step      1  epoch   0  loss       0.5  f1       0.5",
        "step      2  epoch   0  loss       0.5  a/f1       0.5  b/f1         1",
    ]


def test_an_evaluation_is_shown_at_the_step_of_the_last_batch_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    Runner(snapshots_of_training(), [TrainerMetrics()], [ConsoleLogger(every=0)]).run()
    assert "step      7  epoch   1  accuracy      0.75" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("columns", [80, 30])
def test_lines_fit_the_width_without_cutting_numbers(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "loss/train/total": -1.2345e-100,
        "metrics/eval/MulticlassAccuracy": 0.9889,
        f"metrics/eval/{'long' * 30}": 123456789,
        "throughput/samples_per_sec": 12345678.0,
        "memory/" + "x" * 40: 1.5e9,
        "word": "text " * 40,
    }
    text = {"text": "number " * 30, "name": "answer"}
    shown = []
    for is_terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setenv("COLUMNS", str(columns))
        log(ConsoleLogger(), batch_end(1, rows=[[1, values]], text=text, hyperparameters={"name" * 30: [0.125] * 40}))
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    lines = shown[0].splitlines()
    assert max(map(len, lines)) <= columns
    words = shown[0].split()
    assert {"-1.234e-100", "0.9889", "123456789", "1.235e+07", "1.5e+09"} <= {*words}


def test_a_line_has_twelve_metrics_and_the_number_of_further_ones(capsys: pytest.CaptureFixture[str]) -> None:
    row = {f"a/{number}": number for number in range(152)} | {"metrics/eval/a/b": 0.5, "loss/train/a/b": 1.0}
    log(ConsoleLogger(), batch_end(1, rows=[[1, row]]))
    short = capsys.readouterr().out
    assert shown_names(short) == [*(f"a/{number}" for number in range(10)), "a/b", "train/a/b"]
    assert short.endswith("  ... and 142 more\n")
    log(ConsoleLogger(most=200), batch_end(1, rows=[[1, row]]))
    assert len(shown_names(capsys.readouterr().out)) == len(row)
    for options in ({"most": 0}, {"every": -1}):
        with pytest.raises(ConfigurationError):
            ConsoleLogger(**options)


def test_a_recording_read_fast_does_not_flood_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(console, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    stream = [batch_end(batch, rows=[[batch, {"loss": 1.0}]]) for batch in range(1, 4001)]  # a thousand seconds

    class Slow(LogsWhatItSees):
        def batch_end(self, state: Snapshot, logger: Any) -> None:
            now[0] += 0.0005  # two seconds in all
            super().batch_end(state, logger)

    Runner(stream, [Slow()], [ConsoleLogger()]).run()
    lines = capsys.readouterr().out.splitlines()
    assert 10 <= len(lines) <= 12
    assert lines[-1].startswith("step   4000")


def test_a_resumed_consumer_prints_pending_lines(capsys: pytest.CaptureFixture[str]) -> None:
    first, again = ConsoleLogger(), ConsoleLogger()
    for step in (1, 2):
        first.log_rows([Row(step, 0.0, {"loss": 1 / step})], batch_end(step))
    first.log_text(Text(2, 0.0, "note", "kept"), batch_end(2))
    capsys.readouterr()
    again.load_state_dict(first.state_dict())
    again.close()
    assert capsys.readouterr().out.splitlines() == ["step      2  epoch   0  loss       0.5", "step      2  note: kept"]
