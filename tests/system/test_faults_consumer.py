"""Consumers that stand still, lag, or are many: each gets everything, and nobody else notices."""

import signal
from pathlib import Path

import pytest
from faults import Follower, Training, assert_complete, resident, stopped

MEBIBYTES = 32
"""By how much the memory of a process may grow of which is said that it stays flat: queues that fill, caches."""


def test_a_suspended_consumer_catches_up_in_bounded_memory(runs_dir: Path) -> None:
    with Training(runs_dir, rate=5000) as training, Follower(runs_dir) as follower, Follower(runs_dir) as other:
        training.await_recorded(2000)
        pids = (training.pid, training.broker_pid)
        before = [resident(pid) for pid in pids]
        with stopped(follower.pid):
            training.await_published(training.published + 8_000)
            after = [resident(pid) for pid in pids]
        told = training.finish()
        assert_complete(follower.result(), told["events"])
        assert_complete(other.result(), told["events"])
    assert max(grown - was for was, grown in zip(before, after, strict=True)) < MEBIBYTES
    assert told["dropped"] == 0


@pytest.mark.soak
def test_a_lag_of_100_000_events_takes_bounded_memory(runs_dir: Path) -> None:
    with Training(runs_dir, rate=50_000, events=102_000, ending="stay") as training:
        training.await_recorded(1000)
        pids = (training.pid, training.broker_pid)
        before = [resident(pid) for pid in pids]
        with Follower(runs_dir, pause=0.1) as slow:
            training.await_loop_end()
            assert training.published == 102_000
            after = [resident(pid) for pid in pids]
            training.kill()
            # It has handled some hundred by then.
            slow.signal(signal.SIGUSR1)
            told = slow.result()
    assert_complete(told, 102_000, "lost: the trainer's process died")
    assert max(grown - was for was, grown in zip(before, after, strict=True)) < MEBIBYTES
