"""A publisher's session with its broker, without sockets; the clock is a number."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloop.bus.protocol.frames import Control, Topic, event_encoder, pack_map
from offloop.bus.publisher.outbox import Outbox
from offloop.bus.publisher.session_state import Action, Hello, Say, SessionState
from offloop.bus.types.timeouts import Timeouts

WELCOME = {"path": "/runs/r", "recording": "recording-1.mcap", "demand": {"loss": {}}}
FRAME = event_encoder(Topic("r", "batch_end", 0), 1)
TIMES = Timeouts(silence=5.0)


class Session:
    """A session, the messages that it sends of its own accord, and a clock."""

    def __init__(self, limit: int = 1 << 16) -> None:
        self.sent: list[bytes] = []
        self.outbox = Outbox(lambda message, _: self.sent.append(message), limit)
        self.state = SessionState("r", WELCOME, self.outbox, TIMES, now=0.0)
        self.now = 0.0

    def publish(self, *numbers: int) -> None:
        for number in numbers:
            self.outbox.put(FRAME(number, number, number, (0,) * 14, None, {}, pack_map({})))
        self.outbox.send()

    def hear(self, kind: str, **content: Any) -> list[Action]:
        return self.state.receive(Control(kind, content), self.now)

    def after(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self.state.tick(self.now)


def test_unacknowledged_events_are_sent_to_the_restarted_broker() -> None:
    session = Session()
    for number in (1, 2, 3):
        session.publish(number)
    session.hear("ack", seq=1)
    assert session.hear("unknown") == [Hello({"loss": {}})]
    # A second word of the same broker is no second loss.
    assert session.hear("unknown") == []
    assert session.hear("welcome", **WELCOME, acknowledged=2, ended=None) == []
    assert (session.outbox.first, len(session.outbox)) == (3, 1)
    assert (session.state.acknowledged, session.state.restarts, session.state.lost) == (2, 1, False)


def test_hello_is_repeated_until_a_broker_answers(caplog: pytest.LogCaptureFixture) -> None:
    session = Session()
    session.publish(1)
    session.hear("unknown")
    assert session.after(1.0) == []
    assert session.after(1.5) == [Hello({"loss": {}})]
    # A broker that cannot take the run up now may do so later.
    assert session.hear("refused", error="RunIsLiveError", reason="it is live") == []
    assert not session.state.lost
    assert session.after(2.5) == [Hello({"loss": {}})]
    # A reason is told once, not at each attempt.
    for _ in range(2):
        session.state.broker_failed(OSError("too many open files"))
        assert session.after(2.5) == [Hello({"loss": {}})]
    told = [text for text in caplog.messages if "not recorded yet" in text]
    assert [text.partition("retrying: ")[2] for text in told] == ["it is live", "too many open files"]


def test_events_beyond_the_backlog_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    session = Session(limit=300)
    session.hear("unknown")
    session.publish(*range(1, 21))
    lost = session.outbox.first - 1
    assert 0 < lost < 19
    for _ in range(2):
        session.hear("welcome", **WELCOME, acknowledged=0, ended=None)
        session.hear("retransmit", after=0)
    assert caplog.text.count("not recorded") == caplog.text.count(f"events 1 to {lost} are not recorded") == 1


def test_a_silent_broker_is_asked_only_while_events_are_unacknowledged() -> None:
    session = Session()
    assert session.after(100.0) == []
    session.publish(1, 2)
    assert session.after(0.0) == []
    assert session.after(0.4) == []
    (say,) = session.after(0.2)
    assert say == Say("report", {"last_sent": 2})
    assert session.after(0.4) == []
    assert session.after(0.2) == [say]
    session.hear("ack", seq=2)
    assert session.after(100.0) == []


def test_a_pause_of_the_loop_is_no_silence_of_the_broker(caplog: pytest.LogCaptureFixture) -> None:
    session = Session()
    for number in (1, 2):
        session.now += 100.0
        session.publish(number)
        assert session.after(0.0) == []
        assert not session.state.is_silent(session.now)
        session.after(0.1)
        session.hear("ack", seq=number)
        session.after(0.1)
    assert caplog.text == ""
    session.publish(3)
    session.after(0.0)
    # Nothing was heard in this pause.
    session.after(5.1)
    assert session.state.is_silent(session.now)
    assert "the broker of run r has not answered for 5 s" in caplog.text


def test_silence_of_the_own_broker_does_not_end_the_session() -> None:
    session = Session()
    session.publish(1)
    for _ in range(20):
        session.after(5.1)
    assert not session.outbox.paused


def test_a_refused_request_of_a_served_run_ends_nothing() -> None:
    session = Session()
    assert session.hear("refused", error="ProtocolError", reason="malformed") == []
    assert not session.outbox.paused
    assert not session.state.lost


def test_a_broker_that_ended_the_stream_itself_gets_no_further_events() -> None:
    session = Session()
    session.publish(1, 2, 3)
    session.hear("ack", seq=2)
    session.hear("unknown")
    # Event 3 was lost on the way, so that the end that the broker wrote bears its number.
    assert session.hear("welcome", **WELCOME, acknowledged=3, ended=3) == []
    assert (session.state.acknowledged, session.state.lost) == (2, True)


def test_a_stream_that_was_ended_by_its_publisher_is_not_lost() -> None:
    session = Session()
    session.publish(1, 2, 3)
    session.state.end(3)
    session.hear("unknown")
    assert session.hear("welcome", **WELCOME, acknowledged=3, ended=3) == []
    assert session.state.acknowledged == 3


MESSAGES = st.one_of(
    st.tuples(st.just("ack"), st.fixed_dictionaries({"seq": st.integers(-1, 30) | st.none()})),
    st.tuples(st.just("retransmit"), st.fixed_dictionaries({"after": st.integers(0, 30) | st.text()})),
    st.tuples(
        st.just("welcome"),
        st.fixed_dictionaries(
            {"acknowledged": st.integers(0, 30) | st.none(), "ended": st.integers(0, 30) | st.none()}
        ),
    ),
    st.tuples(
        st.sampled_from(["unknown", "ended", "trouble", "recovered", "demand", "of a newer version"]), st.just({})
    ),
    st.tuples(
        st.just("refused"), st.fixed_dictionaries({"error": st.sampled_from(["RunIsLiveError", "BrokerError", 1])})
    ),
)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("publish"), st.integers(1, 5)),
            st.tuples(st.just("wait"), st.floats(0.0, 10.0)),
            st.tuples(st.just("hear"), MESSAGES),
        ),
        max_size=30,
    ),
)
def test_each_event_is_kept_until_it_is_acknowledged(happenings: list[tuple[str, Any]]) -> None:
    session = Session(limit=1 << 20)
    state, published = session.state, 0
    for what, value in happenings:
        if what == "publish":
            session.publish(*range(published + 1, published + value + 1))
            published += value
        elif what == "wait":
            session.after(value)
        else:
            session.hear(value[0], **value[1])
        if state.lost:
            break
        assert session.outbox.first <= state.acknowledged + 1 or state.acknowledged >= published
