"""The console on a terminal, and what it shows of images, tables and texts."""

import sys
from typing import Any

import numpy as np
import pytest
from consumers_stream import batch_end, snapshots_of_training
from logged import LogsWhatItSees

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.consumers import Callback, ConsoleLogger, Logger, Runner
from offloop.consumers.api.logger import Row
from offloop.consumers.loggers import console


def log(destination: ConsoleLogger, *snapshots: Snapshot) -> None:
    Runner(list(snapshots), [LogsWhatItSees()], [destination]).run()


def test_images_tables_and_texts_are_a_short_line_each(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_of_many_texts_the_latest_of_each_name_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def state(batch: int) -> Snapshot:  # four batches a second
        return batch_end(batch, text={"text": str(batch), "name": "odd" if batch % 2 else "even"})

    log(ConsoleLogger(), *map(state, range(1, 8)))
    shown = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["1  odd: 1", "4  even: 4", "5  odd: 5", "6  even: 6", "7  odd: 7"]


def test_texts_of_a_run_cannot_break_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    log(ConsoleLogger(), batch_end(1, rows=[[1, {"a\nb": "c\x1b[2Jd"}]], hyperparameters={"e": "f\r\ng"}))
    assert capsys.readouterr().out.splitlines() == ["e=f g", "step      1  epoch   0  a b c\\x1b[2Jd"]


def test_lines_stay_aligned_and_numbers_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"loss": 12345.678, "n": 1}, {"loss": 0.001, "n": 123456}, {"loss": float("nan"), "n": -3}]
    log(ConsoleLogger(every=0), *(batch_end(n, rows=[[n * 100, row]]) for n, row in enumerate(rows, 1)))
    assert capsys.readouterr().out.splitlines() == [
        "step    100  epoch   0  loss 1.235e+04  n         1",
        "step    200  epoch   0  loss     0.001  n    123456",
        "step    300  epoch   0  loss       nan  n        -3",
    ]


def shown_names(line: str) -> list[str]:
    return [word for word in line.split() if "/" in word]


class LogsEverywhere(Callback):
    """Logs the name of every event."""

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        logger.log_metrics({"event": event.value})


def test_what_is_logged_after_an_epoch_is_shown_with_that_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    Runner(snapshots_of_training(8), [LogsEverywhere()], [ConsoleLogger(every=0)]).run()
    shown = [line.split()[3:6:2] for line in capsys.readouterr().out.splitlines()]
    assert [epoch for epoch, event in shown if event == "epoch_start"] == ["0", "1"]
    assert [epoch for epoch, event in shown if event == "epoch_end"] == ["0", "1"]
    assert shown[-2:] == [["1", "eval_end"], ["1", "fit_end"]]


def test_of_times_those_that_step_and_epoch_tell_are_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("epoch", "batch", "batch_in_epoch", "sample", "sample_in_epoch", "token", "token_in_epoch")
    times = {f"time/{name}": 1.0 for name in (*names, "train", "val", "total", "remaining_estimate")}
    log(ConsoleLogger(), batch_end(1, rows=[[1, times]]))
    assert shown_names(capsys.readouterr().out) == ["time/remaining_estimate"]


def test_what_there_is_of_each_parameter_and_module_is_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    norms = {f"l2_norm/{kind}/{name}": 1.0 for kind in ("grad", "param") for name in ("weight", "net.0.weight")}
    others = {"activations/max/net.0_input.0": 1.0, "l2_norm/grad/global": 2.0}
    log(ConsoleLogger(), batch_end(1, rows=[[1, norms | others]]))
    assert shown_names(capsys.readouterr().out) == ["l2_norm/grad/global"]


def test_the_last_pattern_that_fits_a_name_counts(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"a/b": 1.0, "a/c": 1.0, "a/cd": 1.0}
    log(ConsoleLogger(hide=["a/*", "!a/c*", "a/cd"]), batch_end(1, rows=[[1, row]]))
    assert shown_names(capsys.readouterr().out) == ["a/c"]


def test_metrics_have_their_short_names_and_are_hidden_by_them(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"loss/train/total": 0.5, "lr-SGD/group0": 0.1, "metrics/a/f1": 0.5}
    hides = ConsoleLogger(every=0, hide=["lr"])
    log(hides, batch_end(1, rows=[[1, row]]), batch_end(2, rows=[[2, {**row, "metrics/b/f1": 1.0}]]))
    assert capsys.readouterr().out.splitlines() == [
        "step      0  epoch   0  loss       0.5  f1       0.5",
        "step      1  epoch   0  loss       0.5  a/f1       0.5  b/f1         1",
    ]


@pytest.mark.parametrize("columns", [80, 60, 30])
def test_lines_fit_the_width_and_no_number_is_cut(
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


def test_a_line_has_a_dozen_metrics_and_says_how_many_there_are_more(capsys: pytest.CaptureFixture[str]) -> None:
    row = {f"a/{number}": number for number in range(152)} | {"metrics/eval/a/b": 0.5, "loss/train/a/b": 1.0}
    log(ConsoleLogger(), batch_end(1, rows=[[1, row]]))
    short = capsys.readouterr().out
    assert shown_names(short) == [*(f"a/{number}" for number in range(10)), "a/b", "train/a/b"]
    assert short.endswith("  ... and 142 more\n")
    log(ConsoleLogger(most=200), batch_end(1, rows=[[1, row]]))
    assert len(shown_names(capsys.readouterr().out)) == len(row)
    with pytest.raises(ConfigurationError, match="most is 0"):
        ConsoleLogger(most=0)


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


def test_a_consumer_that_goes_on_prints_what_was_to_come(capsys: pytest.CaptureFixture[str]) -> None:
    first, again = ConsoleLogger(), ConsoleLogger()
    fields = {"rows": [[2, {"loss": 0.5}]], "text": {"text": "kept", "name": "note"}}
    state = batch_end(2, **fields)
    caught: list[dict[str, Any]] = []

    class Catches(LogsWhatItSees):
        def batch_end(self, state: Snapshot, logger: Any) -> None:
            caught.append(first.state_dict())
            super().batch_end(state, logger)

    Runner([batch_end(1, rows=[[1, {"loss": 1.0}]]), state, batch_end(3)], [Catches()], [first]).run()
    capsys.readouterr()
    again.load_state_dict(caught[-1])
    again.close()
    assert capsys.readouterr().out.splitlines() == ["step      2  epoch   0  loss       0.5", "step      2  note: kept"]


def test_an_evaluation_has_the_step_of_the_last_batch_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    console, batch = ConsoleLogger(every=0), snapshots_of_training(1)[0]
    for step, name in ((3, "loss/train/total"), (4, "metrics/eval/accuracy"), (4, "loss/train/total")):
        console.log_rows([Row(step, 0.0, {name: 1.0, name + "2": 2.0})], batch)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["3", "3", "4"]


def test_hyperparameters_that_were_chosen_come_before_those_of_parts(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"optimizer/eps": 1e-8, "seed": 17, "config/lr": 0.1}
    log(ConsoleLogger(most=2), batch_end(1, rows=[], hyperparameters=given))
    assert capsys.readouterr().out == "config/lr=0.1  seed=17  ... and 1 more\n"
