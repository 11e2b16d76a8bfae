"""Callbacks with a stream of their own, beside the others."""

import json
import re
import subprocess
import sys
import threading

import pytest
from consumers_stream import batch_end
from helpers import wait_for
from training import Act, gold_trainer

from bus import Event, Recording, find_run
from consumers import Callback, LoggerDestination, Runner
from consumers.runner.entries import partition
from consumers.runner.runner import CallbackError
from consumers.runner.session import run_session


class Rows(LoggerDestination):
    def __init__(self):
        self.rows = []
        self.opened = self.closed = 0

    def open(self, context):
        self.opened += 1

    def log_rows(self, rows, state):
        self.rows += [(row.step, name, value) for row in rows for name, value in row.metrics.items()]

    def close(self):
        self.closed += 1


class Quick(Callback):
    def batch_end(self, state, logger):
        logger.log_metrics({"quick": int(state.timestamp.batch)})


class Slow(Callback):
    """Waits at its first event until it is let go."""

    background = True

    def __init__(self, error=None):
        self.entered, self.released = threading.Event(), threading.Event()
        self.error = error
        self.closed = False

    def batch_end(self, state, logger):
        self.entered.set()
        assert self.released.wait(30)
        if self.error:
            raise self.error
        logger.log_metrics({"slow": int(state.timestamp.batch)})

    def close(self, state, logger):
        self.closed = True


@pytest.fixture
def recording(runs_dir):
    with gold_trainer(24, 6, publish=True, run_name="r") as trainer:
        trainer.fit()
    return lambda: Recording(find_run("r").recording)


def test_a_slow_callback_delays_nobody_and_misses_nothing(recording):
    slow, rows = Slow(), Rows()
    thread = threading.Thread(target=run_session, args=(lambda callbacks, after: recording(), [Quick(), slow], [rows]))
    thread.start()
    assert slow.entered.wait(30)
    wait_for(lambda: len(rows.rows) == 8, "the quick one to be through")
    assert not rows.closed
    slow.released.set()
    thread.join()
    assert [row for row in rows.rows if row[1] == "quick"] == [(n, "quick", n) for n in range(1, 9)]
    assert [row for row in rows.rows if row[1] == "slow"] == [(n, "slow", n) for n in range(1, 9)]
    assert (rows.opened, rows.closed, slow.closed) == (1, 1, True)


def test_one_that_raises_is_counted_and_its_neighbours_go_on(recording, capsys):
    slow, rows = Slow(ValueError("too slow")), Rows()
    slow.released.set()
    _, statistics = run_session(lambda callbacks, after: recording(), [Quick(), slow], [rows])
    assert statistics.errors == {"Quick": 0, "Slow": 8}
    assert len(rows.rows) == 8
    assert "callback Slow raised at batch_end" in capsys.readouterr().err


def test_with_on_error_stop_it_ends_the_others_too(recording):
    slow, rows = Slow(ValueError("too slow")), Rows()
    slow.released.set()
    with pytest.raises(CallbackError, match="callback Slow raised ValueError"):
        run_session(lambda callbacks, after: recording(), [Quick(), slow], [rows], on_error="stop")
    assert rows.closed == 1


def test_a_callback_by_itself_needs_no_stream_of_its_own():
    slow, quick = Slow(), Quick()
    assert partition([slow]) == ([("Slow", slow)], [])
    assert partition([slow, quick, Slow()])[0] == [("Quick", quick)]
    assert [name for name, _ in partition([slow, quick, Slow()])[1]] == ["Slow", "Slow#2"]


def test_leaving_ends_what_runs_beside_too():
    stop = threading.Event()

    def endless():
        for count in range(10**6):
            yield batch_end(count + 1)
            if count == 5:
                stop.set()
            if count >= 5:
                threading.Event().wait(0.01)

    slow, rows = Slow(), Rows()
    slow.released.set()
    runner = Runner(endless(), [Quick()], [rows])
    runner.run_beside("Slow", slow, endless())
    thread = threading.Thread(target=lambda: stop.wait(30) and runner.stop())
    thread.start()
    statistics = runner.run()
    thread.join()
    assert statistics.interrupted
    assert slow.closed
    assert rows.closed == 1


SLOW = """
import time
from consumers import Callback

class Snail(Callback):
    background = True

    def batch_end(self, state, logger):
        time.sleep(0.05)
        logger.log_metrics({"snail": int(state.timestamp.batch)})
"""


@pytest.mark.slow
def test_a_named_consumer_goes_on_with_each_of_its_streams(runs_dir, tmp_path):
    (tmp_path / "snail.py").write_text(SLOW)
    with gold_trainer(24, 6, publish=True, run_name="r", max_duration="20ep") as trainer:
        trainer.fit()
    command = [
        *(sys.executable, "-m", "consumers", "--replay", str(find_run("r").path), "--name", "n", "--commit-every", "1"),
        *("--callbacks", "lr,snail.py:Snail", "--log", "jsonl"),
    ]
    log = find_run("r").path / "metrics.jsonl"
    first = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    wait_for(lambda: log.exists() and log.read_text().count("snail") > 3, "some lines")
    first.kill()
    first.wait()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    # What it had logged since its last commit may be there once more, and nothing may be missing.
    assert {row["snail"] for row in rows if "snail" in row} == set(range(1, 81))
    assert [row["step"] for row in rows if "lr-SGD/group0" in row] == list(range(1, 81))


@pytest.mark.slow
def test_the_trainer_s_own_callbacks_have_streams_too(runs_dir, tmp_path, monkeypatch):
    from consumers import JsonlLogger

    slow = _Sleeper()
    with gold_trainer(24, 6, publish=True, run_name="r", callbacks=[Quick(), slow], loggers=[JsonlLogger()]) as trainer:
        trainer.fit()
    text = (find_run("r").path / "metrics.jsonl").read_text()
    assert text.count('"quick"') == text.count('"sleeper"') == 8


class _Sleeper(Callback):
    background = True

    def batch_end(self, state, logger):
        logger.log_metrics({"sleeper": int(state.timestamp.batch)})


@pytest.mark.slow
def test_a_command_of_a_consumer_is_reported(runs_dir, tmp_path):
    (tmp_path / "stop.py").write_text(
        "from consumers import Callback\n"
        "class Stop(Callback):\n"
        "    def batch_end(self, state, logger):\n"
        "        if state.timestamp.batch == 5:\n"
        "            state.stop_training()\n"
    )
    consumer = []

    def step(event, state, logger):
        if event is Event.FIT_START:
            consumer.append(
                subprocess.Popen(
                    [sys.executable, "-m", "consumers", "--run", "r", "--callbacks", "stop.py:Stop"],
                    cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
                )
            )  # fmt: skip
        else:
            threading.Event().wait(0.002)

    with gold_trainer(
        24, 6, publish=True, run_name="r", max_duration="1000000ba",
        algorithms=[Act(step, Event.FIT_START, Event.BATCH_CHECKPOINT)],
    ) as trainer:  # fmt: skip
        trainer.fit()
    _, errors = consumer[0].communicate(timeout=100)
    batch = trainer.state.timestamp.values[2]
    assert re.search(rf"command 'stop' took effect at batch {batch} \(\w+\), {batch - 5} batches after", errors)


def test_an_error_of_ours_is_one_line_with_the_place_that_is_the_user_s(recording, capsys):
    class Curious(Callback):
        def batch_end(self, state, logger):
            state.no_such_field  # noqa: B018

    run_session(lambda callbacks, after: recording(), [Curious()], [])
    [line] = capsys.readouterr().err.splitlines()
    assert "callback Curious raised at batch_end" in line
    assert "has no field 'no_such_field'" in line
    assert re.search(r"test_workers\.py:\d+\)$", line)


def test_a_replay_says_which_fields_are_not_in_it(recording):
    path = str(recording().path)
    done = subprocess.run(
        [sys.executable, "-m", "consumers", "--replay", path, "--callbacks", "activations"],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert "the field 'activations' is not in this recording: attach while the training runs" in done.stderr
