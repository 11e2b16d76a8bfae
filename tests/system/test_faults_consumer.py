"""Consumers that stand still, lag, or are many: each gets everything, and nobody else notices."""

from pathlib import Path

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
