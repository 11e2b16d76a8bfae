"""A standing broker without keys, and peers that send as much as they can: its memory and its runs."""

import contextlib
import ctypes
import resource
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import raw_peers
import zmq
from brokers import free_address, start_broker
from helpers import wait_for

from offloop.bus import BrokerError, Event, Publisher, Recording, Subscriber, find_run
from offloop.bus.broker import connection_guard
from offloop.bus.net.requests import ask_broker
from offloop.bus.protocol.frames import Topic, decode_control, event_encoder, pack_map, split_frame

MEBIBYTE = 1 << 20
BUDGET = 256 * MEBIBYTE
"""What a broker may grow by before it closes connections."""
SPARE = 256 * MEBIBYTE
"""What may come in until it has noticed that, on a busy machine."""
LEFT = 64 * MEBIBYTE


class WatchedBroker:
    """``offloop server broker`` with the most memory that it has taken so far."""

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
        ("batches", SPARE),
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


def test_memory_is_given_back_however_slowly_it_was_taken(monkeypatch):
    # As if all that a flood left had been read over some minutes.
    monkeypatch.setattr(connection_guard, "FORGIVEN_A_SECOND", 1 << 40)
    memory = psutil.Process().memory_info
    with contextlib.closing(connection_guard.ConnectionGuard("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")) as guard:
        # What other tests have freed would be taken first.
        ctypes.CDLL(None).malloc_trim(0)
        at_first = memory().rss
        guard.start()
        blocks = [bytes(1000) for _ in range(200_000)]
        # What is freed in front of a block in use, glibc does not give back by itself.
        last = [bytes(1000) for _ in range(1000)]
        assert memory().rss > at_first + 2 * LEFT
        del blocks
        wait_for(lambda: memory().rss < at_first + LEFT, "the memory to be given back")
        del last


def test_memory_is_given_back_soon_also_after_a_time_when_that_took_long(monkeypatch):
    """In the middle of a flood of a gigabyte, on a busy machine."""
    spent, trims = [0.0], []

    def trim(_):
        trims.append(spent[0])
        spent[0] += 10.0

    monkeypatch.setattr(time, "thread_time", lambda: spent[0])
    with contextlib.closing(connection_guard.ConnectionGuard("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")) as guard:
        guard._trim, guard._at_first = trim, -(1 << 40)
        for second in range(60):
            guard._mind_memory(1000.0 + second)
        guard.start()
    assert len(trims) == 3


def test_heartbeats_behind_a_flood_whose_connection_is_reset_do_no_harm(broker, runs_dir):
    with Publisher("r", broker=broker.address) as publisher:
        for _ in range(20):
            connection = raw_peers.connect(broker.address)
            with contextlib.suppress(OSError):
                for _ in range(20):
                    connection.sendall(raw_peers.frame(b"x") * 500 + raw_peers.ping())
            raw_peers.reset(connection)
            stream = raw_peers.connect(publisher._session._connection.welcome["event_feed"], b"SUB")
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


@pytest.fixture
def small_broker(runs_dir):
    """One that has 1,024 descriptors and no more."""
    address = free_address()
    command = ["prlimit", "--nofile=1024", sys.executable, "-m", "offloop.bus", "server", "broker", "--listen", address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert "serving at" in process.stdout.readline()
    yield address
    process.terminate()
    process.communicate(timeout=100)
    assert process.returncode == 0


def test_thousands_of_hellos_keep_nobody_out_and_leave_nothing_behind(small_broker, runs_dir):
    connections = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 5000)), hard))
    with Publisher("r", broker=small_broker) as publisher:
        publisher.publish(Event.EPOCH_START)
        # Some wait in the system's queue until the broker has closed others.
        sender = threading.Thread(target=say_hello, args=(small_broker, 3000, connections))
        sender.start()
        wait_for(lambda: len(connections) >= 1500, "half of the connections", 200)
        subscriber = Subscriber("r", broker=small_broker)
        with Publisher("new", broker=small_broker) as new:
            new.publish(Event.EPOCH_START)
            wait_for(lambda: new.poll() or new.statistics().acknowledged == 1, "the new run on disk", 100)
        sender.join()
        publisher.publish(Event.EPOCH_END)
        following = iter(subscriber)
        assert [next(following).event for _ in range(2)] == [Event.EPOCH_START, Event.EPOCH_END]
        subscriber.close()
    for connection in connections:
        connection.close()
    assert sorted(path.name for path in runs_dir.glob("[!.]*") if path.is_dir()) == ["new", "r"]
    for run in ("new", "r"):
        wait_for(lambda: find_run(run).status == "finished", "the end of the run", 100)  # noqa: B023  called at once


def say_hello(address, times, connections):
    """From as many connections, which stay open."""
    for number in range(times):
        with contextlib.suppress(OSError, AssertionError):
            connection = raw_peers.connect(address)
            connections.append(connection)
            connection.sendall(raw_peers.frame(raw_peers.hello(f"h-{number}")))


def test_a_run_exists_from_its_first_event_on(broker, runs_dir):
    with Publisher("r", broker=broker.address, world_size=2) as first:
        second = Publisher("r", broker=broker.address, rank=1, world_size=2)
        with pytest.raises(BrokerError, match="rank 1 of run 'r' is there already"):
            Publisher("r", broker=broker.address, rank=1, world_size=2)
        assert (first.attempt, first.recording) == (1, runs_dir.absolute() / "r" / "recording-1.mcap")
        assert list(runs_dir.iterdir()) == []
        (listed,) = ask_broker(broker.address, "runs", {"run": None})["runs"]
        assert (listed["run"], listed["attempt"], listed["status"]) == ("r", 1, "live")
        assert list(runs_dir.iterdir()) == []
        second.publish(Event.EPOCH_START)
        wait_for(lambda: second.poll() or second.statistics().acknowledged == 1, "the first event on disk")
        assert find_run("r").status == "live"
        assert [one["rank"] for one in find_run("r").last.publishers] == [0, 1]
        second.close()
    assert find_run("r").status == "finished"


def test_who_asks_for_a_run_before_its_first_event_follows_it(broker, runs_dir):
    with Publisher("r", broker=broker.address) as publisher:
        subscriber = Subscriber("r", broker=broker.address)
        assert find_run("r").status == "live"
        publisher.publish(Event.EPOCH_START)
        assert next(iter(subscriber)).event == Event.EPOCH_START
        subscriber.close()
    with Publisher("r", broker=broker.address, resume=True) as publisher:
        (listed,) = ask_broker(broker.address, "runs", {"run": None})["runs"]
        assert (listed["attempts"], listed["status"], listed["id"]) == ([1, 2], "live", find_run("r").id)
        assert [attempt.number for attempt in find_run("r").attempts] == [1]


def test_a_publisher_whose_broker_ends_before_the_first_event_begins_at_the_next(runs_dir):
    address = free_address()
    broker = start_broker(address)
    with Publisher("r", broker=address) as publisher:
        broker.kill()
        broker.communicate()
        publisher.publish(Event.EPOCH_START)
        broker = start_broker(address)
        wait_for(lambda: publisher.poll() or publisher.statistics().acknowledged == 1, "the first event on disk", 100)
    broker.terminate()
    broker.communicate(timeout=100)
    recording = Recording(runs_dir / "r")
    assert ([snapshot.seq for snapshot in recording], recording.gaps) == ([1], ())
    assert [(one.number, one.status) for one in find_run("r").attempts] == [(1, "finished")]


def test_a_connection_publishes_one_run(broker):
    context = zmq.Context()
    try:
        control = context.socket(zmq.DEALER)
        control.connect(broker.address)
        control.send(raw_peers.hello("one"))
        control.send(event_encoder(Topic("one", "epoch_end", 0), 1)(1, 1, 5, [0] * 14, None, {}, pack_map({})))
        control.send(raw_peers.hello("two"))
        kind = ""
        while kind != "refused":
            assert control.poll(60_000)
            kind, content, _ = decode_control(split_frame(control.recv())[1])
        assert content["reason"] == "this connection publishes run 'one': use another one for run 'two'"
    finally:
        context.destroy(linger=0)
