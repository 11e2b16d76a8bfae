"""Callbacks with a stream of their own, beside the others."""

import asyncio
import itertools
import json
import subprocess
import sys
import threading

import pytest
from attached_callbacks import Quick
from consumers_stream import batch_end, record_run, snapshots_of_training
from helpers import wait_for

from offloop.bus import Recording
from offloop.consumers import Callback, LoggerDestination, Runner
from offloop.consumers.runner.dispatcher import CallbackError
from offloop.consumers.runner.runner import run_session


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
    background = True

    def __init__(self):
        self.entered, self.released = threading.Event(), threading.Event()
        self.closed = False

    def batch_end(self, state, logger):
        self.entered.set()
        assert self.released.wait(60)
        logger.log_metrics({"slow": int(state.timestamp.batch)})

    def close(self, state, logger):
        self.closed = True


@pytest.fixture
def recording(runs_dir):
    directory = record_run(runs_dir, "r", snapshots_of_training())
    return lambda: Recording(directory)


def test_a_slow_callback_does_not_delay_others_and_misses_nothing(recording):
    slow, rows = Slow(), Rows()
    thread = threading.Thread(target=run_session, args=(lambda callbacks, after: recording(), [Quick(), slow], [rows]))
    thread.start()
    assert slow.entered.wait(60)
    wait_for(lambda: len(rows.rows) == 8, "the quick one to be through")
    assert not rows.closed
    slow.released.set()
    thread.join()
    assert [row for row in rows.rows if row[1] == "quick"] == [(n, "quick", n) for n in range(1, 9)]
    assert [row for row in rows.rows if row[1] == "slow"] == [(n, "slow", n) for n in range(1, 9)]
    assert (rows.opened, rows.closed, slow.closed) == (1, 1, True)


def test_leaving_ends_worker_threads():
    class Leaving(Quick):
        def batch_end(self, state, logger):
            super().batch_end(state, logger)
            if state.timestamp.batch == 5:
                runner.stop()

    slow, rows = Slow(), Rows()
    slow.released.set()
    runner = Runner(map(batch_end, itertools.count(1)), [Leaving()], [rows])
    runner.run_beside("Slow", slow, map(batch_end, itertools.count(1)))
    assert runner.run().interrupted
    assert (slow.closed, rows.closed) == (True, 1)


class Waiting(Callback):
    def __init__(self, error=None, name="waiting"):
        self.name = name
        self.released = asyncio.Event()
        self.threads = set()
        self.error = error
        self.is_closed = False

    async def batch_end(self, state, logger):
        self.threads.add(threading.current_thread())
        async with asyncio.timeout(60):
            await self.released.wait()
        if self.error:
            raise self.error
        logger.log_metrics({self.name: int(state.timestamp.batch)})

    async def close(self, state, logger):
        self.is_closed = True


class Releasing(Quick):
    def __init__(self, *waiting):
        self.waiting = waiting

    def batch_end(self, state, logger):
        super().batch_end(state, logger)
        if state.timestamp.batch == 8:
            for callback in self.waiting:
                callback.released.set()


def test_a_waiting_asynchronous_callback_needs_no_thread(recording):
    waiting, rows = [Waiting(name="one"), Waiting(name="two")], Rows()
    run_session(lambda callbacks, after: recording(), [*waiting, Releasing(*waiting)], [rows])
    assert rows.rows[:8] == [(n, "quick", n) for n in range(1, 9)]
    for name in ("one", "two"):
        assert [row for row in rows.rows if row[1] == name] == [(n, name, n) for n in range(1, 9)]
    assert {thread for one in waiting for thread in one.threads} == {threading.current_thread()}
    assert all(one.is_closed for one in waiting)


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
    async with asyncio.timeout(60):
        while len(rows.rows) < 8 or not waiting.threads:
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (waiting.is_closed, rows.closed) == (True, 1)
    assert asyncio.all_tasks() == {asyncio.current_task()}


SNAILS = """
import asyncio, time
from offloop.consumers import Callback

class Counting(Callback):
    count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]

class Thread(Counting):
    background = True

    def batch_end(self, state, logger):
        time.sleep(0.02)
        self.count += 1
        logger.log_metrics({"thread": self.count})

class Task(Counting):
    async def batch_end(self, state, logger):
        await asyncio.sleep(0.02)
        self.count += 1
        logger.log_metrics({"task": self.count})
"""


@pytest.mark.slow
def test_a_named_consumer_resumes_each_of_its_streams(runs_dir, tmp_path):
    (tmp_path / "snails.py").write_text(SNAILS)
    directory = record_run(runs_dir, "r", snapshots_of_training(80))
    command = [
        *(sys.executable, "-m", "offloop.consumers", "--replay", str(directory), "--name", "n"),
        *("--commit-every", "1", "--callbacks", "lr,snails.py:Thread,snails.py:Task", "--log", "jsonl"),
    ]
    log = directory / "metrics.jsonl"
    first = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    wait_for(lambda: log.exists() and log.read_text().count("thread") > 3, "some lines")
    first.kill()
    first.wait()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    for kind in ("thread", "task"):
        assert [row[kind] for row in rows if kind in row] == list(range(1, 81))
    assert [row["step"] for row in rows if "lr-SGD/group0" in row] == list(range(1, 81))
