"""Demand: merged without requesting more, bounded, and dropped with its lease."""

import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloop.bus.broker.consumers import LEASE_SECONDS, Consumers
from offloop.bus.errors import BrokerError, ConfigurationError, FieldNotAvailableError, ProtocolError
from offloop.bus.protocol.frames import decode_control, encode_control
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.demand import BASE_EVENTS, Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.bus.types.intervals import MAX_INTERVAL, batch_number
from offloop.bus.types.timestamp import Timestamp, TrainingTime
from offloop.consumers.api.callback import Callback, demand_of
from offloop.consumers.api.logger import Logger
from offloop.consumers.api.view import view_for

INNER = Event.AFTER_TRAIN_BATCH
names = st.sampled_from(["gradient_norm", "parameter_norm", "queue", "größe"])
intervals = st.one_of(st.integers(1, 12), st.integers(1, MAX_INTERVAL))
requests = st.builds(EventDemand, every=intervals, fields=st.dictionaries(names, intervals, max_size=3))
delays = st.none() | st.floats(0, 1)
demands = st.builds(Demand, st.dictionaries(st.sampled_from(Event), requests, max_size=4), delays)


def travelled(demand: Demand) -> Demand:
    content = decode_control(encode_control("demand", {"demand": demand.to_wire()})[1:]).content
    return Demand.from_wire(content["demand"])


@given(st.lists(demands, max_size=4), st.sampled_from(Event), st.integers(0, 100_000))
def test_a_merged_demand_is_due_exactly_when_one_of_its_parts_is(
    parts: list[Demand], event: Event, number: int
) -> None:
    merged = Demand.merge(parts)
    assert travelled(merged) == merged
    assert hash(travelled(merged)) == hash(merged)
    assert merged.events == {event for part in parts for event in part.events}
    assert merged.is_due(event, number) == any(part.is_due(event, number) for part in parts)
    fields = merged.due_fields(event, number)
    assert len(fields) == len(set(fields))
    assert set(fields) == {name for part in parts for name in part.due_fields(event, number)}
    assert not fields or merged.is_due(event, number)
    # The shortest delay remains and changes nothing else.
    assert merged.max_delay == min((part.max_delay for part in parts if part.max_delay is not None), default=None)
    assert merged.content == Demand.merge(part.content for part in parts)
    assert merged.content.max_delay is None


def test_base_events_come_every_time_and_their_fields_when_they_are_due() -> None:
    demand = Demand({Event.BATCH_END: EventDemand(10, {"gradient_norm": 10}), INNER: EventDemand(10)})
    assert [demand.is_due(Event.BATCH_END, number) for number in (9, 10)] == [True, True]
    assert [demand.due_fields(Event.BATCH_END, number) for number in (9, 10)] == [(), ("gradient_norm",)]
    assert [demand.is_due(INNER, number) for number in (9, 10)] == [False, True]
    assert not demand.is_due(Event.FIT_END, 0)
    assert demand.due_fields(Event.FIT_END, 0) == ()


def test_demands_that_cause_the_same_are_equal() -> None:
    assert Demand.merge([Demand({INNER: EventDemand(10)}), Demand({INNER: EventDemand(5)})]) == Demand(
        {INNER: EventDemand(5)}
    )
    assert Demand({Event.BATCH_END: EventDemand(10)}) == Demand.of([Event.BATCH_END])
    assert Demand({INNER: EventDemand(10)}) != Demand({INNER: EventDemand(5)})
    assert (bool(Demand()), bool(Demand.of([INNER]))) == (False, True)
    always = Demand(
        {INNER: EventDemand(), Event.BATCH_START: EventDemand(2), Event.BATCH_END: EventDemand(1, {"x": 1})}
    )
    assert {event for event in always.events if always.is_always_same(event)} == {INNER}


@pytest.mark.parametrize(
    "arguments",
    [{"every": 2.5}, {"every": True}, {"fields": {"gradient norm": 1}}, {"fields": {f"f_{n}": 1 for n in range(65)}}],
)
def test_an_invalid_demand_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        EventDemand(**arguments)


@pytest.mark.parametrize("delay", [-0.001, 1.001, math.nan, True, "0.1", 1 << 2000])
def test_an_invalid_delay_is_refused(delay: Any) -> None:
    with pytest.raises(ConfigurationError):
        Demand(max_delay=delay)
    with pytest.raises(ProtocolError):
        Demand.from_wire({"batch_end": {}, "max_delay": delay})


# -- from the wire ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None,
        {f"event_{number}": {} for number in range(257)},
        {"batch_end": []},
        {"batch_end": {"every": 5}},
        {"batch_end": {"every": [2**31 + 1]}},
        {"batch_end": {"every": list(range(100, 165))}},
        {"batch_end": {"fields": ["gradient_norm"]}},
        {"batch_end": {"fields": {"gradient_norm": [[10]]}}},
        {"batch_end": {"fields": {f"field_{number}": [1] for number in range(65)}}},
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_malformed_or_too_large_demand_is_refused(value: Any) -> None:
    with pytest.raises(ProtocolError) as error:
        Demand.from_wire(value)
    assert len(str(error.value)) < 250


def test_unknown_parts_of_a_newer_demand_are_skipped() -> None:
    value = {"batch_middle": {"every": [3]}, INNER.value: {"every": [3], "until": 500}, 7: {}}
    assert Demand.from_wire(value) == Demand({INNER: EventDemand(3)})


# -- numbers of batches -----------------------------------------------------------------------------------------------


NUMBERS = {
    Event.BEFORE_DATALOADER: 8,
    Event.BATCH_START: 8,
    Event.AFTER_TRAIN_BATCH: 8,
    Event.BATCH_END: 7,
    Event.BATCH_CHECKPOINT: 7,
    Event.EVAL_AFTER_FORWARD: 4,
    Event.EVAL_BATCH_END: 3,
    Event.PREDICT_BEFORE_FORWARD: 6,
    Event.PREDICT_BATCH_END: 5,
    Event.EPOCH_END: 0,
}


def test_events_before_a_batch_is_counted_belong_to_the_next_one() -> None:
    values = [TrainingTime(1, 1, batch, *range(11)) for batch in (7, 3, 5)]
    assert {event: batch_number(event, *values) for event in NUMBERS} == NUMBERS
    assert batch_number(Event.EVAL_BATCH_START, TrainingTime(batch=9)) == 1, "before the first evaluation"


# -- leases -----------------------------------------------------------------------------------------------------------


def test_every_event_that_is_not_always_published_belongs_to_a_batch() -> None:
    assert {event for event in Event if batch_number(event, *([TrainingTime(batch=9)] * 3))} - {Event.BATCH_END} == (
        set(Event) - BASE_EVENTS
    )


def test_a_lease_ends_with_the_time_and_is_renewed_by_asking_again() -> None:
    leases, ten, fifteen = Consumers(), Demand({INNER: EventDemand(10)}), Demand({INNER: EventDemand(15)})
    leases.renew(b"a", ten, now=100.0, name="alice")
    leases.renew(b"b", Demand.of([Event.BATCH_START]), now=101.0)
    leases.renew(b"b", fifteen, now=102.0)
    assert leases.merged(102.0) == Demand.merge([ten, fifteen])
    leases.renew(b"b", fifteen, now=104.0)
    assert leases.merged(100.0 + LEASE_SECONDS - 0.01) == Demand.merge([ten, fifteen])
    assert leases.merged(100.0 + LEASE_SECONDS) == fifteen
    assert leases.merged(104.0 + LEASE_SECONDS) == Demand()


def test_a_sum_of_demands_that_is_too_large_to_send_is_refused() -> None:
    def fifty(name: str) -> Demand:
        return Demand({INNER: EventDemand(1, {f"{name}_{number}": 1 for number in range(50)})})

    leases, accepted = Consumers(), 0
    leases.renew(b"fields", fifty("a"), now=0)
    primes = [number for number in range(2, 400) if all(number % part for part in range(2, math.isqrt(number) + 1))]
    for prime in primes:
        with suppress(BrokerError):
            leases.renew(f"every {prime}".encode(), Demand({Event.BATCH_START: EventDemand(prime)}), now=1)
            accepted += 1
    assert (len(primes), accepted) == (78, 64)
    # A refused demand leaves the one before.
    with pytest.raises(BrokerError, match="together request too much"):
        leases.renew(b"every 2", fifty("b"), now=1)
    assert leases.merged(1).is_due(Event.BATCH_START, 2)
    assert travelled(leases.merged(1)) == leases.merged(1)


# -- what a callback asks for, and sees -------------------------------------------------------------------------------


class Norms(Callback):
    fields = ("gradient_norm",)
    every = 10

    def batch_end(self, state: Snapshot, logger: Logger) -> None: ...

    def after_train_batch(self, state: Snapshot, logger: Logger) -> None: ...


def snapshot_of(batch: int, event: Event = Event.BATCH_END, **fields: Any) -> Snapshot:
    on_demand = {"on_demand": list(fields)} if fields else {}
    return Snapshot.build(event, timestamp=Timestamp(batch=batch), loss=0.5, **fields, **on_demand)


def test_a_callback_asks_for_its_events_and_fields_at_its_interval() -> None:
    request = EventDemand(10, {"gradient_norm": 10})
    assert Norms().demand() == Demand({Event.BATCH_END: request, INNER: request})
    often = Norms()
    often.every = 5  # type: ignore[misc]
    assert demand_of([Norms(), often]) == often.demand()
    assert demand_of([]) == Demand()
    soon = Norms()
    soon.max_delay = 0.02  # type: ignore[misc]
    both = demand_of([Norms(), soon])
    assert (both.content, both.max_delay) == (Norms().demand(), 0.02)


@pytest.mark.parametrize("attributes", [{"fields": "gradient_norm"}, {"every": 0}, {"max_delay": 5}])
def test_an_invalid_request_of_a_callback_is_refused(attributes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        demand_of([type("Wrong", (Norms,), attributes)()])


def test_a_callback_sees_its_own_share_of_what_was_published_for_several() -> None:
    demand = Norms().demand()
    seen = view_for(demand, snapshot_of(10, gradient_norm=1.5, queue=3))
    assert seen is not None
    assert (seen.gradient_norm, seen.loss, seen.on_demand) == (1.5, 0.5, ("gradient_norm",))
    with pytest.raises(FieldNotAvailableError):
        _ = seen.queue
    not_due = view_for(demand, snapshot_of(15, gradient_norm=1.5))
    assert not_due is not None
    assert "gradient_norm" not in not_due.fields
    # What the training's own code publishes with an event is for everybody.
    assert not_due.loss == 0.5
    assert view_for(demand, snapshot_of(9, INNER, gradient_norm=1.5)) is not None
    assert view_for(demand, snapshot_of(10, INNER, gradient_norm=1.5)) is None
    assert view_for(demand, snapshot_of(10, Event.BATCH_START)) is None


def test_an_event_that_is_requested_for_a_field_alone_goes_with_it() -> None:
    alone, both = Demand({INNER: EventDemand(None, {"a": 5, "b": 10})}), Demand({INNER: EventDemand(20, {"a": 5})})
    assert [number for number in range(1, 21) if alone.is_due(INNER, number)] == [5, 10, 15, 20]
    assert alone.without({"a"}) == alone
    assert not alone.without({"a", "b", "c"})
    # Somebody wants the event whatever comes with it.
    assert both.without({"a"}) == both
    assert Demand.merge([alone, both]).without({"a", "b"}).is_due(INNER, 20)
    assert Demand.from_wire(alone.to_wire()) == alone
    with pytest.raises(ProtocolError):
        Demand.from_wire({INNER.value: {"every": []}})


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["batch_end", INNER.value, "every", "fields", "max_delay"]) | st.integers(), inner
        )
    ),
    max_leaves=12,
)


@given(anything)
def test_any_other_value_is_refused_or_a_demand(value: Any) -> None:
    try:
        demand = Demand.from_wire(value)
    except ProtocolError:
        return
    assert Demand.from_wire(demand.to_wire()) == demand
