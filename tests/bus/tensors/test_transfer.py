import os
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import pytest
from segment_jobs import filled, running, writer

from offloop.bus.errors import BrokerError, FieldNotAvailableError, OffloopError, ProtocolError
from offloop.bus.protocol.frames import decode_control, encode_control, split_frame
from offloop.bus.tensors.segments import PIECE, SegmentPool, fetch_segment, read_piece

SIZE = 3 * PIECE + 5


class Broker:
    """Answers like one, through the frames of the protocol; ``asked`` counts the questions."""

    def __init__(self, *publishers: int) -> None:
        self.publishers = publishers
        self.asked = 0

    def ask(self, kind: str, content: dict[str, Any]) -> Mapping[str, Any]:
        self.asked += 1
        question = decode_control(split_frame(encode_control(kind, content))[1])
        assert question.kind == "fetch_segment"
        try:
            answer = read_piece(self.publishers, question.content)
        except OffloopError as error:
            raise BrokerError(str(error)) from None
        return decode_control(split_frame(encode_control("segment_data", answer))[1]).content


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    pool = SegmentPool(1, is_handled=lambda seq, field: True)
    yield pool
    pool.close()


def requested(reference: dict[str, Any] | None, offset: Any = 0) -> dict[str, Any]:
    return {"run": "first", "segment": reference, "offset": offset}


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
        assert published(pipe, 6) is not None


def test_only_publishers_of_the_run_are_read(pool: SegmentPool) -> None:
    reference = filled(pool, SIZE, 1)
    assert reference is not None
    with pytest.raises(FieldNotAvailableError, match=f"process {os.getpid()} publishes nothing of run 'first'"):
        read_piece([1], requested(reference))
    passwords = os.open("/etc/passwd", os.O_RDONLY)
    for stranger in ({"fd": passwords}, {"token": bytes(16)}, {"fd": 1 << 20}):
        with pytest.raises(FieldNotAvailableError, match="no such memory"):
            read_piece([os.getpid()], requested({**reference, **stranger}))
    os.close(passwords)
    with pytest.raises(FieldNotAvailableError, match="too late"):
        read_piece([os.getpid()], requested({**reference, "size": 1 << 40}))


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": -1},
        {"offset": SIZE + 1},
        {"offset": 1 << 80},
        {"offset": "0"},
        {"segment": None},
        {"segment": {"pid": 1}},
    ],
    ids=str,
)
def test_a_request_that_makes_no_sense_is_refused(pool: SegmentPool, changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        read_piece([os.getpid()], {**requested(filled(pool, SIZE, 1)), **changes})


def test_a_piece_is_no_larger_than_allowed(pool: SegmentPool) -> None:
    reference = filled(pool, SIZE, 1)
    assert read_piece([os.getpid()], requested(reference, 7))["data"] == b"\1" * PIECE
    assert read_piece([os.getpid()], requested(reference, SIZE))["data"] == b""


def test_the_segments_of_a_dead_process_are_gone() -> None:
    with running(writer, 1, SIZE) as (process, pipe):
        reference = published(pipe, 5)
        assert process.pid is not None
        broker = Broker(process.pid)
        process.kill()
        process.join()
        with pytest.raises(FieldNotAvailableError, match=r"does not hand on these tensors: .* it has ended"):
            fetch_segment(broker.ask, "first", reference)


def test_half_of_an_image_is_no_image(pool: SegmentPool) -> None:
    broker = Broker(os.getpid())

    def ask(kind: str, content: dict[str, Any]) -> Mapping[str, Any]:
        if content["offset"] == 2 * PIECE:
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
