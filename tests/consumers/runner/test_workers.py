"""Callbacks with a stream of their own, beside the others."""

import asyncio
import json
import re
import subprocess
import sys
import threading

import pytest
from attached_callbacks import InBackground, Quick
from consumers_stream import batch_end
from helpers import wait_for
from training import Act, gold_trainer

from offloop.bus import Event, Recording, find_run
from offloop.consumers import Callback, LoggerDestination, Runner
from offloop.consumers.runner.dispatcher import CallbackError
from offloop.consumers.runner.runner import run_session
from offloop.consumers.testing import replay


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


class Waiting(Callback):
    """Waits at its first event until it is let go."""

    def __init__(self, error=None, name="waiting"):
        self.name = name
        self.released = asyncio.Event()
        self.threads = set()
        self.error = error
        self.is_closed = False

    async def batch_end(self, state, logger):
        self.threads.add(threading.current_thread())
        async with asyncio.timeout(30):
            await self.released.wait()
        if self.error:
            raise self.error
        logger.log_metrics({self.name: int(state.timestamp.batch)})

    async def close(self, state, logger):
        self.is_closed = True


class Releasing(Quick):
    """Lets others go when it is through with the last batch."""

    def __init__(self, *waiting):
        self.waiting = waiting

    def batch_end(self, state, logger):
        super().batch_end(state, logger)
        if state.timestamp.batch == 8:
            for callback in self.waiting:
                callback.released.set()


def test_an_asynchronous_callback_that_waits_delays_nobody_and_needs_no_thread(recording):
    waiting, rows = [Waiting(name="one"), Waiting(name="two")], Rows()
    run_session(lambda callbacks, after: recording(), [*waiting, Releasing(*waiting)], [rows])
    assert rows.rows[:8] == [(n, "quick", n) for n in range(1, 9)]
    for name in ("one", "two"):
        assert [row for row in rows.rows if row[1] == name] == [(n, name, n) for n in range(1, 9)]
    assert {thread for one in waiting for thread in one.threads} == {threading.current_thread()}
    assert all(one.is_closed for one in waiting)


def test_an_asynchronous_callback_that_shares_a_stream_is_waited_for(recording):
    class InTurn(Waiting):
        background = False

    waiting, rows = InTurn(), Rows()
    waiting.released.set()
    run_session(lambda callbacks, after: recording(), [waiting, Quick()], [rows])
    assert rows.rows == [(n, name, n) for n in range(1, 9) for name in ("waiting", "quick")]


def test_a_test_sees_what_asynchronous_callbacks_log_in_the_order_of_events(recording):
    waiting = Waiting()
    waiting.released.set()
    logged = replay([waiting, Quick()], recording())
    assert [row.metrics for row in logged.rows] == [{"waiting": n, "quick": n} for n in range(1, 9)]


@pytest.mark.parametrize(("on_error", "count"), [("continue", 8), ("disable", 1)])
def test_what_an_asynchronous_callback_raises_is_counted_and_shown_once(recording, capsys, on_error, count):
    waiting, rows = Waiting(ValueError("no answer")), Rows()
    callbacks = [waiting, Releasing(waiting)]
    _, statistics = run_session(lambda callbacks, after: recording(), callbacks, [rows], on_error=on_error)
    assert statistics.errors == {"Waiting": count, "Releasing": 0}
    assert len(rows.rows) == 8
    assert capsys.readouterr().err.count("callback Waiting raised at batch_end") == 1


def test_with_on_error_stop_an_asynchronous_callback_ends_the_others(recording):
    waiting, rows = Waiting(ValueError("no answer")), Rows()
    with pytest.raises(CallbackError, match="callback Waiting raised ValueError"):
        run_session(lambda callbacks, after: recording(), [waiting, Releasing(waiting)], [rows], on_error="stop")
    assert (waiting.is_closed, rows.closed) == (True, 1)


async def test_a_runner_that_is_cancelled_ends_asynchronous_callbacks_that_wait(recording):
    waiting, rows = Waiting(), Rows()
    runner = Runner(recording(), [Quick()], [rows])
    runner.run_beside("Waiting", waiting, recording())
    running = asyncio.create_task(runner.run_async())
    async with asyncio.timeout(30):
        while len(rows.rows) < 8 or not waiting.threads:
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (waiting.is_closed, rows.closed) == (True, 1)
    assert asyncio.all_tasks() == {asyncio.current_task()}


SNAILS = {
    "thread": """
import time
from offloop.consumers import Callback

class Snail(Callback):
    background = True

    def batch_end(self, state, logger):
        time.sleep(0.05)
        logger.log_metrics({"snail": int(state.timestamp.batch)})
""",
    "task": """
import asyncio
from offloop.consumers import Callback

class Snail(Callback):
    async def batch_end(self, state, logger):
        await asyncio.sleep(0.05)
        logger.log_metrics({"snail": int(state.timestamp.batch)})
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SNAILS)
def test_a_named_consumer_goes_on_with_each_of_its_streams(runs_dir, tmp_path, kind):
    (tmp_path / "snail.py").write_text(SNAILS[kind])
    with gold_trainer(24, 6, publish=True, run_name="r", max_duration="20ep") as trainer:
        trainer.fit()
    command = [
        *(
            sys.executable,
            "-m",
            "offloop.consumers",
            "--replay",
            str(find_run("r").path),
            "--name",
            "n",
            "--commit-every",
            "1",
        ),
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
    assert [row["snail"] for row in rows if "snail" in row] == list(range(1, 81))
    assert [row["step"] for row in rows if "lr-SGD/group0" in row] == list(range(1, 81))


@pytest.mark.slow
def test_the_trainer_s_own_callbacks_have_streams_too(runs_dir, tmp_path, monkeypatch):
    from offloop.consumers import JsonlLogger

    with gold_trainer(
        24, 6, publish=True, run_name="r", callbacks=[Quick(), InBackground()], loggers=[JsonlLogger()]
    ) as trainer:
        trainer.fit()
    text = (find_run("r").path / "metrics.jsonl").read_text()
    assert text.count('"quick"') == text.count('"background"') == 8


@pytest.mark.slow
def test_a_command_of_a_consumer_is_reported(runs_dir, tmp_path):
    (tmp_path / "stop.py").write_text(
        "from offloop.consumers import Callback\n"
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
                    [sys.executable, "-m", "offloop.consumers", "--run", "r", "--callbacks", "stop.py:Stop"],
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
        [sys.executable, "-m", "offloop.consumers", "--replay", path, "--callbacks", "activations"],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert "the field 'activations' is not in this recording: attach while the training runs" in done.stderr
