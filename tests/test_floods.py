"""A standing broker without keys, and peers that send as much as they can: its memory and its runs."""

import contextlib
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import raw_peers
from brokers import free_address, start_broker
from helpers import wait_for

from bus import Event, Publisher, Recording
from bus.run_source import ask_broker

MEBIBYTE = 1 << 20
BUDGET = 256 * MEBIBYTE
"""What a broker may grow by before it closes connections."""
SPARE = 256 * MEBIBYTE
"""What may come in until it has noticed that, on a busy machine."""
LEFT = 64 * MEBIBYTE


class WatchedBroker:
    """``bus broker`` with the most memory that it has taken so far."""

    def __init__(self) -> None:
        self.address = free_address()
        self.process = start_broker(self.address)
        self._memory = psutil.Process(self.process.pid).memory_info
        self.at_first = self.highest = self._memory().rss

    def look(self) -> None:
        """Notes what it takes now."""
        self.highest = max(self.highest, self._memory().rss)

    def wait_until_given_back(self) -> None:
        """Waits until most of what it took is the system's again."""
        wait_for(lambda: self._memory().rss < self.at_first + LEFT, "the memory to be given back", 100)


@pytest.fixture
def broker(runs_dir):
    watched = WatchedBroker()
    yield watched
    watched.process.terminate()
    watched.process.communicate(timeout=100)
    assert watched.process.returncode == 0


@contextlib.contextmanager
def flood(address, kind):
    flooder = subprocess.Popen([sys.executable, raw_peers.__file__, address, kind], stdout=subprocess.PIPE, text=True)
    try:
        assert flooder.stdout.readline() == "flooding\n"
        yield
    finally:
        flooder.kill()
        flooder.communicate()


def publish_while(publisher, broker, seconds):
    """Publishes for so long, and looks at the broker's memory all the while; how many events that were."""
    batch = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        batch += 1
        publisher.publish(Event.BATCH_END, batch=batch)
        broker.look()
        time.sleep(0.005)
    return batch


def assert_recorded(runs_dir, events):
    recording = Recording(runs_dir / "r")
    assert [int(snapshot.timestamp.batch) for snapshot in recording] == list(range(1, events + 1))
    assert (recording.ending.status, recording.gaps) == ("finished", ())


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("junk", SPARE),
        ("small events", SPARE),
        ("large events", SPARE),
        ("bundles", SPARE),
        ("large requests", SPARE),
        ("requests", BUDGET + SPARE),
        ("known", BUDGET + SPARE),
    ],
)
def test_a_flood_costs_neither_memory_nor_a_run(broker, runs_dir, kind, most):
    with Publisher("r", broker=broker.address) as publisher:
        with flood(broker.address, kind):
            events = publish_while(publisher, broker, 5)
        broker.wait_until_given_back()
    assert_recorded(runs_dir, events)
    assert broker.highest - broker.at_first < most


def test_messages_that_are_never_complete_are_not_kept(broker, runs_dir):
    piece = bytes(15 * MEBIBYTE)
    connections = []

    def send(connection):
        with contextlib.suppress(OSError):
            connection.sendall(raw_peers.large_frame(16 * MEBIBYTE) + piece)

    with Publisher("r", broker=broker.address) as publisher:
        for _ in range(80):
            connections.append(raw_peers.connect(broker.address))
            threading.Thread(target=send, args=connections[-1:]).start()
            broker.look()
        events = publish_while(publisher, broker, 3)
        for connection in connections:
            connection.close()
        broker.wait_until_given_back()
    assert_recorded(runs_dir, events)
    assert broker.highest - broker.at_first < BUDGET + SPARE


def test_heartbeats_behind_a_flood_whose_connection_is_reset_do_no_harm(broker, runs_dir):
    with Publisher("r", broker=broker.address) as publisher:
        for _ in range(20):
            connection = raw_peers.connect(broker.address)
            with contextlib.suppress(OSError):
                for _ in range(20):
                    connection.sendall(raw_peers.frame(b"x") * 500 + raw_peers.ping())
            raw_peers.reset(connection)
            stream = raw_peers.connect(publisher._uplink._link.welcome["stream"], b"SUB")
            with contextlib.suppress(OSError):
                stream.sendall((raw_peers.frame(b"\1r/") + raw_peers.ping()) * 500)
            raw_peers.reset(stream)
        events = publish_while(publisher, broker, 1)
    assert_recorded(runs_dir, events)


def test_who_connects_while_a_flood_is_dropped_stays_connected(broker):
    junk = raw_peers.frame(b"x") * 30_000
    for _ in range(5):
        hostile = raw_peers.connect(broker.address)
        broker.process.send_signal(signal.SIGSTOP)
        hostile.sendall(junk)
        hostile.close()
        broker.process.send_signal(signal.SIGCONT)
        # One of these is given the descriptor that the hostile connection has had.
        honest = [raw_peers.open_connection(broker.address) for _ in range(200)]
        ask_broker(broker.address, "runs", {"run": None})
        for one in honest:
            # Fails if the broker has closed it.
            raw_peers.shake_hands(one)
            one.close()
