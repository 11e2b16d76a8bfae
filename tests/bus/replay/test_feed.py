"""What a replay does when its broker comes back, or does not: without sockets."""

from collections import deque
from typing import Any

import pytest

from offloop.bus.errors import BrokerError
from offloop.bus.protocol.frames import Control
from offloop.bus.replay.feed import Feed
from offloop.bus.types.timeouts import Timeouts


class Connection:
    """A connection whose broker says what the test puts in :attr:`says`."""

    run_name, welcome, process = "r", {"attempt": 1}, None

    def __init__(self) -> None:
        self.says: deque[Control] = deque()
        self.sent: list[bytes] = []

    def receive(self) -> Control | None:
        return self.says.popleft() if self.says else None

    def send(self, message: bytes, flags: int) -> None:
        self.sent.append(message)

    def renew(self, demand: Any = None) -> None:
        pass


@pytest.fixture
def connection() -> Connection:
    return Connection()


@pytest.fixture
def feed(connection: Connection) -> Feed:
    feed = Feed(connection, 0, Timeouts.default)  # type: ignore[arg-type]
    feed.put(1, b"one")
    feed.exchange()
    return feed


def test_a_broker_that_ended_the_replay_in_the_meantime_takes_nothing_more(feed: Feed, connection: Connection) -> None:
    connection.says += [Control("unknown", {}), Control("welcome", {"acknowledged": 1, "ended": 2})]
    with pytest.raises(BrokerError, match="does not take it up again"):
        feed.exchange()


def test_a_broker_that_has_all_of_it_has_not_ended_it_for_us(feed: Feed, connection: Connection) -> None:
    connection.says += [Control("unknown", {}), Control("welcome", {"acknowledged": 1, "ended": 1})]
    feed.exchange()
    assert feed.is_settled
