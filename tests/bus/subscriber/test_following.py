"""Following a run, without sockets, files and clocks: when the recording is read, when the stream, and when it ends."""

import pytest

from offloop.bus import Event
from offloop.bus.protocol.frames import ALL, END, Topic, encode_frame_batch, encode_heartbeat, event_encoder, pack_map
from offloop.bus.protocol.order import Ending, Gap, StreamOrder
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.reader import Record
from offloop.bus.subscriber.following import Action, Following, Phase, RunStatus, Step
from offloop.bus.types.timeouts import Timeouts

TIMEOUTS = Timeouts(gap=5.0, silence=5.0)
LIVE, AWAY, FINISHED = RunStatus.LIVE, RunStatus.AWAY, RunStatus.FINISHED


def frame(seq: int, name: str = "batch_end") -> bytes:
    topic = Topic("r", name, 0)
    fields = {"status": "finished"} if name == END else {}
    return event_encoder(topic, 1)(seq, seq, seq, [0] * 14, None, fields, pack_map({}))


def batch(*frames: bytes) -> bytes:
    return Topic("r", ALL, 0).encode() + encode_frame_batch(list(frames))[1:]


def record(seq: int, name: str = "batch_end") -> Record:
    head = Topic("r", name, 0).encode()
    return head[:-1].decode(), frame(seq, name)[len(head) :]


def heartbeat(seq: int, offset: int, recorded: int) -> bytes:
    return encode_heartbeat("r", 1, 0, {0: (seq, seq)}, offset, {0: (recorded, recorded)})


@pytest.fixture
def following() -> Following:
    """Return a connected one, with events 1 and 2 read from the recording."""
    made = Following(StreamOrder("r", 1, [Event.BATCH_END]), TIMEOUTS)
    made.connected(0.0)
    made.take_records([record(1), record(2)])
    return made


@pytest.fixture
def live(following: Following) -> Following:
    """As ``following``, at the live stream."""
    assert following.at_end_of_recording(False, LIVE, 0.0) == Step()
    return following


def given(following: Following) -> list[int]:
    taken = [one.seq for one in following.ready if isinstance(one, Snapshot)]
    following.ready.clear()
    return taken


def test_unrecorded_events_become_a_gap_after_a_time_limit(live: Following) -> None:
    live.take_frame(batch(frame(5)))
    live.at_end_of_recording(False, LIVE, 1.0)
    assert live.at_end_of_recording(False, LIVE, 0.9 + TIMEOUTS.gap).action is Action.READ_ON
    live.at_end_of_recording(False, LIVE, 1.0 + TIMEOUTS.gap)
    live.at_end_of_recording(False, LIVE, 1.0 + TIMEOUTS.gap)
    assert live.phase is Phase.LIVE
    live.take_frame(batch(frame(6)))
    assert given(live) == [1, 2, 6]
    assert live.order.gaps == [Gap(0, 3, 5)]


def test_a_restarted_broker_has_the_full_time_limit_for_missing_events(live: Following) -> None:
    live.take_frame(batch(frame(5)))
    live.at_end_of_recording(False, LIVE, 1.0)
    assert live.at_end_of_recording(False, AWAY, 2.0).action is Action.DISCONNECT
    assert live.at_end_of_recording(False, AWAY, 2.0 + TIMEOUTS.gap).pause > 0
    assert live.at_end_of_recording(False, LIVE, 3.0 + TIMEOUTS.gap).action is Action.CONNECT
    live.connected(3.0 + TIMEOUTS.gap)
    # It is asked for them by nobody but the publisher's buffer, and has read nothing of that so far.
    assert live.at_end_of_recording(False, LIVE, 3.1 + TIMEOUTS.gap).action is Action.READ_ON
    live.take_records([record(3), record(4), record(5)])
    assert given(live) == [1, 2, 3, 4, 5]
    assert live.order.gaps == []


def test_a_silent_broker_is_disconnected(live: Following) -> None:
    live.heard(1.0)
    assert live.when_quiet(LIVE, 0.9 + TIMEOUTS.silence).action is Action.NONE
    assert live.when_quiet(LIVE, 1.0 + TIMEOUTS.silence).action is Action.DISCONNECT
    assert live.at_end_of_recording(False, LIVE, 7.0).action is Action.CONNECT


def test_a_heartbeat_reveals_missed_events_and_the_offset_to_read_from(live: Following) -> None:
    live.take_frame(heartbeat(2, 4096, 2))
    assert (live.phase, live.offset, live.lag) == (Phase.LIVE, 4096, 0)
    live.take_frame(heartbeat(4, 8192, 4))
    assert (live.phase, live.offset, live.lag, live.lag_high) == (Phase.GAP, 4096, 2, 2)
    live.take_records([record(3), record(4)])
    live.at_end_of_recording(False, LIVE, 1.0)
    live.take_frame(heartbeat(4, 8192, 4))
    assert (live.phase, live.offset, live.lag, live.lag_high) == (Phase.LIVE, 8192, 0, 2)


def test_a_run_without_a_broker_is_read_once_more_before_it_counts_as_lost() -> None:
    following = Following(StreamOrder("r", 1, None), TIMEOUTS)
    assert following.at_end_of_recording(False, FINISHED, 0.0).action is Action.READ_ON
    assert (following.phase, following.ending) == (Phase.REST, None)
    following.take_records([record(1)])
    following.at_end_of_recording(False, FINISHED, 0.1)
    assert following.ending == Ending("lost", "the broker ended before the run did")
    assert given(following) == [1]


def test_a_part_in_transit_is_waited_for(following: Following) -> None:
    step = following.at_end_of_recording(True, LIVE, 1.0)
    assert (step.action, step.pause > 0) == (Action.NONE, True)
    assert following.ending is None


def test_a_batch_behind_a_gap_is_read_from_the_recording(live: Following) -> None:
    live.take_frame(batch(frame(3), frame(5), frame(6), frame(7)))
    assert (live.phase, given(live)) == (Phase.GAP, [1, 2, 3])
    live.take_records([record(4), record(5)])
    step = live.at_end_of_recording(False, LIVE, 1.0)
    assert step.action is Action.READ_ON
    assert 0 < step.pause < 1
    live.take_records([record(6), record(7)])
    live.at_end_of_recording(False, LIVE, 1.0)
    live.take_frame(batch(frame(7), frame(8), frame(9)))
    assert (live.phase, given(live), live.fallbacks) == (Phase.LIVE, [4, 5, 6, 7, 8, 9], 1)
    assert live.order.gaps == []


def test_malformed_messages_are_counted_and_skipped(live: Following) -> None:
    for nonsense in (b"", b"r/batch_end/0 \xc1", b"r/$beat/0 \x93\x01\x01\x01"):
        live.take_frame(nonsense)
    assert live.phase is Phase.LIVE
    assert live.order.skipped >= 2
    live.take_frame(batch(frame(3)))
    assert given(live) == [1, 2, 3]
