"""Intervals: the rows of the reference, and how both ends of the stream apply them."""

import json
from typing import Any

import pytest
from gold import gold_loader
from helpers import REFERENCE
from hypothesis import given
from hypothesis import strategies as st
from training import Act, gold_trainer

from offloop.bus.errors import ConfigurationError, ProtocolError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.bus.types.intervals import MAX_INTERVAL, MICROBATCH_EVENTS, EventPosition, check_interval, is_due
from offloop.bus.types.timestamp import Time, Timestamp
from offloop.consumers.api.view import view_for
from offloop.trainer import State

MATRIX = [case for case in json.loads((REFERENCE / "interval_matrix.json").read_text())["matrix"] if case["interval"]]
CHECKPOINTS = (Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT)
ENDS = (Event.BATCH_END, Event.EPOCH_END, Event.ITERATION_END)
INNER = Event.BEFORE_FORWARD


def moments(*events: Event, n_train: int = 20, **arguments: Any) -> list[EventPosition]:
    """Return the positions of a training at these events."""
    found: list[EventPosition] = []
    counts: dict[tuple[Event, int], int] = {}

    def note(event: Event, state: State, logger: object) -> None:
        microbatch = 0
        if event in MICROBATCH_EVENTS:
            key = (event, state.timestamp.values[2])
            microbatch = counts.get(key, 0)
            counts[key] = microbatch + 1
        previous = state.previous_timestamp
        found.append(
            EventPosition(
                event,
                state.timestamp.values,
                previous and previous.values,
                state.eval_timestamp.values,
                state.predict_timestamp.values,
                state.max_duration,
                state.dataloader_len,
                microbatch,
            )
        )

    others = arguments.pop("algorithms", [])
    with gold_trainer(n_train, algorithms=[*others, Act(note, *events)], **arguments) as trainer:
        trainer.fit()
    return found


def due(interval: int | str, found: list[EventPosition]) -> list[list[Any]]:
    return [[one.event.name, *one.timestamp[1:4]] for one in found if is_due(interval, one)]


def test_an_interval_is_due_when_the_reference_saves_and_evaluates() -> None:
    durations = {case["max_duration"] for case in MATRIX}
    trained = {duration: moments(*CHECKPOINTS, *ENDS, max_duration=duration) for duration in durations}
    for case in MATRIX:
        interval, found = str(Time.from_input(case["interval"], "ep")), trained[case["max_duration"]]
        saving, ending = ([one for one in found if (one.event in CHECKPOINTS) is which] for which in (True, False))
        saves = {row[2]: row for row in reversed(due(f"{interval}+end", saving))}
        # The reference saves each batch once, where the epoch's end may be due as well.
        assert sorted(saves.values(), key=lambda row: row[2]) == case["checkpoint_saves"], case
        # Without the end: an epoch that ends together with the training is one that ends.
        runs = [row for row in case["eval_runs"] if row[0] != "FIT_END"]
        assert [row[1:] for row in due(interval, ending)] == [row[1:] for row in runs], case


@pytest.mark.parametrize("event", [Event.AFTER_LOSS, Event.BATCH_END])
def test_a_training_that_is_stopped_has_come_to_its_end(event: Event) -> None:
    def stop(event: Event, state: State, logger: object) -> None:
        if state.timestamp.values[2] == 5:
            state.stop_training()

    found = moments(*CHECKPOINTS, Event.FIT_END, max_duration="9ep", algorithms=[Act(stop, event)])
    last = found[-1].timestamp[2]
    assert [row[0] for row in due("end", found)] == ["BATCH_CHECKPOINT", "FIT_END"]
    assert {row[2] for row in due("end", found)} == {last}
    assert [row[2] for row in due("4ba+end", found) if row[0] == "BATCH_CHECKPOINT"] == [4, last]


def test_iterations_are_counted_when_they_end() -> None:
    found = moments(*CHECKPOINTS, max_duration="4iter", iteration_length="1ep")
    assert due("2iter", found) == [["ITERATION_CHECKPOINT", 2, 8, 40], ["ITERATION_CHECKPOINT", 4, 16, 80]]
    assert due("3iter+end", found) == [["ITERATION_CHECKPOINT", 3, 12, 60], ["ITERATION_CHECKPOINT", 4, 16, 80]]


def test_within_a_batch_it_is_the_first_one_of_the_interval() -> None:
    found = moments(INNER, n_train=24, device_train_microbatch_size=2)
    assert len(found) == 8 * 3
    steps = {text: [row[2] for row in due(text, found)] for text in ("1ep", "2ep", "3ba", "0.25dur", "1dur")}
    assert steps == {"1ep": [0, 4], "2ep": [0], "3ba": [0, 3, 6], "0.25dur": [0, 2, 4, 6], "1dur": [0]}
    # A number counts batches from 1, and takes all microbatches.
    assert [row[2] for row in due(4, found)] == [3, 3, 3, 7, 7, 7]
    # A share of samples is not known before they come.
    assert [row[2] for row in due("0.25dur", moments(INNER, max_duration="40sp"))] == [0]


def test_batches_of_an_evaluation_are_counted_by_it() -> None:
    found = moments(Event.EVAL_BEFORE_FORWARD, eval_dataloader=gold_loader("eval_a", 24, 5), eval_interval="1ep")
    assert len(found) == 2 * 5
    for text, batches in {"1ep": [0], "0.5dur": [0], "2ba": [0, 2, 4]}.items():
        seen = [number for number, one in enumerate(found) if is_due(text, one)]
        assert seen == [*batches, *(5 + batch for batch in batches)]


def test_other_events_come_every_time_and_with_the_end_alone_when_it_is_reached() -> None:
    found = moments(Event.INIT, Event.FIT_START, Event.EPOCH_START, Event.FIT_END)
    assert len(due("5ep", found)) == len(due(7, found)) == len(found) == 5
    assert [row[0] for row in due("end", found)] == ["FIT_END"]


# -- how they are written ---------------------------------------------------------------------------------------------


def test_each_has_one_spelling() -> None:
    spelled = {10: 10, "2EP": "2ep", " 1h30m": "5400sec", "1e3ba+end": "1000ba+end", "end": "end"}
    assert {written: check_interval(written) for written in spelled} == spelled


def test_an_invalid_interval_is_refused_on_either_side() -> None:
    wrong: list[Any] = [0, 2.5, True, MAX_INTERVAL + 1, "", "10", "1.5dur", "1ep+start", "x" * 99]
    for interval in wrong:
        with pytest.raises(ConfigurationError, match="invalid interval"):
            EventDemand(fields={"weights": interval})
        with pytest.raises(ProtocolError):
            Demand.from_wire({"batch_end": {"fields": {"weights": [interval]}}})


def test_an_interval_that_does_not_divide_a_batch_is_refused_within_it() -> None:
    for interval in ("10sp", "90sec", "1ep+end"):
        with pytest.raises(ConfigurationError, match="is not allowed at before_forward"):
            Demand({INNER: EventDemand(fields={"inputs": interval})})
        with pytest.raises(ProtocolError, match="is not allowed at"):
            Demand.from_wire({"eval_before_forward": {"every": [interval]}})
        assert Demand({Event.BATCH_END: EventDemand(fields={"weights": interval})})


# -- what a callback sees ---------------------------------------------------------------------------------------------


def snapshot_at(batch: int, event: Event = Event.BATCH_CHECKPOINT, **fields: Any) -> Snapshot:
    return Snapshot.build(
        event,
        timestamp=Timestamp(epoch=batch // 4, batch=batch, sample=6 * batch, batch_in_epoch=batch % 4),
        previous_timestamp=Timestamp(epoch=batch // 4, batch=batch - 1, sample=6 * (batch - 1)) if batch else None,
        max_duration="8ba",
        dataloader_len=4,
        on_demand=list(fields),
        **fields,
    )


texts = st.sampled_from([1, 3, 4, "2ba", "1ep", "13sp", "0.25dur", "1ep+end", "end"])


@given(st.lists(texts, min_size=1, max_size=4), st.integers(1, 8), st.sampled_from([*CHECKPOINTS, Event.BATCH_END]))
def test_it_sees_the_same_alone_and_beside_others(intervals: list[int | str], batch: int, event: Event) -> None:
    demands = [Demand({event: EventDemand(one, {"weights": one})}) for one in intervals]
    merged = Demand.from_wire(Demand.merge(demands).to_wire())
    assert merged == Demand.merge(demands)
    published, alone = (view_for(demand, snapshot_at(batch, event, weights=1.5)) for demand in (merged, demands[0]))
    assert published is not None or alone is None
    assert (None if published is None else view_for(demands[0], published)) == alone


def test_it_sees_the_first_microbatch_only_where_another_takes_all() -> None:
    demand = Demand({INNER: EventDemand("1ep", {"inputs": "1ep"})})
    first = view_for(demand, snapshot_at(4, INNER, inputs=1.5))
    assert first is not None
    assert first.on_demand == ("inputs",)
    assert view_for(demand, snapshot_at(4, INNER, inputs=1.5, microbatch=1)) is None
    assert view_for(demand, snapshot_at(5, INNER, inputs=1.5)) is None
    every = view_for(Demand({INNER: EventDemand(1, {"inputs": 1})}), snapshot_at(4, INNER, inputs=1.5, microbatch=1))
    assert every is not None
    # It does not learn that another one counts them.
    assert every.on_demand == ("inputs",)


def test_what_comes_late_is_seen_by_whoever_was_to_have_it_and_by_no_other() -> None:
    late = {"weights": [["batch_checkpoint", [0, 0, 3, 18, *[0] * 10], [0, 0, 2, 12, *[0] * 10]]]}
    snapshot = snapshot_at(5, weights=1.5, late=late)
    seen = view_for(Demand({Event.BATCH_CHECKPOINT: EventDemand("3ba", {"weights": "3ba"})}), snapshot)
    assert seen is not None
    assert (seen.on_demand, seen.weights) == (("weights",), 1.5)
    for other in ("2ba", 4):
        assert view_for(Demand({Event.BATCH_CHECKPOINT: EventDemand(other, {"weights": other})}), snapshot) is None
    # One that was due elsewhere is not.
    assert view_for(Demand({Event.BATCH_CHECKPOINT: EventDemand("1ep", {"weights": "1ep"})}), snapshot) is None
    for malformed in (5, {"weights": [5]}, {"weights": [["no_event", [], None]]}):
        demand = Demand({Event.BATCH_CHECKPOINT: EventDemand("3ba", {"weights": "3ba"})})
        assert view_for(demand, snapshot_at(5, weights=1.5, late=malformed)) is None
