"""The progress bars: under a pseudo terminal, and as the lines that end up in a file."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyte
import pytest
from helpers import wait_for

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers import Callback, ConsoleLogger, Logger, Runner, TrainerMetrics
from offloop.consumers.api.logger import LoggerDestination, RunContext
from offloop.consumers.loggers import console, progress
from offloop.consumers.loggers.progress import ProgressLogger
from offloop.consumers.runner.entries import EventForwarder

ROWS, COLUMNS = 24, 140
START = 1_700_000_000


def event(event: Event, seconds: float, timestamp: Timestamp, inside: int = 0, **fields: Any) -> Snapshot:
    return Snapshot.build(
        event,
        time_ns=int((START + seconds) * 10**9),
        timestamp=timestamp,
        eval_timestamp=Timestamp(batch=inside),
        predict_timestamp=Timestamp(batch=inside),
        **{"dataloader_label": "train", "dataloader_len": 4, "max_duration": "2ep", **fields},
    )


def epoch(number: int, begun: float, **fields: Any) -> Iterator[Snapshot]:
    yield event(Event.EPOCH_START, begun, Timestamp(epoch=number, batch=number * 4), **fields)
    for n in range(1, 5):
        timestamp = Timestamp(epoch=number, batch=number * 4 + n, batch_in_epoch=n)
        yield event(Event.BATCH_END, begun + n, timestamp, loss=1 / timestamp.batch.value, **fields)
    metrics = {"Accuracy": (number + 1) / 4}
    yield event(Event.EPOCH_END, begun + 4, Timestamp(epoch=number + 1, batch=number * 4 + 4), train_metrics=metrics)


def evaluation(begun: float, timestamp: Timestamp, accuracy: float = 0.75) -> Iterator[Snapshot]:
    fields = {"dataloader_label": "eval", "dataloader_len": 2}
    yield event(Event.EVAL_START, begun, timestamp, **fields)
    for n in (1, 2):
        yield event(Event.EVAL_BATCH_END, begun + n, timestamp, n, **fields)
    yield event(Event.EVAL_END, begun + 2, timestamp, 2, **fields, eval_metrics={"eval": {"Accuracy": accuracy}})


def training() -> list[Snapshot]:
    return [
        event(Event.FIT_START, 0, Timestamp()),
        *epoch(0, 0),
        *evaluation(4, Timestamp(epoch=1, batch=4), 0.75),
        *epoch(1, 6),
        *evaluation(10, Timestamp(epoch=2, batch=8), 0.875),
        event(Event.FIT_END, 12, Timestamp(epoch=2, batch=8)),
    ]


def run(
    stream: Sequence[Snapshot], logger: ProgressLogger, *others: Callback, to: Sequence[LoggerDestination] = ()
) -> None:
    Runner(stream, [EventForwarder(logger), *others], [logger, *to]).run()


# -- a file -----------------------------------------------------------------------------------------------------------


def test_lines_are_printed_at_the_chosen_rate(capsys: pytest.CaptureFixture[str]) -> None:
    run(training(), ProgressLogger(every=5))
    assert capsys.readouterr().err.splitlines() == [
        "total                     0% 0/2 ep [00:00]",
        "train      Epoch   0    100% 4/4 ba [00:04<00:00, 1 ba/s, loss=0.25, train/Accuracy=0.25]",
        "eval       Epoch   0     50% 1/2 ba [00:01<00:01, 1 ba/s]",
        "eval       Epoch   0    100% 2/2 ba [00:02<00:00, 1 ba/s, Accuracy=0.75]",
        "train      Epoch   1    100% 4/4 ba [00:04<00:00, 1 ba/s, loss=0.125, train/Accuracy=0.5]",
        "eval       Epoch   1    100% 2/2 ba [00:02<00:00, 1 ba/s, Accuracy=0.875]",
        "total                   100% 2/2 ep [00:12<00:00, 0.167 ep/s]",
    ]


def test_a_fast_run_prints_few_lines_and_its_last_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    stream = [state for number in range(1000) for state in fast(epoch(number, 0, max_duration="1000ep"), number)]
    run(stream, ProgressLogger(every=1))
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 3
    assert lines[-1].startswith("train      Epoch 999    100% 4/4 ba")


def fast(states: Iterator[Snapshot], number: int) -> Iterator[Snapshot]:
    """Those events, all in one millisecond."""
    for state in states:
        fields = {name: value for name, value in state.fields.items() if not name.endswith("_timestamp")}
        yield Snapshot.build(
            state.event, time_ns=START * 10**9 + number * 1_000_000, timestamp=state.timestamp, **fields
        )


def test_an_evaluation_within_an_epoch_is_named_by_its_batch(capsys: pytest.CaptureFixture[str]) -> None:
    within = [*list(epoch(0, 0))[:3], *evaluation(2, Timestamp(batch=2, batch_in_epoch=2))]
    run(within, ProgressLogger(every=100))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "train      Epoch   0      0% 0/4 ba [00:00]",
        "eval       Batch   2    100% 2/2 ba [00:02<00:00, 1 ba/s, Accuracy=0.75]",
        "train      Epoch   0     50% 2/4 ba [00:02<00:02, 1 ba/s, loss=0.5]",
    ]


def test_texts_of_a_run_cannot_break_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    state = event(Event.EVAL_START, 0, Timestamp(), dataloader_label="a\nb\x1b[2Jc")
    run([state], ProgressLogger())
    assert capsys.readouterr().err.startswith("a b\\x1b[2Jc   Epoch ")


# -- a terminal -------------------------------------------------------------------------------------------------------


class Terminal:
    """A pseudo terminal in the place of standard output and error, and everything that is written to it."""

    def __init__(self, columns: int = COLUMNS) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        self.stdout = os.fdopen(os.dup(slave), "w", encoding="utf-8")
        self.stderr = os.fdopen(slave, "w", encoding="utf-8")
        self.modes = termios.tcgetattr(self.stderr)
        self._received = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._marks = 0

    def __enter__(self) -> "Terminal":
        self._before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = self.stdout, self.stderr
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout, sys.stderr = self._before
        self.stdout.close()
        self.stderr.close()
        self._reader.join()
        os.close(self._master)

    def received(self) -> str:
        self._marks += 1
        mark = f"\x1b[{self._marks}z"  # a sequence that means nothing
        self.stderr.write(mark)
        self.stderr.flush()
        wait_for(lambda: mark.encode() in self._received, "what was written to the terminal")
        return self._received.decode()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # what Linux says when the other end is closed
            while data := os.read(self._master, 65536):
                self._received += data


def screen(text: str, columns: int = COLUMNS) -> list[str]:
    terminal = pyte.Screen(columns, 100)
    pyte.Stream(terminal).feed(text)
    lines = [line.rstrip() for line in terminal.display[: terminal.cursor.y + 1]]
    assert all(len(line) < columns for line in lines), "a line wraps"
    return lines


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The terminal's time, for the test to set."""
    monkeypatch.setenv("TERM", "xterm")
    now = [0.0]
    for module in (progress, console):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    return now


class Looks(Callback):
    def __init__(self, look: Callable[[Snapshot], None]) -> None:
        self.look = look

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        self.look(state)


def test_bars_are_drawn_at_the_bottom_and_finished_ones_stay(clock: list[float]) -> None:
    shown: list[list[str]] = []
    with Terminal() as terminal:

        def look(state: Snapshot) -> None:
            shown.append(screen(terminal.received()))
            clock[0] += 1

        run(training(), ProgressLogger(), Looks(look))
        end = terminal.received()
    assert shown[4] == [
        f"total                    38%|{bar(9)}| 0/2 ep [00:03<00:05, 0.25 ep/s]",
        f"train      Epoch   0     75%|{bar(18)}| 3/4 ba [00:03<00:01, 1 ba/s, loss=0.3333]",
    ]
    trained = f"100%|{bar(25)}| 4/4 ba [00:04<00:00, 1 ba/s,"
    evaluated = f"100%|{bar(25)}| 2/2 ba [00:02<00:00, 1 ba/s,"
    assert shown[8] == [
        f"train      Epoch   0    {trained} loss=0.25, train/Accuracy=0.25]",
        f"total                    50%|{bar(12)}| 1/2 ep [00:05<00:05, 0.2 ep/s]",
        f"eval       Epoch   0     50%|{bar(12)}| 1/2 ba [00:01<00:01, 1 ba/s]",
    ]
    assert screen(end) == [
        f"train      Epoch   0    {trained} loss=0.25, train/Accuracy=0.25]",
        f"eval       Epoch   0    {evaluated} Accuracy=0.75]",
        f"train      Epoch   1    {trained} loss=0.125, train/Accuracy=0.5]",
        f"eval       Epoch   1    {evaluated} Accuracy=0.875]",
        f"total                   100%|{bar(25)}| 2/2 ep [00:12<00:00, 0.167 ep/s]",
        "",
    ]


def bar(filled: int) -> str:
    return f"{'█' * filled:<25}"


def test_the_console_and_the_bars_share_a_terminal(clock: list[float]) -> None:
    with Terminal() as terminal:
        stream = training()
        run(stream, ProgressLogger(), TrainerMetrics(), Looks(lambda _: advance(clock)), to=[ConsoleLogger(every=0)])
        shown = screen(terminal.received())
    assert sum(line.startswith("step ") for line in shown) >= 8
    assert sum(line.startswith(("train ", "eval ", "total ")) for line in shown) == 5
    assert shown[-1] == ""


def advance(clock: list[float]) -> None:
    clock[0] += 1


def test_fast_events_are_drawn_ten_times_a_second(clock: list[float]) -> None:
    def look(state: Snapshot) -> None:
        clock[0] += 0.001

    with Terminal() as terminal:
        stream = [state for number in range(400) for state in epoch(number, number * 4, max_duration="400ep")]
        run(stream, ProgressLogger(), Looks(look))
        text = terminal.received()
    seconds = len(stream) * 0.001
    assert seconds > 2
    assert seconds * 10 - 1 <= text.count("\x1b[J") <= seconds * 10 + seconds * 2 + 3
    assert seconds - 1 <= text.count("train/Accuracy") <= seconds + 2


def test_the_terminal_is_restored(clock: list[float]) -> None:
    with Terminal() as terminal:
        logger = ProgressLogger()
        logger.open(RunContext("run", 1, None))
        for state in training()[:3]:
            logger.watch(state)
            clock[0] += 1
        assert sys.stderr is not terminal.stderr
        logger.close()
        assert (sys.stdout, sys.stderr) == (terminal.stdout, terminal.stderr)
        assert termios.tcgetattr(terminal.stderr) == terminal.modes
        text = terminal.received()
    assert not re.search(r"\x1b\[\?", text)  # no mode is set that would have to be set back
    assert screen(text)[-1] == ""
