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
    with pytest.raises(FieldNotAvailableError, match="no such memory"):
        read_piece([os.getpid()], requested({**reference, "token": bytes(16)}))
    with pytest.raises(FieldNotAvailableError, match="too late"):
        read_piece([os.getpid()], requested({**reference, "size": 1 << 40}))


def test_invalid_requests_are_refused(pool: SegmentPool) -> None:
    request = requested(filled(pool, SIZE, 1))
    offsets = [{"offset": offset} for offset in (-1, SIZE + 1, 1 << 80, "0")]
    for changes in (*offsets, {"segment": None}, {"segment": {"pid": 1}}):
        with pytest.raises(ProtocolError):
            read_piece([os.getpid()], {**request, **changes})


def test_an_image_reused_during_the_transfer_is_refused(pool: SegmentPool) -> None:
    broker = Broker(os.getpid())

    def ask(kind: str, content: dict[str, Any]) -> Mapping[str, Any]:
        if content["offset"] == 2 * PIECE:
            assert filled(pool, SIZE, 2) is not None
        return broker.ask(kind, content)

    with pytest.raises(FieldNotAvailableError, match="too late"):
        fetch_segment(ask, "first", filled(pool, SIZE, 1) or {})


def test_invalid_answers_are_refused(pool: SegmentPool) -> None:
    reference = filled(pool, SIZE, 1) or {}
    right = {"run": "first", "offset": 0, "data": b"1"}
    changes: list[dict[str, Any]] = [{"data": data} for data in (b"", "text", bytes(SIZE + 1))]
    for answer in ({}, *({**right, **one} for one in (*changes, {"offset": 1}, {"run": "second"}))):
        with pytest.raises(ProtocolError, match="the broker"):
            fetch_segment(lambda kind, content, answer=answer: answer, "first", reference)
