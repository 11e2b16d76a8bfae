"""Each requested event once and in order, whatever the live stream loses and however it overlaps with the recording."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloop.bus import BASE_EVENTS, Event, Gap, Snapshot
from offloop.bus.protocol.frames import CHECKPOINT, END, Topic, event_encoder, pack_map
from offloop.bus.protocol.order import Ending, Missing, StreamOrder, base_seq_problem, base_step
from offloop.bus.types.actor import FIRST_ACTOR

NAMES = [Event.BATCH_START, Event.AFTER_LOSS, Event.BATCH_END, Event.EPOCH_END]
some_events = st.lists(st.sampled_from(NAMES), max_size=30)


def frames(events, rank=0, attempt=1, status="finished"):
    """``(topic, body)`` for each event of one rank and for its end, numbered as a publisher does."""
    base = 0
    made = []
    for seq, event in enumerate(events, 1):
        base += event in BASE_EVENTS
        made.append(frame(event.value, rank, attempt, seq, base))
    made.append(frame(END, rank, attempt, len(events) + 1, base + 1, {"status": status}))
    return made


def frame(name, rank, attempt, seq, base_seq, fields=None, context=None):
    head = Topic("r", name, rank).encode()
    data = event_encoder(Topic("r", name, rank), attempt)(
        seq, base_seq, seq, [0] * 14, None, fields or {}, pack_map(context or {})
    )
    return head[:-1].decode(), data[len(head) :]


def from_feed(order, topic, body):
    """Return the event of a single frame."""
    found = next(order.from_feed([topic.encode() + b"\0" + body]), None)
    return found[0] if isinstance(found, list) else found


def receive(order, live, recorded):
    """Take live frames, and read the recording whenever something is missing, like a subscriber."""
    out = []
    for topic, body in live:
        if "r/$base/" in order.topics and base_step(topic.split("/")[1]) == 0:
            continue
        result = from_feed(order, topic, body)
        if isinstance(result, Missing):
            out += [found for record in recorded if (found := order.from_record(*record))]
            assert order.is_filled(result)
        elif result is not None:
            out.append(result)
    out += [found for record in recorded if (found := order.from_record(*record))]
    return [(snapshot.event, snapshot.seq) for snapshot in out]


@given(some_events, st.data(), st.sets(st.sampled_from(NAMES)) | st.none())
def test_any_part_of_the_stream_may_be_lost_repeated_or_late(events, data, requested):
    recorded = frames(events)
    copies = data.draw(st.lists(st.integers(0, 2), min_size=len(recorded), max_size=len(recorded)))
    live = [one for one, count in zip(recorded, copies, strict=True) for _ in range(count)]
    history = data.draw(st.integers(0, len(recorded)))
    order = StreamOrder("r", 1, requested)
    before = [found for record in recorded[:history] if (found := order.from_record(*record))]
    got = [(snapshot.event, snapshot.seq) for snapshot in before] + receive(order, live, recorded)
    assert got == [(event, seq) for seq, event in enumerate(events, 1) if requested is None or event in requested]
    assert order.ending == Ending("finished")
    assert order.gaps == []


@given(some_events, st.data())
def test_lost_events_are_named_exactly(events, data):
    recorded = frames(events)
    lost = data.draw(st.sets(st.integers(1, len(recorded) - 1))) if len(recorded) > 1 else set()
    order = StreamOrder("r", 1, None)
    got = [found.seq for seq, one in enumerate(recorded, 1) if seq not in lost and (found := order.from_record(*one))]
    assert got == [seq for seq in range(1, len(recorded)) if seq not in lost]
    assert {number for gap in order.gaps for number in range(gap.first, gap.last + 1)} == lost


def test_readers_of_base_events_see_no_gaps_of_other_events():
    order = StreamOrder("r", 1, {Event.EPOCH_END})
    recorded = frames([Event.BATCH_START, Event.BATCH_END, Event.AFTER_LOSS, Event.EPOCH_END])
    assert receive(order, recorded, recorded) == [(Event.EPOCH_END, 4)]
    assert order.gaps == []


def test_a_gap_in_the_recording_is_a_gap():
    order = StreamOrder("r", 1, None)
    assert isinstance(order.from_record(*frame("batch_end", 0, 1, 4, 4)), Snapshot)
    assert order.gaps == [Gap(0, 1, 3)]


def test_positions_of_the_broker_reveal_losses_of_a_quiet_stream():
    order = StreamOrder("r", 1, {Event.BATCH_END})
    from_feed(order, *frame("batch_end", 0, 1, 2, 1))
    assert order.missing_at({0: (9, 1)}) is None
    assert order.missing_at({0: (9, 2)}) == Missing(0, (9, 2))


def test_other_attempts_other_runs_and_unknown_events_are_skipped():
    order = StreamOrder("r", 2, None)
    assert from_feed(order, *frame("batch_end", 0, 1, 1, 1)) is None
    assert from_feed(order, "other/batch_end/0", frame("batch_end", 0, 2, 1, 1)[1]) is None
    assert from_feed(order, *frame("from_the_future", 0, 2, 1, 1)) is None
    assert order.from_record("nonsense", b"") is None
    assert order.skipped == 2


def test_the_run_ends_with_its_last_rank_and_the_worst_ending_counts():
    order = StreamOrder("r", 1, None)
    order.from_record(*frame(END, 1, 1, 1, 1, {"status": "failed", "error": "boom"}, {"world_size": 2}))
    assert order.ending is None
    order.from_record(*frame(END, 0, 1, 1, 1, {"status": "finished"}, {"world_size": 2}))
    assert order.ending == Ending("failed", "boom")
    assert str(order.ending) == "failed: boom"


def test_the_run_does_not_end_with_an_actor_that_is_not_a_rank():
    order = StreamOrder("r", 1, None)
    assert order.from_record(*frame("batch_end", FIRST_ACTOR, 1, 1, 1)) is not None
    order.from_record(*frame(END, FIRST_ACTOR, 1, 2, 2, {"status": "failed"}, {"world_size": 1}))
    assert order.ending is None
    order.from_record(*frame(END, 0, 1, 1, 1, {"status": "finished"}, {"world_size": 1}))
    assert order.ending == Ending("finished")


@given(some_events, st.data(), st.sets(st.sampled_from(NAMES)) | st.none())
def test_a_list_of_records_is_read_like_single_ones(events, data, requested):
    recorded = [*frames(events), frame(CHECKPOINT, 1, 1, 1, 1, {"action": "save"}), ("another/batch_end/0", b"")]
    recorded += [frame(CHECKPOINT, 0, 1, 100, 50, {"action": "save"}), ("r/batch_end/0", b"malformed")]
    recorded += frames(events, rank=1) + frames(events, attempt=2) + [frame("unknown", 0, 1, 101, 50)]
    records = data.draw(st.lists(st.sampled_from(recorded), max_size=60) | st.permutations(recorded))
    one, many = StreamOrder("r", 1, requested), StreamOrder("r", 1, requested)
    expected = [found for record in records if (found := one.from_record(*record)) is not None]
    given = []
    for found in many.from_records(records):
        given += found if isinstance(found, list) else [found]
    assert given == expected
    for name in ("gaps", "skipped", "ending", "endings", "checkpoints"):
        assert getattr(many, name) == getattr(one, name)


def test_gaps_are_reported_between_the_lists():
    events = [frame("batch_end", 0, 1, seq, seq) for seq in range(1, 151)]
    del events[75]
    order = StreamOrder("r", 1, None)
    found = [(len(batch), batch[-1].seq, list(order.gaps)) for batch in order.from_records(events)]
    assert found == [(64, 64, []), (11, 75, []), (64, 140, [Gap(0, 76, 76)]), (10, 150, [Gap(0, 76, 76)])]


def test_the_context_of_an_event_is_its_own_where_it_has_lists():
    contexts = [{"max_duration": "5ep"}] * 2 + [{"max_duration": "6ep", "eval_timestamp": [1, 2]}] * 2 + [{}]
    events = [frame("batch_end", 0, 1, seq, seq, context=context) for seq, context in enumerate(contexts, 1)]
    (found,) = StreamOrder("r", 1, None).from_records(events)
    found[2].get("eval_timestamp").append(3)
    assert [dict(one.fields) for one in found] == [
        *contexts[:2],
        {**contexts[2], "eval_timestamp": [1, 2, 3]},
        *contexts[3:],
    ]


def test_an_event_with_malformed_fields_is_left_out_and_lost():
    topic, body = frame("batch_end", 0, 1, 2, 2)
    malformed = topic, body.replace(b"\x80\x80", b"\x81\xa1x\xa1\xff\x80")
    order = StreamOrder("r", 1, None)
    found = list(order.from_records([frame("batch_end", 0, 1, 1, 1), malformed, frame("batch_end", 0, 1, 3, 3)]))
    assert [[one.seq for one in batch] for batch in found] == [[1], [3]]
    assert (order.skipped, order.gaps) == (1, [Gap(0, 2, 2)])


@pytest.mark.parametrize(
    ("name", "seq", "base_seq", "last", "right"),
    [
        ("batch_end", 1, 1, (0, 0), True),
        ("batch_start", 1, 0, (0, 0), True),
        ("batch_start", 1, 1, (0, 0), False),
        ("batch_end", 6, 3, (5, 3), False),
        ("batch_end", 6, 5, (5, 3), False),
        ("batch_end", 9, 4, (5, 3), True),
        ("batch_end", 9, 7, (5, 3), True),
        ("batch_end", 9, 8, (5, 3), False),
        ("batch_start", 9, 7, (5, 3), False),
        ("$end", 6, 4, (5, 3), True),
        ("$end", 6, 3, (5, 3), False),
        ("$cut", 9, 3, (5, 3), True),
        ("from_the_future", 6, 3, (5, 3), True),
        ("from_the_future", 6, 4, (5, 3), True),
    ],
)
def test_which_base_seq_an_event_may_have(name, seq, base_seq, last, right):
    problem = base_seq_problem(name, seq, base_seq, last)
    assert (problem is None) is right
    if problem is not None:
        assert f"event {seq} ({name}) has the base_seq {base_seq}, where " in problem
