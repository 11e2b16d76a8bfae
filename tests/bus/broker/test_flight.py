"""The memory of a flight recorder is bounded, and what the broker finds in it is whole; a hanging rank is found."""

import errno
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from bus.broker.flight import FlightRecorder
from bus.broker.rank import LiveRank
from bus.errors import BrokerError
from bus.protocol.flight_ring import BLOCK, MAX_EVENT, FlightRing, FlightRingReader, frames_in
from bus.protocol.frames import Topic, event_encoder, pack_map
from bus.recording.recording import Recording
from bus.recording.writer import RecordingWriter
from bus.runs.alerts import read_alerts
from bus.runs.flight import MOST_DUMPS, list_dumps, read_announced
from bus.types.timestamp import TrainingTime

_ENCODE = event_encoder(Topic("r", "batch_end", 0), 1)
_CONTEXT = pack_map({"world_size": 1})
STALLED = 300.0


def put_batch(ring, batch, size=100):
    ring.batch = batch
    fields = {"loss": 0.5, "text": "x" * size}
    # Number 1 is that of a mark.
    return ring.put(_ENCODE(batch + 1, batch + 1, batch, TrainingTime(batch=batch), None, fields, _CONTEXT))


def frames_of(ring):
    reader = FlightRingReader(os.getpid(), ring.to_wire())
    try:
        return [frame for _, block in sorted(reader.blocks()) for frame in frames_in(block)]
    finally:
        reader.close()


def allocated(ring):
    return os.fstat(ring._descriptor).st_blocks * 512


@pytest.fixture
def ring():
    made = FlightRing(50, 16 * BLOCK)
    yield made
    made.close()


def test_memory_is_bounded_by_batches_and_by_bytes(ring):
    for batch in range(1, 20_000):
        put_batch(ring, batch)
    # Fifty events of 200 bytes need no more than a block and what is left of two others.
    assert ring._made <= 3
    assert len(frames_of(ring)) >= 50
    for batch in range(20_000, 22_000):
        put_batch(ring, batch, 60_000)
    assert ring._made == 16
    assert allocated(ring) <= 4096 + 16 * BLOCK
    assert len(frames_of(ring)) == 16


def test_what_is_too_large_for_a_block_is_refused_and_the_rest_stays(ring):
    put_batch(ring, 1)
    assert not put_batch(ring, 2, MAX_EVENT)
    assert put_batch(ring, 3)
    assert len(frames_of(ring)) == 2


def test_a_block_that_is_overwritten_while_it_is_read_is_left_out(ring, monkeypatch):
    for batch in range(1, 33):
        put_batch(ring, batch, 30_000)
    assert len(frames_of(ring)) == 32
    read = os.pread

    def slow(descriptor, size, offset):
        data = read(descriptor, size, offset)
        if size == BLOCK:
            put_batch(ring, 100, 60_000)
        return data

    monkeypatch.setattr(os, "pread", slow)
    frames = frames_of(ring)
    monkeypatch.undo()
    # The one that was read while it was entered is missing; none is half of this and half of that.
    assert len(frames) < 32
    assert all(len(frame) in (len(frames[0]), len(frames[-1])) for frame in frames)


@pytest.fixture
def recorder(tmp_path, ring):
    made = FlightRecorder(SimpleNamespace(path=tmp_path, name="r"), 1, STALLED)
    rank = LiveRank(0, pid=os.getpid())
    assert made.attach(rank, ring.to_wire()) is None
    put_batch(ring, 1)
    yield made
    made.finish()


def test_a_rank_that_does_nothing_is_stalled_once_unless_it_is_paused(recorder, ring, tmp_path):
    recorder.look(0.0)
    recorder.look(STALLED - 1)
    assert not recorder.is_writing
    recorder.look(2 * STALLED)
    recorder.look(3 * STALLED)
    recorder.work(math.inf)
    (dump,) = list_dumps(tmp_path)
    assert Recording(dump).flight == ("stalled", "rank 0 has published nothing for 300 s")
    put_batch(ring, 2)
    recorder.look(4 * STALLED)
    assert [(one.status, one.text) for one in read_alerts(tmp_path)] == [
        ("firing", "rank 0 has published nothing for 300 s"),
        ("resolved", "rank 0 continues"),
    ]
    recorder.is_paused = True
    recorder.look(5 * STALLED)
    recorder.look(7 * STALLED)
    assert not recorder.is_writing


def test_dumps_are_limited_and_an_alert_is_answered_once_in_a_while(recorder, tmp_path):
    answers = []
    recorder.ask("alert", "loss > 3", lambda *answer: answers.append(answer), "abc")
    recorder.ask("alert", "loss > 3", lambda *answer: answers.append(answer))
    assert answers == [(None, "another alert had it written less than 60 s ago")]
    assert read_announced(tmp_path)[:4] == ("abc", 1, "alert", "loss > 3")
    recorder.work(math.inf)
    assert answers[1] == ("flight-1-1.mcap: 1 events of 1 rank, 1 whole batches", None)
    for _ in range(MOST_DUMPS - 1):
        recorder.ask("asked", "", lambda *_: None)
        recorder.work(math.inf)
    with pytest.raises(BrokerError, match="which is as many as are written: remove some"):
        recorder.ask("asked", "", lambda *_: None)
    assert len(list_dumps(tmp_path)) == MOST_DUMPS
    assert not list(tmp_path.glob(".*"))


def dumped(recorder):
    answers = []
    recorder.ask("asked", "", lambda *answer: answers.append(answer))
    recorder.work(math.inf)
    return answers


def descriptors():
    return len(os.listdir("/dev/fd"))


def test_ranks_that_come_while_a_dump_is_copied_are_in_the_next_one(recorder, ring, tmp_path, monkeypatch):
    for batch in range(2, 11):
        put_batch(ring, batch, 60_000)
    again, other = FlightRing(50, 16 * BLOCK), FlightRing(50, 16 * BLOCK)
    put_batch(again, 20)
    before, read = descriptors(), os.pread

    def attach(descriptor, size, offset):
        monkeypatch.undo()
        recorder.attach(LiveRank(1, pid=os.getpid()), other.to_wire())
        recorder.attach(LiveRank(0, pid=os.getpid()), again.to_wire())
        return read(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", attach)
    assert dumped(recorder) == [("flight-1-1.mcap: 10 events of 1 rank, 10 whole batches", None)]
    assert [one.timestamp.values.batch for one in Recording(tmp_path / "flight-1-1.mcap")] == list(range(1, 11))
    # That of rank 1 is open besides, and of rank 0 one as before.
    assert descriptors() == before + 1
    assert dumped(recorder) == [("flight-1-2.mcap: 1 events of 2 ranks, 1 whole batches", None)]
    assert [one.timestamp.values.batch for one in Recording(tmp_path / "flight-1-2.mcap")] == [20]
    again.close()
    other.close()


@pytest.mark.parametrize("error", [OSError(errno.EROFS, "read-only"), ValueError("odd")])
def test_a_dump_that_cannot_be_written_ends_alone(recorder, tmp_path, monkeypatch, error):
    before = descriptors()

    def refuse(*_):
        def refuse_again(*_, **__):
            raise OSError(errno.EROFS, "read-only")

        monkeypatch.setattr(Path, "unlink", refuse_again)
        raise error

    monkeypatch.setattr(RecordingWriter, "append", refuse)
    ((done, why),) = dumped(recorder)
    assert done is None
    assert why.startswith("flight-1-1.mcap cannot be written: ")
    assert descriptors() == before
    monkeypatch.undo()
    assert dumped(recorder) == [("flight-1-1.mcap: 1 events of 1 rank, 1 whole batches", None)]


def test_ranks_that_fail_together_are_dumped_once_with_how_the_first_one_did(recorder, tmp_path):
    for rank in range(8):
        recorder.note_end(LiveRank(rank), {"status": "failed", "error": f"mistake {rank}"})
    recorder.note_end(LiveRank(8), {"status": "lost"})
    recorder.work(math.inf)
    found = [Recording(dump).flight for dump in list_dumps(tmp_path)]
    assert found == [("failed", "rank 0: mistake 0"), ("lost", "rank 8: lost")]


def test_ranks_that_stall_together_are_dumped_once(recorder, ring, tmp_path):
    other = FlightRing(50, 16 * BLOCK)
    assert recorder.attach(LiveRank(1, pid=os.getpid()), other.to_wire()) is None
    recorder.look(0.0)
    recorder.look(2 * STALLED)
    recorder.work(math.inf)
    assert len(list_dumps(tmp_path)) == 1
    assert [one.text[:6] for one in read_alerts(tmp_path)] == ["rank 0", "rank 1"]
    other.close()


def test_what_had_no_room_is_said_in_the_dump(recorder, ring, tmp_path):
    for batch in range(1, 60):
        put_batch(ring, batch, 60_000)
    recorder.ask("asked", "", lambda *_: None)
    recorder.work(math.inf)
    (dump,) = list_dumps(tmp_path)
    assert [one.timestamp.values.batch for one in Recording(dump)] == list(range(44, 60))
    assert recorder.rings[0].reader.batches == 50


@pytest.mark.parametrize("wire", [{}, {"fd": 0, "token": b"x" * 16}, {"fd": 10**6, "token": b"x" * 16}])
def test_memory_that_is_something_else_is_refused_with_the_reason(tmp_path, wire):
    made = FlightRecorder(SimpleNamespace(path=tmp_path, name="r"), 1, STALLED)
    why = made.attach(LiveRank(0, pid=os.getpid()), wire)
    assert why is not None
    assert why.startswith("the flight recorder of rank 0 is not kept: its memory cannot be read by the broker")
    assert "on another machine" in str(made.attach(LiveRank(0), wire))
