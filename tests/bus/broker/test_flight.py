"""The memory of a flight recorder is bounded, and what the broker finds in it is whole; a hanging rank is found."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import wait_for

from offloop.bus import Publisher, find_run
from offloop.bus.broker.flight import STALLED_SECONDS, FlightRecorder
from offloop.bus.broker.rank import LiveRank
from offloop.bus.errors import BrokerError
from offloop.bus.protocol.flight_ring import BLOCK, MAX_EVENT, FlightRing, FlightRingReader
from offloop.bus.protocol.frames import Topic, decode_whole_event, event_encoder, pack_map, split_frame
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.runs.flight import MOST_DUMPS, list_dumps
from offloop.bus.types.timeouts import Timeouts
from offloop.bus.types.timestamp import TrainingTime

_ENCODE = event_encoder(Topic("r", "batch_end", 0), 1)
_CONTEXT = pack_map({"world_size": 1})


def put_batch(ring, batch, size=100):
    ring.batch = batch
    fields = {"loss": 0.5, "text": "x" * size}
    # Number 1 is that of a mark.
    return ring.put(_ENCODE(batch + 1, batch + 1, batch, TrainingTime(batch=batch), None, fields, _CONTEXT))


def frames_of(ring):
    reader = FlightRingReader(os.getpid(), ring.to_wire())
    try:
        return reader.copy()
    finally:
        reader.close()


def settle(recorder):
    wait_for(lambda: recorder.report() or not recorder.is_writing, "the dumps")


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
    assert not put_batch(ring, 22_000, MAX_EVENT)
    assert len(frames_of(ring)) == 16


@pytest.fixture
def recorder(tmp_path, ring):
    made = FlightRecorder(SimpleNamespace(path=tmp_path, name="r"), 1)
    rank = LiveRank(0, pid=os.getpid())
    assert made.attach(rank, ring.to_wire()) is None
    put_batch(ring, 1)
    yield made
    made.finish()


def test_dumps_are_limited_and_repeated_alerts_are_refused(recorder, tmp_path):
    answers = []
    recorder.ask("alert", "loss > 3", lambda *answer: answers.append(answer))
    recorder.ask("alert", "loss > 3", lambda *answer: answers.append(answer))
    assert answers == [(None, "it was written for another alert less than 60 s ago")]
    settle(recorder)
    assert answers[1] == ("flight-1-1.mcap: 1 events of 1 rank, 1 whole batches", None)
    for _ in range(MOST_DUMPS - 1):
        recorder.ask("asked", "", lambda *_: None)
        settle(recorder)
    with pytest.raises(BrokerError, match="the maximum: remove some"):
        recorder.ask("asked", "", lambda *_: None)
    assert len(list_dumps(tmp_path)) == MOST_DUMPS
    assert not list(tmp_path.glob(".*"))


def look(recorder, begin, end):
    """Look at the usual intervals, between two moments in units of the time of a stall."""
    for step in range(round(20 * begin), round(20 * end)):
        recorder.look(step * STALLED_SECONDS / 20 + 0.1)
    settle(recorder)


def test_a_stalled_rank_is_dumped_once_and_a_paused_one_is_not(recorder, ring, tmp_path):
    look(recorder, 0, 1)
    assert not list_dumps(tmp_path)
    look(recorder, 1, 3)
    (dump,) = list_dumps(tmp_path)
    assert Recording(dump).flight == ("stalled", "rank 0 has done nothing for 300 s")
    put_batch(ring, 2)
    for moment in range(3, 8):
        # A paused one reports.
        recorder.rings[0].rank.reported_at = moment * STALLED_SECONDS
        look(recorder, moment, moment + 1)
    # Nor is it stalled where the broker stood still, too.
    recorder.look(20 * STALLED_SECONDS)
    assert not recorder.is_writing
    look(recorder, 20, 22)
    assert len(list_dumps(tmp_path)) == 2


def test_a_rank_outside_its_training_loop_is_not_stalled(recorder, ring, tmp_path):
    for number, last in enumerate(("init", "after_load", "fit_end", "eval_after_all", "predict_end")):
        ring.put(event_encoder(Topic("r", last, 0), 1)(3, 3, 1, TrainingTime(), None, {}, _CONTEXT))
        look(recorder, 3 * number, 3 * number + 3)
    recorder.rings[0].rank.ended = True
    put_batch(ring, 2)
    look(recorder, 15, 18)
    assert not list_dumps(tmp_path)


def dumped(recorder):
    answers = []
    recorder.ask("asked", "", lambda *answer: answers.append(answer))
    settle(recorder)
    return answers


def descriptors():
    return len(os.listdir("/dev/fd"))


def test_a_failed_dump_affects_nothing_else(recorder, tmp_path, monkeypatch):
    before = descriptors()

    def refuse(*_):
        def refuse_again(*_, **__):
            raise OSError(errno.EROFS, "read-only")

        monkeypatch.setattr(Path, "unlink", refuse_again)
        raise ValueError("odd")

    monkeypatch.setattr(RecordingWriter, "append", refuse)
    ((done, why),) = dumped(recorder)
    assert done is None
    assert why.startswith("flight-1-1.mcap cannot be written: ")
    assert descriptors() == before
    monkeypatch.undo()
    assert dumped(recorder) == [("flight-1-1.mcap: 1 events of 1 rank, 1 whole batches", None)]


def test_ranks_that_fail_together_are_dumped_once_with_the_first_error(recorder, tmp_path):
    for rank in range(8):
        recorder.note_end(LiveRank(rank), {"status": "failed", "error": f"mistake {rank}"})
    recorder.note_end(LiveRank(8), {"status": "lost"})
    settle(recorder)
    found = [Recording(dump).flight for dump in list_dumps(tmp_path)]
    assert found == [("failed", "rank 0: mistake 0"), ("lost", "rank 8: lost")]


def test_events_written_during_a_copy_leave_no_gap(ring, monkeypatch):
    for batch in range(1, 33):
        put_batch(ring, batch, 30_000)
    put_batch(ring, 33, 100)
    read, more = os.pread, iter(range(34, 60))

    def slow(descriptor, size, offset):
        data = read(descriptor, size, offset)
        if size == BLOCK and (batch := next(more, None)):
            put_batch(ring, batch, 30_000)
        return data

    monkeypatch.setattr(os, "pread", slow)
    frames = frames_of(ring)
    monkeypatch.undo()
    numbers = [decode_whole_event(split_frame(frame)[1]).seq for frame in frames]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))


def test_a_failed_run_has_ended_before_its_dump_is_written(runs_dir):
    ring = FlightRing(100_000, 256 * BLOCK)
    failed = Publisher("r", flight=ring, timeouts=Timeouts(flush=60.0, broker_exit=0.0))
    # Its broker writes for a second or more.
    for batch in range(1, 60_000):
        put_batch(ring, batch)
    failed.close("failed", "no luck")
    assert find_run("r").status == "failed"
    (dump,) = wait_for(lambda: list_dumps(runs_dir / "r"), "the dump")
    assert (runs_dir / "r" / "run.json").stat().st_mtime_ns < dump.stat().st_mtime_ns
    ring.close()


def test_a_dump_starts_at_the_first_batch_that_fits(recorder, ring, tmp_path):
    for batch in range(1, 60):
        put_batch(ring, batch, 60_000)
    recorder.ask("asked", "", lambda *_: None)
    settle(recorder)
    (dump,) = list_dumps(tmp_path)
    assert [one.timestamp.values.batch for one in Recording(dump)] == list(range(44, 60))
    assert recorder.rings[0].reader.batches == 50


def test_invalid_flight_recorder_memory_is_refused(tmp_path):
    made = FlightRecorder(SimpleNamespace(path=tmp_path, name="r"), 1)
    for wire in ({}, {"fd": 0, "token": b"x" * 16}, {"fd": 10**6, "token": b"x" * 16}):
        assert "its memory cannot be read by the broker" in str(made.attach(LiveRank(0, pid=os.getpid()), wire))
        assert "on another machine" in str(made.attach(LiveRank(0), wire))
