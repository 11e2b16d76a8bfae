"""Consumers that stand still, lag, or are many: each gets everything, and nobody else notices."""

from pathlib import Path

import zmq
from faults import Follower, Training, assert_complete, resident, stopped

from offloop.bus import find_run
from offloop.bus.protocol.frames import encode_control

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


def test_a_peer_that_reads_no_answers_delays_nobody_in_bounded_memory(runs_dir: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Training(runs_dir, rate=5000) as training, Follower(runs_dir) as follower, context:
        training.await_recorded(2000)
        before = resident(training.broker_pid)
        question = encode_control("statistics", {"run": "r"})
        with context.socket(zmq.DEALER) as peer:
            for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, 1), (zmq.RCVBUF, 4096)):
                peer.setsockopt(option, value)
            peer.connect(find_run("r").control_endpoint)
            for _ in range(5000):
                assert peer.poll(30_000, zmq.POLLOUT)
                peer.send(question)
            training.await_recorded(training.published + 5000)
            assert resident(training.broker_pid) - before < 100
        told = training.finish()
        assert_complete(follower.result(), told["events"])
    assert told["dropped"] == 0
