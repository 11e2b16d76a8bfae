"""Under load: many events, many connections, and peers that only take up room."""

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from helpers import wait_for
from paths import ROOT

from offloop.bus import Event, Publisher, Recording, Subscriber
from offloop.bus.protocol.frames import encode_control
from offloop.bus.runs.directory import RunInfo, find_run

SOAK = ROOT / "benchmarks" / "soak.py"
SILENT = 10_000
MEBIBYTE = 2**20


def test_a_short_soak_loses_nothing(runs_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, SOAK, "--events", "100000", "--json", tmp_path / "figures.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("nothing lost, memory flat\n")
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["events"]["value"] == 100_000
    assert figures["memory of the broker: at the end"]["value"] > 0


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ("CONSUMER = 'print(); print(12, (), chr(33))'", "consumer 2 got 12 () ! of 2000 events"),
        ("GROWTH_BYTES = -(10**9)", "the memory of the broker grew from"),
    ],
)
def test_a_soak_that_goes_wrong_says_so_and_fails(runs_dir: Path, change: str, verdict: str) -> None:
    script = f"import sys; sys.path.insert(0, {str(SOAK.parent)!r}); sys.argv = ['soak', '--events', '2000']\n"
    script += f"import soak; soak.{change}; soak.main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert verdict in done.stderr


# -- peers that only take up room -------------------------------------------------------------------------------------


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    """Allows this process, and those that it starts, a connection for each peer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def connections(kind: socket.AddressFamily, places: list[Any], count: int, first_words: bytes) -> Iterator[None]:
    """So many connections at each place that say nothing, or no more than their first words."""
    made: list[socket.socket] = []
    try:
        for place in places:
            for _ in range(count):
                made.append(socket.socket(kind))
                made[-1].connect(place)
                made[-1].sendall(first_words)
        yield
    finally:
        for one in made:
            one.close()


def memory(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / MEBIBYTE


class Follower(threading.Thread):
    """A subscriber on a thread that keeps the numbers of what comes."""

    def __init__(self, run: str) -> None:
        super().__init__(daemon=True)
        self.subscriber = Subscriber(run)
        self.got: list[int] = []
        self.start()

    def run(self) -> None:
        with self.subscriber:
            for snapshot in self.subscriber:
                self.got.append(snapshot.seq)


def begin(publisher: Publisher) -> None:
    """Publishes the first event: the run is there to be followed."""
    publisher.publish(Event.EPOCH_END)
    wait_for(lambda: publisher.poll() or publisher.statistics().acknowledged == 1, "the first event on disk")


def publish_and_follow(publisher: Publisher, follower: Follower, count: int = 500) -> None:
    """Everybody else is served meanwhile: what is published now is recorded and received."""
    for _ in range(count):
        publisher.publish(Event.EPOCH_END)
    last = publisher.statistics().published
    wait_for(lambda: publisher.poll() or publisher.statistics().acknowledged == last, "the events on disk")
    wait_for(lambda: follower.got[-1:] == [last], "the events at the consumer")


def complete(publisher: Publisher, follower: Follower) -> None:
    """Ends the run: it is complete."""
    last = publisher.statistics().published
    publisher.close()
    follower.join(30)
    recording = Recording(publisher.run_dir)
    assert follower.got == [snapshot.seq for snapshot in recording] == list(range(1, last + 1))
    assert (follower.subscriber.gaps, recording.gaps, recording.damage) == ((), (), None)


HALF_A_GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3"


@pytest.mark.parametrize("first_words", [b"", HALF_A_GREETING])
def test_ten_thousand_connections_that_say_nothing_hold_up_nobody(runs_dir: Path, first_words: bytes) -> None:
    with many_files():
        publisher = Publisher("r")
        told = json.loads((publisher.run_dir / "broker.json").read_text())
        pid = told["pid"]
        places = [told[name].removeprefix("ipc://") for name in ("control_endpoint", "event_feed")]
        begin(publisher)
        follower = Follower("r")
        publish_and_follow(publisher, follower)
        before = memory(pid)
        with connections(socket.AF_UNIX, places, SILENT // 2, first_words):
            publish_and_follow(publisher, follower)
            with Subscriber("r") as late:
                assert next(iter(late)).seq == 1
            high = memory(pid)
        assert high - before < 200
        publish_and_follow(publisher, follower)
        complete(publisher, follower)


Peer = Callable[["zmq.Socket[bytes]", RunInfo], None]


def ask_without_reading(peer: "zmq.Socket[bytes]", run: RunInfo) -> None:
    """Asks for statistics, again and again, and never reads the answers."""
    peer.connect(run.control_endpoint)
    question = encode_control("statistics", {"run": "r"})
    for _ in range(5000):
        assert peer.poll(30_000, zmq.POLLOUT)
        peer.send(question)


def subscribe_without_reading(peer: "zmq.Socket[bytes]", run: RunInfo) -> None:
    """Subscribes to everything and never reads."""
    peer.connect(run.event_feed)
    peer.subscribe(b"")


@pytest.mark.parametrize(
    ("kind", "misbehave", "room"), [(zmq.DEALER, ask_without_reading, 100), (zmq.SUB, subscribe_without_reading, 60)]
)
def test_a_peer_that_does_not_read_costs_little_and_holds_up_nobody(
    runs_dir: Path, kind: int, misbehave: Peer, room: int
) -> None:
    publisher = Publisher("r")
    pid = json.loads((publisher.run_dir / "broker.json").read_text())["pid"]
    begin(publisher)
    follower = Follower("r")
    for _ in range(100):
        publisher.publish(Event.EPOCH_END, noise=os.urandom(10_000))
    publish_and_follow(publisher, follower)
    before = memory(pid)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(kind) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.RCVHWM, 1)
        peer.setsockopt(zmq.RCVBUF, 4096)
        misbehave(peer, find_run("r"))
        for _ in range(10):
            # More than any queue between the two holds.
            publish_and_follow(publisher, follower, 2000)
        assert memory(pid) - before < room
    complete(publisher, follower)
