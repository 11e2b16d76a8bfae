"""Brokers that are killed, stopped and started again in the middle of a run: nothing is lost, and nobody waits."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from faults import (
    Follower,
    HandBroker,
    Training,
    assert_complete,
    backward_clock,
    read_recording,
    stopped,
)
from helpers import wait_for

from offloop.bus import BrokerError, Publisher, find_run
from offloop.bus.protocol.frames import decode_event
from offloop.bus.recording.reader import RecordingReader

AT_ONCE = (0.0, 0.0)
"""Pauses before a broker is started again, of which the usual ones would make a test of many deaths long."""


def kill_at_random_moments(training: Training, times: int, seed: int) -> int:
    """Kills the brokers of a training, and returns how many of them had recorded its events; others only started."""
    moments, recording = random.Random(seed), 0
    for _ in range(times):
        if moments.random() < 0.7:
            training.await_recorded(training.published + 1)
            recording += 1
        # The moment is the fault itself: nothing is waited for with it.
        time.sleep(moments.uniform(0, 0.3))
        for pid in wait_for(lambda: training.broker_pids, "a broker to kill"):
            os.kill(pid, signal.SIGKILL)
    return recording


@pytest.mark.timeout(600)
@pytest.mark.parametrize("times", [3, pytest.param(50, marks=pytest.mark.soak)])
def test_a_broker_killed_at_random_moments_loses_nothing(runs_dir: Path, times: int) -> None:
    with Training(runs_dir, restart_pauses=AT_ONCE) as training, Follower(runs_dir) as before:
        recording = kill_at_random_moments(training, times, seed=1)
        with Follower(runs_dir) as middle:
            recording += kill_at_random_moments(training, times, seed=2)
            told = training.finish()
            with Follower(runs_dir) as after:
                for follower in (before, middle, after):
                    assert_complete(follower.result(), told["events"])
    assert told["broker_restarts"] >= recording > times / 2
    assert (told["dropped"], told["acknowledged"]) == (0, told["events"] + 1)
    read_recording(runs_dir / "r", told["events"])
    assert [attempt.status for attempt in find_run("r").attempts] == ["finished"]


def test_a_second_publisher_of_a_rank_is_refused_even_without_a_broker(runs_dir: Path) -> None:
    with HandBroker(runs_dir) as broker, Training(runs_dir, broker=broker.address) as training:
        training.await_recorded(100)
        with pytest.raises(BrokerError, match="rank 0 of run 'r'"):
            Publisher("r", broker=broker.address, resume=True)
        with stopped(training.pid):
            broker.end(signal.SIGKILL)
            broker.start()
            with pytest.raises(BrokerError, match="rank 0 of run 'r'"):
                Publisher("r", broker=broker.address, resume=True)
        told = training.finish()
    read_recording(runs_dir / "r", told["events"])
    assert [attempt.status for attempt in find_run("r").attempts] == ["finished"]


def test_event_times_never_go_back_although_clocks_do(runs_dir: Path) -> None:
    with Training(runs_dir, environment=backward_clock(runs_dir / "clock")) as training, Follower(runs_dir) as follower:
        training.await_recorded(100)
        os.kill(training.broker_pid, signal.SIGKILL)
        training.await_recorded(training.published + 500)
        # The end is then written by a broker, whose clock is far behind the trainer's.
        training.kill()
        told = follower.result()
    assert told["numbers"] == list(range(1, len(told["numbers"]) + 1))
    wait_for(lambda: not find_run("r").live, "the broker to end")
    with RecordingReader(find_run("r").recording) as reader:
        times = [decode_event(body).time for records in reader.read() for _, body in records]
    assert times == sorted(times)
    assert len(times) == len(told["numbers"]) + 1
