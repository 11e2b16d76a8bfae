"""The ring of a publisher: what it keeps, sends again and gives up."""

import msgpack
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.frames import MAX_FRAME
from offloop.bus.publisher.outbox import Outbox


class Line:
    """A connection to a broker that takes frames in order, while it is let; what is lost on it is asked for again."""

    def __init__(self) -> None:
        self.room = 0
        self.losing = False
        self.position = 0
        self.recorded = 0
        self.gaps: list[tuple[int, int]] = []
        self.taken: list[int] = []
        self.asks = False

    def send(self, message: bytes, _flags: int) -> None:
        if self.room == 0:
            raise zmq.Again
        self.room -= 1
        if self.losing:
            return
        if not message.startswith(b"\0"):
            self._take(message)
            return
        _, kind, content = msgpack.unpackb(message[1:])
        if kind == "resume":
            if content["from"] > self.position + 1:
                self.gaps.append((self.position + 1, content["from"] - 1))
                self.position = content["from"] - 1
        else:
            for frame in content["frames"]:
                self._take(frame)

    def _take(self, frame: bytes) -> None:
        number = int(frame.rstrip(b"."))
        if number == self.position + 1:
            self.position = number
            self.taken.append(number)
        elif number > self.position + 1:
            self.asks = True


def frame_of(number: int, size: int) -> bytes:
    return str(number).encode().ljust(size, b".")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(1, 40)),
            st.tuples(st.just("room"), st.integers(0, 4)),
            st.tuples(st.sampled_from(["lose", "keep", "ack", "restart"]), st.just(0)),
        ),
        max_size=120,
    ),
    st.integers(60, 1000),
)
def test_every_frame_arrives_once_and_in_order_or_is_a_named_gap(steps: list[tuple[str, int]], limit: int) -> None:
    line = Line()
    outbox = Outbox(line.send, limit)
    put = 0

    def exchange() -> None:
        outbox.send()
        if line.asks:
            line.asks = False
            outbox.retransmit()

    for what, value in steps:
        if what == "put":
            put += 1
            outbox.put(frame_of(put, value))
            assert outbox.size <= limit
        elif what == "room":
            line.room = value
            exchange()
        elif what == "ack":
            line.recorded = line.position
            outbox.acknowledge(line.recorded)
        elif what == "restart":
            # The broker dies with what it has not recorded, and another one goes on from there.
            line.position = line.recorded
            outbox.retransmit()
        else:
            line.losing = what == "lose"
    line.losing = False
    line.room = 1 << 30
    outbox.retransmit()
    exchange()
    exchange()
    assert line.position == put
    named = {number for first, last in line.gaps for number in range(first, last + 1)}
    assert set(line.taken) | named == set(range(1, put + 1))
    assert (outbox.sent + outbox.dropped, outbox.size_high <= limit) == (put, True)
    assert len(outbox) == 0


def test_acknowledged_frames_are_dropped() -> None:
    line = Line()
    line.room = 100
    outbox = Outbox(line.send, 1000)
    for number in range(1, 11):
        outbox.put(frame_of(number, 10))
        outbox.send()
    assert outbox.size == 100
    outbox.acknowledge(7)
    assert (outbox.size, outbox.first) == (30, 8)
    outbox.retransmit()
    assert len(outbox) == 3
    outbox.send()
    assert (outbox.resent, outbox.sent, outbox.dropped) == (3, 10, 0)


def test_a_frame_over_the_limit_is_refused_and_takes_no_number() -> None:
    outbox = Outbox(Line().send, 1 << 30)
    with pytest.raises(ConfigurationError, match="cannot be sent"):
        outbox.put(bytes(MAX_FRAME + 1))
    outbox.put(bytes(MAX_FRAME))
    assert outbox.first == 1


@pytest.mark.parametrize(("count", "size", "messages"), [(256, 10, 1), (600, 10, 3), (3, 40_000, 3), (2, 30_000, 1)])
def test_frames_too_large_for_one_message_are_split_over_several(count: int, size: int, messages: int) -> None:
    line = Line()
    line.room = 1000
    outbox = Outbox(line.send, 1 << 24)
    for number in range(1, count + 1):
        outbox.put(frame_of(number, size))
    outbox.send()
    assert (line.taken, 1000 - line.room) == (list(range(1, count + 1)), messages)
