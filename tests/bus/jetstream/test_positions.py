"""The position of a named consumer, kept by a real server: one process at a time may write it."""

import signal
import time

import pytest
from helpers import wait_for

from offloop.bus import BrokerError, ConfigurationError
from offloop.bus.errors import ReplacedError
from offloop.bus.jetstream import names, positions
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.jetstream.positions import HeldPosition
from offloop.bus.jetstream.run_stream import open_bucket


@pytest.fixture
def nats_connection(nats_server, monkeypatch):
    monkeypatch.setattr(positions, "STALE_SECONDS", 1.0)
    monkeypatch.setattr(positions, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(positions, "_REST_SECONDS", 0.5)
    monkeypatch.setattr(positions, "_WRITE_SECONDS", 1.0)
    with NatsConnection.shared(nats_server.servers) as made:
        made.call(open_bucket(made.client, names.POSITIONS_BUCKET, 1), 5.0)
        yield made


@pytest.fixture
def hold(nats_connection):
    """Hold the position of the consumer ``mine``."""
    held = []

    def begin(attempt=1):
        held.append(HeldPosition(nats_connection, "r", "mine", attempt, lambda text: None))
        return held[-1]

    yield begin
    for one in held:
        one.close()


def is_written(position, value):
    try:
        position.write(value)
    except BrokerError:
        return False
    return True


def test_the_next_one_finds_what_was_written_last(hold):
    first = hold()
    assert first.found == b""
    first.write(b"one")
    with pytest.raises(ConfigurationError, match="'mine' is at work on run 'r' already"):
        hold()
    first.write(b"two")
    first.close()
    second = hold()
    assert second.found == b"two"
    second.close()
    assert hold(attempt=2).found == b""


@pytest.mark.parametrize("has_written", [False, True])
def test_a_paused_process_that_was_replaced_writes_nothing_more(hold, has_written):
    first = hold()
    if has_written:
        first.write(b"one")
    first._renewal.cancel()  # as a process does that is stopped
    second = hold()
    assert second.found == (b"one" if has_written else b"")
    # Before the second one has written anything of its own.
    with pytest.raises(ReplacedError):
        first.write(b"late")
    second.write(b"two")
    first.close()
    second.write(b"three")
    second.close()
    assert hold().found == b"three"


def test_an_answer_that_was_lost_is_no_other_process(hold, nats_server):
    first = hold()
    first.write(b"one")
    nats_server.signal(signal.SIGSTOP)
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(BrokerError, match="answer"):
            first.write(b"two")
    assert time.monotonic() - began < 2
    nats_server.signal(signal.SIGCONT)
    wait_for(lambda: is_written(first, b"three"), "the servers")
    first.close()
    assert hold().found == b"three"


def test_servers_that_went_back_to_an_older_state_take_the_newest_one(hold, nats_server, tmp_path):
    first = hold()
    first.write(b"one")
    older = nats_server.copy_store(tmp_path / "older")
    first.write(b"two")
    nats_server.set_back(older)
    wait_for(lambda: is_written(first, b"three"), "the servers")
    first.close()
    assert hold().found == b"three"


def test_servers_that_are_away_are_not_waited_for(hold, nats_server, nats_connection):
    first = hold()
    nats_server.kill()
    wait_for(lambda: not nats_connection.is_connected, "the end of the connection")
    began = time.monotonic()
    for _ in range(100):
        with pytest.raises(BrokerError, match="no NATS server answers"):
            first.write(b"one")
    assert time.monotonic() - began < 1


def test_a_position_that_is_larger_than_the_servers_take_is_refused_with_the_way_out(hold):
    first = hold()
    first.write(bytes(1_000_000))
    with pytest.raises(ConfigurationError, match="'--state-dir DIR' keeps it"):
        first.write(bytes(1_100_000))


def test_a_bucket_that_was_removed_is_named_and_used_again_when_a_bridge_makes_it(hold, nats_connection):
    first = hold()
    first.write(b"one")
    nats_connection.call(nats_connection.client.js.delete_key_value(names.POSITIONS_BUCKET), 5.0)
    with pytest.raises(BrokerError):
        first.write(b"two")
    with pytest.raises(BrokerError, match="has no bucket ol_pos"):
        hold(attempt=2)
    nats_connection.call(open_bucket(nats_connection.client, names.POSITIONS_BUCKET, 1), 5.0)
    wait_for(lambda: is_written(first, b"two"), "the bucket")
    first.close()
    assert hold().found == b"two"
