"""A history that is read in blocks: it shows what it shows when it is read event by event."""

import math
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offloop.bus import Recording
from offloop.bus.protocol import order as stream_order
from offloop.bus.protocol.blocks import EventBlock
from offloop.bus.protocol.frames import Topic, event_encoder, pack_map
from offloop.bus.protocol.order import StreamOrder
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.summary import Summarizer
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.types.demand import BASE_EVENTS
from offloop.bus.types.event import Event
from offloop.consumers import Runner
from offloop.consumers.dashboard.view.metrics import BULK
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.tap import MonitoredRun, RunTap, ViewDestination

START = 1_700_000_000_000_000_000
SECOND = 1_000_000_000


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(stream_order, "WINDOW", 40)


NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True, width=64), st.integers(-(2**63), 2**64 - 1), st.booleans()
)
VALUES = st.recursive(
    st.one_of(NUMBERS, st.none(), st.text(max_size=3)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(("mine", "a/b", "a", "b", "", "loss/train/total", "lr-SGD/group0", "metrics/eval/a"))
LOGGED = st.lists(
    st.tuples(
        st.integers(0, 20) | NUMBERS,
        st.dictionaries(NAMES, st.floats(0, 9) | st.integers(-40, 200) | st.booleans() | VALUES, max_size=3) | VALUES,
    ).map(list)
    | VALUES,
    max_size=3,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "loss": st.floats(0, 9) | VALUES,
        "lr": st.dictionaries(st.sampled_from(("SGD", "Adam")), st.lists(st.floats(0, 1), max_size=2)) | VALUES,
        "losses": VALUES,
        "train_metrics": VALUES,
        "flops_per_batch": NUMBERS,
        "dataloader_len": st.integers(-2, 2**33) | VALUES,
        "logged": LOGGED | VALUES,
        "phases": st.just({"began": START, "spans": [["forward", 0, SECOND]], "device": False}) | VALUES,
        "on_demand": st.just(["phases"]),
        "note": VALUES,
    },
)
OTHERS = st.sampled_from((Event.FIT_START, Event.EPOCH_END, Event.EVAL_BEFORE_ALL, Event.EVAL_AFTER_ALL, "$command"))


# So many events of a kind and a rank with the same fields, but for the loss; numbers missing before; their context.
STRETCHES = st.tuples(
    st.just("batch_end") | st.just("batch_end") | OTHERS,
    st.integers(0, 1),
    st.integers(1, 30),
    FIELDS,
    st.sampled_from((0, 0, 0, 0, 1, -3)),
    st.sampled_from(({}, {"dataloader_len": 100, "max_duration": "90ba"}, {"dataloader_len": None, "world_size": 2})),
)


def logged_at(batch: int, entry: Any) -> Any:
    """An entry of what is logged whose step and numbers are others in each batch."""
    if (
        not isinstance(entry, list)
        or len(entry) != 2
        or entry[0].__class__ is not int
        or not isinstance(entry[1], dict)
    ):
        return entry
    step, values = entry
    by_type = {
        float: lambda value: value / (batch + 1),
        int: lambda value: (value * batch) % 2**64 - 60,
        bool: lambda _: batch % 3 == 1,
    }
    return [
        (step + batch) % 2**64,
        {name: by_type.get(type(value), lambda value: value)(value) for name, value in values.items()},
    ]


def records_of(stretches: list[tuple[Any, ...]], broken: set[int], same_loss: bool = False) -> list[tuple[str, bytes]]:
    """A stream: events may be missing, or come again; those whose place is in ``broken`` are damaged."""
    records: list[tuple[str, bytes]] = []
    seqs, batches = [0, 0], [0, 0]
    for event, rank, count, fields, skip, context in stretches:
        topic = Topic("run", str(event), rank)
        encode = event_encoder(topic, 1)
        seqs[rank] = max(0, seqs[rank] + skip)
        for _ in range(count):
            seqs[rank] += 1
            batches[rank] += event == "batch_end"
            seq, batch = seqs[rank], batches[rank]
            now = (0, batch // 10, batch, 8 * batch, 0, 0, 0, batch % 10, 0, 0, batch * 10**6, 0, 0, 10**6)
            before = None if batch < 1 else (0, 0, batch - 1, *now[3:])
            own = dict(fields)
            if fields.get("loss").__class__ is float and batch and not same_loss:
                own["loss"] = 1 / batch
            if isinstance(fields.get("logged"), list):
                own["logged"] = [logged_at(batch, entry) for entry in fields["logged"]]
            frame = encode(seq, seq, START + seq * SECOND, now, before, own, pack_map(context))
            records.append((topic.encode()[:-1].decode(), frame[len(topic.encode()) :]))
    for place in broken:
        if place < len(records):
            topic_text, body = records[place]
            records[place] = (topic_text, body[:-1])
    return records


def load(records: list[tuple[str, bytes]], in_blocks: bool, cut: int) -> tuple[RunView, StreamOrder, int]:
    """The view of a stream that comes in pieces of so many records, and how many events came in blocks as numbers."""
    order, view, blocks = StreamOrder("run", 1, BASE_EVENTS), RunView("run"), 0
    if in_blocks:
        order.read_in_blocks(BULK)
    pieces = [order.from_records(records[at : at + cut]) for at in range(0, len(records), cut)]
    for piece in (*pieces, order.rest()):
        for item in piece:
            if isinstance(item, EventBlock):
                view.see_block(item)
                blocks += len(item) - len(item.decoded)
            elif isinstance(item, Snapshot):
                view.see(item)
    return view, order, blocks


def test_events_of_other_forms_stay_in_their_order():
    lengths = [10 if batch % 3 else SECOND for batch in range(30)]
    phases = [{"began": START, "spans": [["forward", 0, length]], "device": False} for length in lengths]
    records = records_of([("batch_end", 0, 1, {"phases": one}, 0, {}) for one in phases], set())
    (one, *_), (other, *_) = load(records, True, 10), load(records, False, 10)
    assert repr(one.phases()) == repr(other.phases())


def assert_same(one: RunView, other: RunView) -> None:
    assert one.names() == other.names()
    for name in one.names():
        for axis in ("batch", "sample", "epoch", "time"):
            mine, others = (view.series(name).points(axis, width=10**9) for view in (one, other))
            np.testing.assert_array_equal(mine.xs, others.xs, f"{name} over {axis}")
            np.testing.assert_array_equal(mine.ys, others.ys, f"{name} over {axis}")
    assert one.progress() == other.progress()
    assert one.ranks() == other.ranks()
    assert one.log() == other.log()
    assert one.status == other.status
    for rank in (0, 1):
        mine, others = one.phases(rank), other.phases(rank)
        for name, seconds in mine.seconds.items():
            np.testing.assert_array_equal(seconds, others.seconds[name])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(STRETCHES, min_size=1, max_size=12), st.sets(st.integers(0, 200), max_size=2), st.sampled_from((1, 7, 500))
)
def test_blocks_show_what_single_events_show(stretches, broken, cut):
    records = records_of(stretches, broken)
    try:
        expected = load(records, False, cut)
    except (TypeError, AttributeError, ValueError, OverflowError, LookupError) as error:
        # What a callback raises at an event ends the comparison: it is shown, and the rest is up to the runner.
        with pytest.raises(type(error)):
            load(records, True, cut)
        return
    found = load(records, True, cut)
    assert_same(found[0], expected[0])
    assert (sorted(found[1].gaps), found[1].skipped, found[1].outcomes) == (
        sorted(expected[1].gaps),
        expected[1].skipped,
        expected[1].outcomes,
    )


def test_a_usual_training_comes_in_blocks_nearly_whole():
    logged = [[0, {"accuracy": 0.5, "correct": 7, "change": -3}], [1, {"norm": {"all": 0.1}}]]
    usual = {"loss": 0.5, "lr": {"SGD": [0.1]}, "batch_size": 32, "logged": logged}
    phases = {**usual, "phases": {"began": START, "spans": [["forward", 0, SECOND]], "device": False}}
    stretch = [("batch_end", 0, 9, usual, 0, {"dataloader_len": 100}), ("batch_end", 0, 1, phases, 0, {})]
    view, _, blocks = load(records_of([(Event.FIT_START, 0, 1, {}, 0, {}), *20 * stretch], set()), True, 50)
    assert blocks > 140
    assert [len(view.series(name)) for name in ("loss/train/total", "accuracy", "norm/all")] == [200, 200, 200]
    assert len(view.phases().batches) == 20


def test_text_keys_that_differ_are_other_forms():
    one, other = ({"lr": {name: [0.5]}, "loss": 1.0} for name in ("Adam", "Lion"))
    view, _, _ = load(
        records_of(10 * [("batch_end", 0, 5, one, 0, {}), ("batch_end", 0, 5, other, 0, {})], set()), True, 99
    )
    assert len(view.series("lr-Adam/group0")) == len(view.series("lr-Lion/group0")) == 50


def test_a_consumer_of_a_recording_handles_all_events_of_it(tmp_path):
    path = tmp_path / "recording-1.mcap"
    writer = RecordingWriter(path, "run", 1)
    usual = {"loss": 0.5, "lr": {"SGD": [0.1]}}
    for seq, (topic, body) in enumerate(records_of([("batch_end", 0, 500, usual, 0, {})], set()), 1):
        writer.append(topic.encode(), seq, seq, START + seq, body)
        if seq % 3 == 0:
            writer.flush()
    writer.close()
    run = MonitoredRun(RunView("run"))
    blocks: list[int] = []

    class Tap(RunTap):
        def take_block(self, block: EventBlock) -> None:
            blocks.append(len(block))
            super().take_block(block)

    statistics = Runner(Recording(path), [Tap(run)]).run()
    assert statistics.handled == 500
    assert sum(blocks) > 400
    assert run.view.progress().batch == 500
    assert statistics.ending is not None


def test_what_a_peer_may_write_otherwise_is_read_as_well():
    topic, body = records_of([("batch_end", 0, 1, {"loss": 2}, 0, {})], set())[0]
    values = msgpack.unpackb(body)
    wide = []
    for seq in range(1, 30):
        values[2] = values[3] = seq
        values[5][2] = seq
        # Every number in eight bytes, with a sign: allowed, and unlike what our publishers write.
        packed = b"".join(
            [bytes([0x99]), *(b"\xd3" + value.to_bytes(8, "big", signed=True) for value in values[:5]), b"\x9e"]
        )
        packed += b"".join(b"\xd3" + value.to_bytes(8, "big", signed=True) for value in values[5])
        wide.append((topic, packed + b"\xc0" + msgpack.packb(values[7]) + msgpack.packb(values[8])))
    assert_same(load(wide, True, 100)[0], load(wide, False, 100)[0])


def test_a_run_with_a_summary_is_shown_whole_before_it_is_read(tmp_path):
    path = tmp_path / "recording-1.mcap"
    losses = [1 / batch for batch in range(1, 5001)]
    losses[1200], losses[3456] = 9.0, -9.0
    writer = RecordingWriter(path, "run", 1)
    stretches = [("batch_end", 0, 1, {"loss": loss, "lr": {"SGD": [loss]}}, 0, {}) for loss in losses]
    for seq, (topic, body) in enumerate(records_of(stretches, set(), same_loss=True), 1):
        writer.append(topic.encode(), seq, seq, START + seq, body)
        if seq % 1000 == 0:
            writer.flush()
    writer.close()
    summarizer = Summarizer(path, "run", 1, None)
    summarizer.work(math.inf)
    summarizer.save()
    run = MonitoredRun(RunView("run"))
    first: list[tuple[int, Any, Any]] = []

    class Tap(RunTap):
        def begin_history(self, recording: Path) -> None:
            super().begin_history(recording)
            view = run.view
            first.append((view.progress().batch, view.names(), view.series("loss/train/total").points(width=10**9)))

    Runner(Recording(path), [Tap(run)], [ViewDestination(run)]).run()
    (batch, names, points), view = first[0], run.view
    whole = view.series("loss/train/total").points(width=10**9)
    assert (batch, names) == (5000, view.names())
    assert len(points.xs) < len(whole.xs) == 5000
    thinned = dict(zip(points.xs.tolist(), points.ys.tolist(), strict=True))
    everything = dict(zip(whole.xs.tolist(), whole.ys.tolist(), strict=True))
    assert thinned.items() <= everything.items()
    assert (thinned[1200], thinned[3456]) == (9.0, -9.0)
    assert (points.xs[-1], points.ys[-1]) == (whole.xs[-1], whole.ys[-1])
    assert view.progress().batch == 5000
