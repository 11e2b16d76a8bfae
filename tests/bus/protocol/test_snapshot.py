"""Snapshots read like the state that callbacks know, and cannot be changed."""

import copy
import datetime
import pickle

import msgpack
import pytest

from offloop.bus import Event, FieldNotAvailableError, FrozenSnapshotError, ProtocolError, Snapshot, Time, Timestamp
from offloop.bus.protocol.frames import decode_event


def snapshot(**fields):
    return Snapshot.build(Event.BATCH_END, timestamp=Timestamp(epoch=1, batch=12, sample=96), **fields)


def test_a_snapshot_has_the_names_of_the_training_state():
    state = snapshot(
        loss=0.5,
        lr={"SGD": [0.1]},
        batch_size=8,
        dataloader_label="train",
        dataloader_len=9,
        max_duration="4ep",
        time_ns=2_500_000_000,
    )
    assert int(state.timestamp.batch) == 12
    assert state.loss == 0.5
    assert state.lr["SGD"] == [0.1]
    assert (state.batch_size, state.dataloader_label, state.dataloader_len) == (8, "train", 9)
    assert state.max_duration == Time(4, "ep")
    assert state.get_elapsed_duration() == Time(0.25, "dur")
    assert state.time == 2.5
    half = Timestamp(total_wct=datetime.timedelta(seconds=30))
    assert Snapshot.build(Event.BATCH_END, timestamp=half, max_duration="1m").get_elapsed_duration() == Time(0.5, "dur")


def test_a_malformed_context_is_a_protocol_error_when_it_is_read():
    numbers = msgpack.packb([1, 1, 7, 1, 0, [0] * 14, None]).replace(b"\x97", b"\x99", 1)
    state = Snapshot(Event.BATCH_END, "run", 0, decode_event(numbers + b"\x80" + b"\x81\xa1x\xa1\xff"))
    assert state.seq == 7
    for look in (lambda: state.loss, lambda: state.fields, lambda: state.x, lambda: state.max_duration):
        with pytest.raises(ProtocolError, match=r"the context of event 7 .*utf-8"):
            look()


def test_unpublished_fields_have_empty_values():
    state = Snapshot.build(Event.INIT)
    assert state.loss is None
    assert state.max_duration is None
    assert state.get_elapsed_duration() is None
    assert state.previous_timestamp is None
    assert dict(state.lr) == {}
    assert state.eval_timestamp == Timestamp()
    assert state.world_size == 1


def test_a_missing_field_error_lists_the_available_ones():
    assert snapshot(perplexity=3.5).perplexity == snapshot(perplexity=3.5).fields["perplexity"] == 3.5
    with pytest.raises(FieldNotAvailableError, match=r"batch_end .* no field 'grad_norm'.*loss.*grad_norm=") as error:
        _ = snapshot(loss=1.0).grad_norm
    assert isinstance(error.value, AttributeError)
    assert not hasattr(snapshot(), "grad_norm")


def test_a_snapshot_and_its_maps_cannot_be_changed():
    for name in ("loss", "timestamp", "anything"):
        with pytest.raises(FrozenSnapshotError, match=name):
            setattr(snapshot(loss=1.0), name, 3)
        with pytest.raises(FrozenSnapshotError, match=name):
            delattr(snapshot(loss=1.0), name)
    with pytest.raises(TypeError):
        snapshot(eval_metrics={"eval": {"Accuracy": 1.0}}).eval_metrics["other"] = {}
    with pytest.raises(TypeError):
        snapshot(loss=1.0).fields["loss"] = 2.0


def test_copies_and_pickles_are_equal():
    state = snapshot(loss=1.0)
    assert copy.deepcopy(state) == state == pickle.loads(pickle.dumps(state))
    assert state != snapshot(loss=2.0)
    assert len({state, copy.copy(state)}) == 1
