"""What consumers that may only view ask for costs a training no more than it may."""

import logging
from typing import Any

import pytest
from field_stream import BATCH_END, Stream, asking, train
from training import Act, FakeClock

from offloop.bus.broker.leases import Leases
from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.bus.types.intervals import AT_END
from offloop.trainer.stream import publishing
from offloop.trainer.stream.field_budget import BYTES_PER_SECOND, TIME_SHARE, FieldBudget, wire_size

LARGE = "x" * (BYTES_PER_SECOND // 10)
"""Takes the budget of a little more than a tenth of a second."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The time by which the budget goes; what is computed takes none of it."""
    clock = FakeClock(1000.0)
    monkeypatch.setattr(publishing, "FieldBudget", lambda: FieldBudget(clock))
    monkeypatch.setattr(publishing, "thread_time_ns", lambda: 0)
    return clock


def viewed(monkeypatch: pytest.MonkeyPatch, stream: Stream, clock: FakeClock, batches: int = 30) -> None:
    """A training whose batches take 10 ms each."""

    def tick(event: Event, state: Any, logger: Any) -> None:
        clock.seconds += 0.01

    train(monkeypatch, stream, batches, fields={"large": lambda state: LARGE}, algorithms=Act(tick, Event.BATCH_START))


def test_what_viewers_ask_for_is_spread_and_named_and_its_first_time_is_never_refused(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Stream(asking(1, field="large"))
    stream.unlimited_demand = Demand()
    with caplog.at_level(logging.WARNING):
        viewed(monkeypatch, stream, clock)
    assert stream.batches_with("large") == [1, 12, 23]
    ends = [fields for event, _, fields in stream.sent if event is BATCH_END]
    assert len(ends) == 30
    assert ends[0]["on_demand"] == ["large"]
    assert ends[1]["not_sent"].startswith("large: left out here, because consumers that may only view")
    assert stream.fields_left_out == 27
    [warning] = [one.getMessage() for one in caplog.records]
    assert "5 % of the training's time or 256 KiB a second: large, and maybe other fields" in warning


def test_what_those_ask_for_who_may_command_comes_every_time(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
    stream = Stream(asking(1, field="large"))
    stream.unlimited_demand = asking(5, field="large")
    viewed(monkeypatch, stream, clock)
    assert set(stream.batches_with("large")) == {1, 12, 23} | set(range(5, 31, 5))
    stream = Stream(asking(1, field="large"))
    viewed(monkeypatch, stream, clock)
    assert stream.batches_with("large") == [*range(1, 31)]


def test_an_event_that_comes_for_its_fields_alone_does_not_come_without_them(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    stream = Stream(Demand({Event.AFTER_LOSS: EventDemand(None, {"large": 1})}))
    stream.unlimited_demand = Demand()
    viewed(monkeypatch, stream, clock)
    assert stream.batches_with("large", Event.AFTER_LOSS) == [1, 12, 23]
    assert sum(event is Event.AFTER_LOSS for event, _, _ in stream.sent) == 3


def test_fields_that_are_watched_for_are_spread_too(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
    both = {"large": 1, "update_norms": 1}
    stream = Stream(Demand({BATCH_END: EventDemand(1, both)}))
    stream.unlimited_demand = Demand()
    viewed(monkeypatch, stream, clock)
    first, *others = stream.batches_with("large")
    assert [first, *others] == [1, *stream.batches_with("update_norms")[-len(others) :]]
    assert 2 <= len(others) <= 3


def test_time_is_spent_by_its_share_and_a_batch_is_allowed_as_a_whole() -> None:
    clock = FakeClock(5.0)
    budget = FieldBudget(clock)
    assert budget.allows(1)
    budget.charge(10_000_000, 0)
    assert budget.allows(1)
    assert not budget.allows(2)
    clock.seconds += 0.01 / TIME_SHARE
    assert not budget.allows(2)
    assert budget.allows(3)


def test_sizes_are_about_those_on_the_wire() -> None:
    assert wire_size({"$tensors": 1, "bytes": 5, "image": b"12345"}) < 80
    assert wire_size([1.0] * 100) == 909
    assert wire_size({"a": "x" * 1000}) == 1000 + 9 + 9 + 2


def test_leases_of_those_who_may_only_view_are_told_apart() -> None:
    leases, norms, losses = Leases(), asking(1, field="gradient_norm"), asking(2, field="count")
    leases.renew(b"a", norms, 0.0)
    assert leases.unlimited(0.0) is None
    leases.renew(b"b", losses, 1.0, may_command=False)
    assert leases.unlimited(1.0) == norms
    assert leases.merged(1.0) == Demand.merge([norms, losses])
    leases.renew(b"b", losses, 2.0, may_command=True)
    assert leases.unlimited(2.0) is None
    leases.renew(b"b", losses, 3.0, may_command=False)
    assert leases.unlimited(6.0) == Demand(), "the other lease has run out"
    assert leases.unlimited(60.0) is None


def test_what_viewers_ask_for_at_the_end_comes_whatever_came_before(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    at_end = Demand({Event.FIT_END: EventDemand(AT_END, {"large": AT_END})})
    stream = Stream(Demand.merge([asking(1, field="large"), at_end]))
    stream.unlimited_demand = Demand()
    viewed(monkeypatch, stream, clock, batches=25)
    assert stream.batches_with("large") == [1, 12, 23]
    assert stream.batches_with("large", Event.FIT_END)
