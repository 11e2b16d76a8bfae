"""The field `phases`: where the time of a batch goes."""

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_gpu import TimedGpu
from field_stream import Stream, asking, train
from gold import gold_loader

from offloop.bus.types.demand import BASE_EVENTS, Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.trainer.fields.phases import MAX_SPANS, PhaseProbe

BATCH_END = Event.BATCH_END
PHASES = ["data", "forward", "loss", "backward", "optimizer", "publishing"]


def phases_of(stream: Stream) -> dict[int, dict[str, Any]]:
    return {batch: fields["phases"] for _, batch, fields in stream.sent if "phases" in fields}


def names(phases: dict[str, Any]) -> list[str]:
    return [phase for phase, _, _ in phases["spans"]]


def seconds(phases: dict[str, Any], name: str) -> float:
    return float(sum(duration for phase, _, duration in phases["spans"] if phase == name)) / 1e9


class Clock:
    """Nanoseconds that pass only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 10**18

    def __call__(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock by which phases and publishing are timed."""
    clock = Clock()
    monkeypatch.setattr("offloop.trainer.fields.phases.time", SimpleNamespace(perf_counter_ns=clock, time_ns=clock))
    for name in ("perf_counter_ns", "thread_time_ns"):
        monkeypatch.setattr(f"offloop.trainer.stream.publishing.{name}", clock)
    return clock


class Slow:
    """A dataloader that takes its time for every batch."""

    def __init__(self, loader: Any, clock: Clock, seconds: float) -> None:
        self._loader = loader
        self._clock = clock
        self._seconds = seconds

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._clock.sleep(self._seconds)
            yield batch


def test_phases_are_published_in_order_when_due(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(asking(3, field="phases"))
    train(monkeypatch, stream, batches=12)
    found = phases_of(stream)
    assert list(found) == [3, 6, 9, 12]
    for phases in found.values():
        assert names(phases) == PHASES
        assert phases["device"] is False
        trained = phases["spans"][:-1]
        for (_, start, duration), (_, following, _) in itertools.pairwise(trained):
            assert start >= 0
            assert duration >= 0
            assert start + duration <= following


def test_batches_without_requested_phases_cost_no_further_events(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Event] = []
    before = PhaseProbe.before
    monkeypatch.setattr(PhaseProbe, "before", lambda self, event: (heard.append(event), before(self, event))[1])
    stream = Stream(asking(5, field="phases"))
    train(monkeypatch, stream, batches=23)
    assert len([event for event in heard if event not in BASE_EVENTS]) == 4 * 9


def test_the_cost_of_publishing_is_measured_over_all_batches(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stream = Stream(asking(5, field="phases"))
    slow, send = [3, 5, 9], stream.send

    def send_slowly(event: Event, timestamp: Any, *rest: Any) -> None:
        if event is BATCH_END and timestamp[2] in slow:
            clock.sleep(0.03)
        send(event, timestamp, *rest)

    monkeypatch.setattr(stream, "send", send_slowly)
    train(monkeypatch, stream, batches=10)
    # A batch's own end is published after it was told: it counts with the next ones.
    assert [phases["publishing"] for phases in phases_of(stream).values()] == [[30_000_000, 5], [60_000_000, 5]]


def test_each_microbatch_has_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(asking(1, field="phases"))
    train(monkeypatch, stream, batches=2, device_train_microbatch_size=2)
    for phases in phases_of(stream).values():
        assert names(phases) == ["data", *["forward", "loss", "backward"] * 3, "optimizer", "publishing"]


def test_waiting_for_data_is_a_phase_of_its_own_in_every_batch(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stream = Stream(asking(1, field="phases"))
    loader = Slow(gold_loader("train", 30, 6), clock, 0.02)
    train(monkeypatch, stream, batches=7, train_dataloader=loader)
    found = phases_of(stream)
    assert len(found) == 7
    for phases in found.values():
        assert seconds(phases, "data") == 0.02
        assert not any(seconds(phases, name) for name in PHASES[1:])


def test_work_at_the_end_of_an_epoch_is_not_waiting_for_data(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stream = Stream(asking(1, field="phases"))
    send = stream.send

    def send_slowly(event: Event, *rest: Any) -> None:
        if event is Event.EPOCH_CHECKPOINT:
            clock.sleep(0.2)
        send(event, *rest)

    monkeypatch.setattr(stream, "send", send_slowly)
    train(monkeypatch, stream, batches=12)
    found = phases_of(stream)
    assert len(found) == 12
    assert not any(seconds(phases, "data") for phases in found.values())


def test_an_evaluation_is_in_no_batch(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stream = Stream(asking(1, field="phases"))
    loader = Slow(gold_loader("eval_a", 12, 6), clock, 0.1)
    train(monkeypatch, stream, batches=6, eval_dataloader=loader, eval_interval="2ba", clock=clock)
    found = phases_of(stream)
    # Two batches of evaluation lie between the ends of batches 2 and 3, and of 4 and 5.
    assert found[3]["began"] - found[2]["began"] == 0.2e9
    assert found[5]["began"] - found[4]["began"] == 0.2e9
    assert [(name, start + duration) for batch in (3, 5) for name, start, duration in found[batch]["spans"][-1:]] == [
        ("optimizer", 0),
        ("optimizer", 0),
    ]


class Asks:
    """A dataloader while whose batches are fetched somebody asks for something else, by number of the batch."""

    def __init__(self, loader: Any, asks: dict[int, Callable[[], None]]) -> None:
        self._loader = loader
        self._asks = asks
        self._count = 0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._count += 1
            self._asks.get(self._count, lambda: None)()
            yield batch


def test_a_batch_in_which_the_demand_changes_has_no_phases(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requested = asking(1, field="phases")
    stream = Stream(requested)
    more = Demand.merge([requested, Demand({Event.AFTER_LOSS: EventDemand(1)})])
    # As in a pause, in which the publisher listens although nothing is published.
    loader = Asks(gold_loader("train", 30, 6), {4: lambda: stream.request(more), 8: lambda: stream.request(requested)})
    train(monkeypatch, stream, batches=12, train_dataloader=loader)
    found = phases_of(stream)
    assert len(found) >= 8
    assert all(names(phases) == PHASES for phases in found.values())
    assert list(found)[-1] == 12
    (reason, *_) = (fields["not_sent"] for _, _, fields in stream.sent if "not_sent" in fields)
    assert reason.startswith("phases: ")
    # Nothing is wrong with that.
    assert caplog.messages == []


def test_phases_on_several_streams_are_there_when_all_have_come_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = TimedGpu()
    stream = Stream(asking(1, field="phases"))
    train(monkeypatch, stream, batches=1, device=gpu)
    [promise] = phases_of(stream).values()
    # As a stream that runs ahead of the others does.
    gpu._copies.reverse()
    for _ in range(len(gpu._copies)):
        assert not promise.ready()
        gpu.run(1)
    assert promise.ready()
    assert gpu.waits == 0


def test_phases_on_a_gpu_have_its_own_clock_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = TimedGpu()
    stream = Stream(asking(2, field="phases"))
    train(monkeypatch, stream, batches=4, device=gpu)
    promised = phases_of(stream)
    assert gpu.waits == 0
    assert [promise.ready() for promise in promised.values()] == [False, False]
    gpu.run()
    assert [promise.ready() for promise in promised.values()] == [True, True]
    for promise in promised.values():
        phases = promise.value()
        assert phases["device"] is True
        # Ten marks follow the one at the beginning: each phase lies between two of them.
        assert phases["spans"][:5] == [[name, 1_000_000 * (2 * n + 1), 1_000_000] for n, name in enumerate(PHASES[:5])]
    assert gpu.waits == 0


def test_phases_of_many_microbatches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(asking(1, field="phases"))
    train(monkeypatch, stream, batches=1, n_train=400, batch_size=400, device_train_microbatch_size=1)
    (phases,) = phases_of(stream).values()
    assert len(phases["spans"]) == MAX_SPANS + 2
    assert names(phases)[-2:] == ["optimizer", "publishing"]
