"""What a replay does when its broker comes back, or does not: without sockets."""

import time
from collections import deque
from typing import Any

import pytest

from offloop.bus.errors import BrokerError
from offloop.bus.protocol.frames import Control, Topic, decode_event, event_encoder, pack_map
from offloop.bus.publisher.outbox import Outbox
from offloop.bus.publisher.session import BrokerSession
from offloop.bus.publisher.session_state import SessionState
from offloop.bus.recording.source import Recorded
from offloop.bus.replay.serving import BACKLOG_BYTES, Feed
from offloop.bus.types.timeouts import Timeouts

BODY = event_encoder(Topic("r", "batch_end", 0), 1)(1, 1, 1, [0] * 14, None, {}, pack_map({})).partition(b"\0")[2]


class Session(BrokerSession):
    """A session whose broker says what the test puts in :attr:`says`."""

    def __init__(self) -> None:
        self.says: deque[Control] = deque()
        self.run_name, self.welcome, self.process = "r", {"attempt": 1}, None
        outbox = Outbox(self._send, BACKLOG_BYTES)
        self.state = SessionState("r", self.welcome, outbox, Timeouts.default, time.monotonic())

    def _next(self) -> Control | None:
        return self.says.popleft() if self.says else None

    def _send(self, message: bytes, flags: int = 0) -> None:
        pass

    def _renew(self, demand: Any) -> None:
        pass


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def feed(session: Session) -> Feed:
    feed = Feed(session, 0)
    feed.put(Recorded(Topic("r", "batch_end", 0), decode_event(BODY), BODY))
    feed.exchange()
    return feed


def test_a_broker_that_ended_the_replay_in_the_meantime_takes_nothing_more(feed: Feed, session: Session) -> None:
    session.says += [Control("unknown", {}), Control("welcome", {"acknowledged": 1, "ended": 2})]
    with pytest.raises(BrokerError, match="does not take it up again"):
        feed.exchange()


def test_a_broker_that_has_all_of_it_has_not_ended_it_for_us(feed: Feed, session: Session) -> None:
    session.says += [Control("unknown", {}), Control("welcome", {"acknowledged": 1, "ended": 1})]
    feed.exchange()
    assert feed.is_settled
