"""Events that came together: taken, recorded and sent on together, with the results that they have one by one."""

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offloop.bus.broker.rank import LiveRank
from offloop.bus.broker.run import LIVE_FRAME, BrokerRun, BrokerStatistics
from offloop.bus.errors import ProtocolError
from offloop.bus.protocol.frames import Topic, event_encoder, pack_map
from offloop.bus.protocol.order import Missing, StreamOrder
from offloop.bus.recording import writer
from offloop.bus.recording.reader import RecordingReader
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.types.event import Event

NAMES = ("batch_end", "batch_start", "epoch_end", "$checkpoint", "from_the_future", "$end")


def frame(seq: int, base_seq: int, name: str = "batch_end", attempt: int = 1, **fields: Any) -> bytes:
    return event_encoder(Topic("r", name, 0), attempt)(seq, base_seq, 5 * seq, [0] * 14, None, fields, pack_map({}))


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Events of a rank, nearly all of them in order, and what a broken or hostile publisher sends between them."""
    frames, seq, base_seq = [], 0, 0
    for name in draw(st.lists(st.sampled_from(NAMES[:2] * 4 + NAMES[:-1]), max_size=12)):
        seq, base_seq = seq + 1, base_seq + (name != "batch_start")
        good = frame(seq, base_seq, name, action="save")
        wrong = (
            b"",
            b"\0",
            b"r/batch_end/0",
            b"r/batch_end/0\0\xc1",
            frame(seq + 1, base_seq + 1, name),
            frame(seq, base_seq + 2, name),
            frame(seq, base_seq, name, attempt=2),
            frame(max(1, seq - 1), 1, name),
            frame(seq, base_seq, name, deep=[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]),
            good.replace(b"r/", b"s/", 1),
        )
        frames += draw(st.sampled_from([[good]] * 12 + [[one, good] for one in wrong] + [[one] for one in wrong]))
    return frames + draw(st.sampled_from([[], [frame(seq + 1, base_seq + 1, "$end", status="finished")]]))


def live_run(path: Path, counts: BrokerStatistics) -> BrokerRun:
    directory: Any = SimpleNamespace(name="r")
    return BrokerRun(directory, 1, RecordingWriter(path, "r", 1), 1, 1, counts)


def taken(path: Path, frames: list[bytes], together: bool) -> Any:
    """Return what is recorded of these frames, and the state of the rank and the counts."""
    path.unlink(missing_ok=True)
    counts = BrokerStatistics()
    run = live_run(path, counts)
    rank = run.ranks[0] = LiveRank(0)
    left = frames
    while left:
        count = run.take_in_order(rank, left) if together else 0
        if count < len(left):
            with suppress(ProtocolError):
                run.take(rank, left[count])
        left = left[count + 1 :]
    run.writer.close()
    with RecordingReader(path) as reader:
        records = [record for chunk in reader.read() for record in chunk]
        positions = dict(reader.positions)
    state = rank.seq, rank.base_seq, rank.base_seq_at, rank.time, rank.recorded, rank.ended, rank.last
    return records, positions, state, counts


@settings(max_examples=60)
@given(streams())
def test_the_broker_handles_a_batch_of_frames_like_single_ones(tmp_path_factory: Any, frames: list[bytes]) -> None:
    path = tmp_path_factory.getbasetemp() / "batches.mcap"
    assert taken(path, frames, together=True) == taken(path, frames, together=False)


def test_frames_in_order_are_handled_in_one_call(tmp_path: Path) -> None:
    run = live_run(tmp_path / "a.mcap", BrokerStatistics())
    rank = LiveRank(0)
    frames = [frame(seq, seq) for seq in range(1, 20)]
    run.take(rank, frames[0])
    assert run.take_in_order(rank, [*frames[1:], frame(20, 20, x=b"x" * LIVE_FRAME)]) == 18
    assert (rank.seq, rank.recorded, run.writer.written) == (19, 19, 19)
    run.writer.discard()


def test_excess_topics_are_reported_once_and_other_events_are_recorded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(writer, "MAX_TOPICS", writer._ROOM_FOR_ENDS + 1)
    run = live_run(tmp_path / "a.mcap", BrokerStatistics())
    rank = run.ranks[0] = LiveRank(0)
    run.take(rank, frame(1, 1))
    with pytest.raises(ProtocolError, match="no room for further topics: fit_end of rank 0 is lost"):
        run.take(rank, frame(2, 2, "fit_end"))
    run.take(rank, frame(3, 3, "init"))
    run.take(rank, frame(4, 4))
    run.take(rank, frame(5, 5, "$end", status="finished"))
    run.writer.close()
    assert (run.write_error, run.lost, rank.ended) == (None, 2, True)
    with RecordingReader(tmp_path / "a.mcap") as reader:
        assert [topic for chunk in reader.read() for topic, *_ in chunk] == ["r/batch_end/0"] * 2 + ["r/$end/0"]


def read(order: StreamOrder, frames: list[bytes]) -> tuple[list[Any], Missing | None]:
    """Return the events of a batch of the event feed, and what is missing before its end."""
    found: list[Any] = []
    for one in order.from_feed(frames):
        if isinstance(one, Missing):
            return found, one
        found += one if isinstance(one, list) else [one]
    return found, None


@settings(max_examples=60)
@given(streams(), st.sampled_from([None, (Event.BATCH_END,), (Event.BATCH_START,)]))
def test_a_subscriber_reads_a_batch_of_frames_like_single_ones(frames: list[bytes], events: Any) -> None:
    together, alone = StreamOrder("r", 1, events), StreamOrder("r", 1, events)
    found, missing = read(together, frames)
    expected: list[Any] = []
    for one in frames:
        given, result = read(alone, [one])
        expected += given
        if result is not None:
            break
    else:
        result = None
    # By their numbers: the maps of some are malformed.
    assert [(type(one), one.seq) for one in found] == [(type(one), one.seq) for one in expected]
    assert (missing is None) == (result is None)
    assert (together.skipped, together.ending) == (alone.skipped, alone.ending)
    if missing is None:
        assert together.missing_at({0: (99, 99)}) == alone.missing_at({0: (99, 99)})
        assert together.lag({0: (99, 99)}) == alone.lag({0: (99, 99)})
