"""One rank at the broker: order, retransmissions, acknowledgements and death, without sockets and clocks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloop.bus.broker.rank import MAX_TOPICS, LiveRank, Placement
from offloop.bus.errors import ProtocolError
from offloop.bus.protocol.frames import EventBody, Topic, decode_event, event_encoder, pack_map


def event(seq: int, base_seq: int | None = None, **fields: Any) -> EventBody:
    frame = event_encoder(Topic("r", "x", 0), 1)(
        seq, seq if base_seq is None else base_seq, 1000 + seq, (0,) * 14, None, fields, pack_map({})
    )
    return decode_event(frame[frame.index(b"\0") + 1 :])


def rank_at(seq: int, **more: Any) -> LiveRank:
    return LiveRank(0, identity=b"p", seq=seq, base_seq=seq, base_seq_at=seq, recorded=seq, **more)


def test_events_are_accepted_by_number() -> None:
    rank = rank_at(0)
    assert rank.take("batch_end", event(1)) is Placement.NEXT
    assert rank.take("batch_end", event(1)) is Placement.DUPLICATE
    assert rank.take("batch_end", event(3)) is Placement.EARLY
    assert (rank.seq, rank.base_seq, rank.time) == (1, 1, 1001)
    assert rank.last == event(1)
    assert rank.take("$command", event(2)) is Placement.NEXT
    assert rank.last == event(1)


def test_nothing_comes_after_the_end() -> None:
    rank = rank_at(5)
    for fields in ({"status": "over"}, {"status": "failed", "error": 1}):
        with pytest.raises(ProtocolError, match="its end has"):
            rank.take("$end", event(6, **fields))
    assert not rank.ended
    assert rank.take("$end", event(6, status="finished")) is Placement.NEXT
    assert rank.ended
    assert rank.take("$end", event(6, status="finished")) is Placement.DUPLICATE
    with pytest.raises(ProtocolError, match="after its end"):
        rank.take("batch_end", event(7))
    # Nor is there anything that could be lost.
    assert not rank.is_lost(7)


@pytest.mark.parametrize(("name", "base_seq"), [("batch_end", 3), ("batch_start", 4), ("unheard", 2)])
def test_base_events_are_counted(name: str, base_seq: int) -> None:
    rank = rank_at(5)
    rank.base_seq = 3
    with pytest.raises(ProtocolError, match=f"has the base_seq {base_seq}, where .* belongs"):
        rank.take(name, event(6, base_seq))
    assert rank.seq == 5
    # Each refused event is lost in its turn alone.
    assert [rank.is_lost(number) for number in (5, 6, 7)] == [False, True, False]


def test_a_frame_without_a_number_is_lost_when_it_is_repeated_for_a_retransmission() -> None:
    rank = rank_at(5)
    assert not rank.is_lost(None)
    assert not rank.is_lost(None)
    assert rank.should_request(10.0)
    assert not rank.is_lost(None)
    assert rank.is_lost(None)


def test_missing_events_are_requested_with_pauses_from_the_last_recorded_one() -> None:
    rank = rank_at(5)
    rank.recorded = 3
    assert rank.should_request(10.0)
    assert rank.retransmit_after == 3
    assert not rank.should_request(10.4)
    assert rank.should_request(10.6)
    rank.take("batch_end", event(6))
    assert rank.should_request(11.2)
    rank.identity = None
    assert not rank.should_request(20.0)


def test_each_number_is_acknowledged_once() -> None:
    rank = rank_at(5)
    assert rank.acknowledgement() is None
    rank.acknowledged = 5
    assert rank.acknowledgement() == 5
    assert rank.acknowledgement() is None
    rank.acknowledged = 7
    assert rank.acknowledgement() == 7


def test_a_dead_publisher_is_lost_when_nothing_more_arrives() -> None:
    rank = rank_at(5, pid=1)
    rank.note_presence(True, 99.0)
    assert not rank.is_dead(0.0, 100.0)
    rank.note_presence(False, 100.0)
    rank.note_presence(False, 100.1)
    assert not rank.is_dead(99.0, 100.1)
    assert rank.is_dead(99.0, 100.3)
    # Others go on sending.
    assert not rank.is_dead(101.5, 101.6)
    assert rank.is_dead(102.0, 102.1)
    rank.ended = True
    assert not rank.is_dead(99.0, 200.0)


def test_an_absent_publisher_is_lost_after_a_minute() -> None:
    rank = rank_at(5)
    for is_there, now, is_dead in (
        (False, 100, 0),
        (False, 159, 0),
        (True, 159.5, 0),
        (False, 165, 0),
        (False, 226, 1),
    ):
        rank.note_presence(is_there, now)
        assert rank.is_dead(0.0, now) == is_dead


def frame_of(topic: str) -> bytes:
    return topic.encode() + b"\0" + b"body"


def test_a_connection_publishes_only_its_own_events() -> None:
    rank = rank_at(0)
    assert rank.add_topic("r", b"r/batch_end/0", frame_of("r/batch_end/0")) == "batch_end"
    for topic in ("other/batch_end/0", "r/batch_end/1"):
        with pytest.raises(ProtocolError, match="from the publisher of r/0"):
            rank.add_topic("r", topic.encode(), frame_of(topic))
    with pytest.raises(ProtocolError, match=r"publishers do not send '\$cut'"):
        rank.add_topic("r", b"r/$cut/0", frame_of("r/$cut/0"))
    for number in range(1, MAX_TOPICS):
        rank.add_topic("r", f"r/x{number}/0".encode(), frame_of(f"r/x{number}/0"))
    with pytest.raises(ProtocolError, match="kinds of events"):
        rank.add_topic("r", b"r/x/0", frame_of("r/x/0"))
    rank.names.clear()
    assert rank.add_topic("r", b"r/x/0", frame_of("r/x/0")) == "x"


@given(st.lists(st.integers(1, 12)))
def test_events_in_any_order_are_accepted_once_and_in_order(numbers: list[int]) -> None:
    rank, expected = rank_at(0), 1
    for number in numbers:
        is_next = rank.take("batch_end", event(number)) is Placement.NEXT
        assert is_next == (number == expected)
        expected += is_next
