"""What a replay does when its broker comes back, or does not: without sockets."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from offloop.bus.errors import BrokerError
from offloop.bus.protocol.frames import Control
from offloop.bus.replay.feed import Feed
from offloop.bus.types.timeouts import Timeouts


class Connection:
    """A connection whose broker says what the test puts in :attr:`says`."""

    run_name, address, welcome = "r", "tcp://127.0.0.1:5570", {"attempt": 1}

    def __init__(self) -> None:
        self.says: deque[Control] = deque()
        self.sent: list[bytes] = []
        self.renewed = 0
        self.fails: list[OSError] = []
        self.process: Any = None

    def receive(self) -> Control | None:
        return self.says.popleft() if self.says else None

    def send(self, message: bytes, flags: int) -> None:
        self.sent.append(message)

    def renew(self) -> None:
        if self.fails:
            raise self.fails.pop()
        self.renewed += 1


@pytest.fixture
def connection() -> Connection:
    return Connection()


@pytest.fixture
def feed(connection: Connection) -> Feed:
    feed = Feed(connection, 0, Timeouts(probe=0.0))  # type: ignore[arg-type]
    feed.put(1, b"one")
    feed.exchange()
    return feed


def test_a_broker_that_ended_the_replay_in_the_meantime_takes_nothing_more(feed: Feed, connection: Connection) -> None:
    connection.says += [Control("unknown", {}), Control("welcome", {"acknowledged": 1, "ended": 2})]
    with pytest.raises(BrokerError, match=r"took the replay 'r' for lost .* start it again"):
        feed.exchange()


def test_a_broker_that_has_all_of_it_has_not_ended_it_for_us(feed: Feed, connection: Connection) -> None:
    connection.says += [Control("unknown", {}), Control("welcome", {"acknowledged": 1, "ended": 1})]
    feed.exchange()
    assert feed.is_settled


def test_without_room_for_a_connection_it_is_tried_again(feed: Feed, connection: Connection) -> None:
    connection.fails.append(OSError(24, "Too many open files"))
    connection.says.append(Control("unknown", {}))
    feed.exchange()
    assert not connection.fails
    feed.exchange()
    assert connection.renewed
    connection.says.append(Control("welcome", {"acknowledged": 0}))
    connection.sent.clear()
    feed.exchange()
    assert b"one" in connection.sent


def test_without_room_for_a_process_it_is_tried_again(feed: Feed, connection: Connection) -> None:
    starts = iter([OSError(11, "Resource temporarily unavailable"), True])

    def restart() -> bool:
        if isinstance(result := next(starts), OSError):
            raise result
        return result

    feed._timeouts = Timeouts(probe=1000.0, last_words=-1.0)
    connection.process = SimpleNamespace(ended=lambda: "killed", refusal=lambda: None, restart=restart)
    for _ in range(3):
        feed.exchange()
    assert connection.renewed == 1
