"""Under load: many events, many connections, and peers that only take up room."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from faults import ThreadFollower, resident
from helpers import wait_for

from offloop.bus import Event, Publisher, Recording
from offloop.bus.protocol.frames import encode_control
from offloop.bus.runs.directory import RunInfo, find_run


def begin(publisher: Publisher) -> None:
    """Publishes the first event: the run is there to be followed."""
    publisher.publish(Event.EPOCH_END)
    wait_for(lambda: publisher.poll() or publisher.statistics().acknowledged == 1, "the first event on disk")


def publish_and_follow(publisher: Publisher, follower: ThreadFollower, count: int = 500) -> None:
    """Everybody else is served meanwhile: what is published now is recorded and received."""
    for _ in range(count):
        publisher.publish(Event.EPOCH_END)
    last = publisher.statistics().published
    wait_for(lambda: publisher.poll() or publisher.statistics().acknowledged == last, "the events on disk")
    wait_for(lambda: follower.got[-1:] == [last], "the events at the consumer")


def complete(publisher: Publisher, follower: ThreadFollower) -> None:
    """Ends the run: it is complete."""
    last = publisher.statistics().published
    publisher.close()
    follower.join(30)
    recording = Recording(publisher.run_dir)
    assert follower.got == [snapshot.seq for snapshot in recording] == list(range(1, last + 1))
    assert (follower.subscriber.gaps, recording.gaps, recording.damage) == ((), (), None)


Peer = Callable[["zmq.Socket[bytes]", RunInfo], None]


def ask_without_reading(peer: "zmq.Socket[bytes]", run: RunInfo) -> None:
    peer.connect(run.control_endpoint)
    question = encode_control("statistics", {"run": "r"})
    for _ in range(5000):
        assert peer.poll(30_000, zmq.POLLOUT)
        peer.send(question)


def subscribe_without_reading(peer: "zmq.Socket[bytes]", run: RunInfo) -> None:
    peer.connect(run.event_feed)
    peer.subscribe(b"")


@pytest.mark.parametrize(
    ("kind", "misbehave", "room"), [(zmq.DEALER, ask_without_reading, 100), (zmq.SUB, subscribe_without_reading, 60)]
)
def test_a_peer_that_does_not_read_does_not_delay_a_run(runs_dir: Path, kind: int, misbehave: Peer, room: int) -> None:
    publisher = Publisher("r")
    pid = json.loads((publisher.run_dir / "broker.json").read_text())["pid"]
    begin(publisher)
    follower = ThreadFollower("r")
    for _ in range(100):
        publisher.publish(Event.EPOCH_END, noise=os.urandom(10_000))
    publish_and_follow(publisher, follower)
    before = resident(pid)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(kind) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.RCVHWM, 1)
        peer.setsockopt(zmq.RCVBUF, 4096)
        misbehave(peer, find_run("r"))
        for _ in range(3):
            # More than any queue between the two holds.
            publish_and_follow(publisher, follower, 2000)
        assert resident(pid) - before < room
    complete(publisher, follower)
