import os
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import pytest
from segment_jobs import filled, running, writer

from offloop.bus.broker import segments
from offloop.bus.broker.segments import SegmentServer
from offloop.bus.errors import BrokerError, FieldNotAvailableError, OffloopError, ProtocolError
from offloop.bus.protocol.frames import decode_control, encode_control, split_frame
from offloop.bus.tensors.segments import SegmentPool
from offloop.bus.tensors.transfer import PIECE, fetch_segment

SIZE = 3 * PIECE + 5


class Broker:
    """Answers like one, through the frames of the protocol; ``asked`` counts the questions."""

    def __init__(self, *publishers: int) -> None:
        self.server = SegmentServer()
        self.publishers = publishers
        self.asked = 0

    def ask(self, kind: str, content: dict[str, Any]) -> Mapping[str, Any]:
        self.asked += 1
        question = decode_control(split_frame(encode_control(kind, content))[1])
        assert question.kind == "fetch_segment"
        try:
            answer = self.server.read(self.publishers, question.content)
        except OffloopError as error:
            raise BrokerError(str(error)) from None
        return decode_control(split_frame(encode_control("segment_data", answer))[1]).content


@pytest.fixture
def server() -> Iterator[SegmentServer]:
    server = SegmentServer()
    yield server
    server.close()


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    pool = SegmentPool(1, is_handled=lambda seq, field: True)
    yield pool
    pool.close()


def requested(reference: dict[str, Any] | None, offset: Any = 0, **further: Any) -> dict[str, Any]:
    return {"run": "first", "segment": reference, "offset": offset, **further}


def published(pipe: Connection, seq: int) -> Any:
    pipe.send(seq)
    return pipe.recv()


def test_an_image_comes_in_bounded_pieces() -> None:
    with running(writer, 1, SIZE) as (process, pipe):
        reference = published(pipe, 5)
        assert process.pid is not None
        broker = Broker(process.pid)
        assert fetch_segment(broker.ask, "first", reference) == bytes([5]) * SIZE
        assert broker.asked == 4
        assert len(broker.server) == 0
        assert published(pipe, 6) is not None


def test_a_segment_stays_from_the_first_piece_to_the_last(pool: SegmentPool, server: SegmentServer) -> None:
    reference = filled(pool, SIZE, 1)
    pieces = []
    for offset in range(0, SIZE, PIECE):
        pieces.append(server.read([os.getpid()], requested(reference, offset))["data"])
        last = offset + PIECE >= SIZE
        assert (pool.reserve(SIZE, "weights") is not None) is last
    assert [len(piece) for piece in pieces] == [PIECE, PIECE, PIECE, 5]
    assert b"".join(pieces) == b"\1" * SIZE


def test_a_consumer_that_goes_away_is_waited_for_a_moment(
    pool: SegmentPool, server: SegmentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = filled(pool, SIZE, 1)
    server.read([os.getpid()], requested(reference))
    server.tidy()
    assert filled(pool, SIZE, 2) is None
    monkeypatch.setattr(server, "_idle", -1.0)
    server.tidy()
    assert filled(pool, SIZE, 2) is not None
    with pytest.raises(FieldNotAvailableError, match="too late"):
        server.read([os.getpid()], requested(reference, PIECE))


def test_segments_that_are_read_are_bounded(server: SegmentServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_OPEN", 2)
    pool = SegmentPool(3)
    references = [filled(pool, SIZE, seq) for seq in (1, 2, 3)]
    for reference in references[:2]:
        server.read([os.getpid()], requested(reference))
    with pytest.raises(BrokerError, match="2 segments are being read"):
        server.read([os.getpid()], requested(references[2]))
    server.read([os.getpid()], requested(references[0], 3 * PIECE))
    server.read([os.getpid()], requested(references[2]))
    assert len(server) == 2
    pool.close()


def test_only_publishers_of_the_run_are_read(pool: SegmentPool, server: SegmentServer) -> None:
    reference = filled(pool, SIZE, 1)
    assert reference is not None
    with pytest.raises(FieldNotAvailableError, match=f"process {os.getpid()} publishes nothing of run 'first'"):
        server.read([1], requested(reference))
    passwords = os.open("/etc/passwd", os.O_RDONLY)
    for stranger in ({"fd": passwords}, {"token": bytes(16)}, {"fd": 1 << 20}):
        with pytest.raises(FieldNotAvailableError, match="no such memory"):
            server.read([os.getpid()], requested({**reference, **stranger}))
    os.close(passwords)
    with pytest.raises(FieldNotAvailableError, match="too late"):
        server.read([os.getpid()], requested({**reference, "size": 1 << 40}))
    assert len(server) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": -1},
        {"offset": SIZE + 1},
        {"offset": 1 << 80},
        {"offset": "0"},
        {"size": 0},
        {"size": -5},
        {"size": None},
        {"segment": None},
        {"segment": {"pid": 1}},
    ],
    ids=str,
)
def test_a_request_that_makes_no_sense_is_refused(
    pool: SegmentPool, server: SegmentServer, changes: dict[str, Any]
) -> None:
    with pytest.raises(ProtocolError):
        server.read([os.getpid()], {**requested(filled(pool, SIZE, 1)), **changes})
    assert len(server) == 0


def test_a_piece_is_no_larger_than_allowed(pool: SegmentPool, server: SegmentServer) -> None:
    reference = filled(pool, SIZE, 1)
    assert len(server.read([os.getpid()], requested(reference, size=1 << 40))["data"]) == PIECE
    assert server.read([os.getpid()], requested(reference, 7, size=10))["data"] == b"\1" * 10
    assert server.read([os.getpid()], requested(reference, SIZE))["data"] == b""


def test_the_writer_is_killed_while_its_segment_is_handed_on() -> None:
    with running(writer, 1, SIZE) as (process, pipe):
        reference = published(pipe, 5)
        assert process.pid is not None
        broker = Broker(process.pid)
        first = broker.ask("fetch_segment", requested(reference))["data"]
        process.kill()
        process.join()
        # What the broker has leased it can hand on to the end; nobody else gets it after that.
        rest = [
            broker.ask("fetch_segment", requested(reference, offset))["data"] for offset in (PIECE, 2 * PIECE, SIZE - 5)
        ]
        assert b"".join([first, *rest]) == bytes([5]) * SIZE
        with pytest.raises(FieldNotAvailableError, match=r"does not hand on these tensors: .* it has ended"):
            fetch_segment(broker.ask, "first", reference)


def test_half_of_an_image_is_no_image(pool: SegmentPool) -> None:
    broker = Broker(os.getpid())

    def ask(kind: str, content: dict[str, Any]) -> Mapping[str, Any]:
        if content["offset"] == 2 * PIECE:
            broker.server.close()
            assert filled(pool, SIZE, 2) is not None
        return broker.ask(kind, content)

    with pytest.raises(FieldNotAvailableError, match="too late"):
        fetch_segment(ask, "first", filled(pool, SIZE, 1) or {})


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"run": "first", "offset": 0, "data": b""},
        {"run": "first", "offset": 0, "data": "text"},
        {"run": "first", "offset": 1, "data": b"1"},
        {"run": "second", "offset": 0, "data": b"1"},
        {"run": "first", "offset": 0, "data": bytes(SIZE + 1)},
    ],
    ids=range(6),
)
def test_an_answer_that_makes_no_sense_ends_it(pool: SegmentPool, answer: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="the broker"):
        fetch_segment(lambda kind, content: answer, "first", filled(pool, SIZE, 1) or {})
