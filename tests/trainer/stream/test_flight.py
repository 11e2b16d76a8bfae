"""What a training leaves in its flight recorder while a consumer requests the same."""

from typing import Any

import pytest
from fake_gpu import TimedGpu
from field_stream import BATCH_END, Stream, asking, train

from bus.protocol.frames import EventBody, decode_whole_event, split_frame
from bus.types.deferred import Deferred
from bus.types.event import Event
from trainer.device.device import DeferredMap, DeferredScalar
from trainer.stream.run_stream import TrainingStream

BATCHES = 12


class Ring:
    """Keeps all events."""

    batch = 0

    def __init__(self) -> None:
        self.ends: list[EventBody] = []

    def put(self, frame: bytes) -> bool:
        topic, body = split_frame(frame)
        if topic is not None and topic.name == BATCH_END:
            self.ends.append(decode_whole_event(body))
        return True

    def close(self) -> None:
        """Nothing is held."""


class Recorded(Stream):
    """A GPU has done a batch when the next one ends."""

    run_name = "r"
    kept_events = frozenset[Event]()

    def __init__(self, gpu: TimedGpu, *demand: Any) -> None:
        super().__init__(*demand)
        self._gpu = gpu
        self._issued = 0

    def send(self, event: Event, *rest: Any) -> None:
        super().send(event, *rest)
        if event is BATCH_END:
            self._gpu.run(self._issued)
            self._issued = len(self._gpu._copies)


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Ring:
    """That of the next training."""
    ring, create = Ring(), TrainingStream.__init__

    def with_ring(self: TrainingStream, *arguments: Any) -> None:
        create(self, *arguments)
        self._ring = ring  # type: ignore[assignment]

    monkeypatch.setattr(TrainingStream, "__init__", with_ring)
    return ring


@pytest.mark.parametrize("asks", [True, False])
def test_on_a_gpu_each_batch_has_the_times_of_the_device_also_where_a_consumer_asks_for_them(
    monkeypatch: pytest.MonkeyPatch, ring: Ring, asks: bool
) -> None:
    gpu = TimedGpu()
    stream = Recorded(gpu, *[asking(3, field="phases")] * asks)
    train(monkeypatch, stream, BATCHES, device=gpu)
    assert stream.batches_with("phases") == [3, 6, 9, 12] * asks
    assert gpu.waits == 0
    assert len(ring.ends) == BATCHES
    found = [end.fields for end in ring.ends if "phases" in end.fields]
    # Nothing for the broker to fill in by the host's times: the device's come with the batch after.
    assert [fields["late"]["phases"][0][1][2] for fields in found] == list(range(1, BATCHES))
    assert all(fields["phases"]["device"] is True for fields in found)
    assert all("phases" not in end.fields.get("on_demand", ()) for end in ring.ends if "phases" not in end.fields)


def test_of_plain_values_it_is_not_asked_whether_they_are_on_their_way(
    monkeypatch: pytest.MonkeyPatch, ring: Ring
) -> None:
    asked: set[type] = set()

    def ask(kind: type, value: object) -> bool:
        if kind is Deferred:
            asked.add(type(value))
        return is_instance(kind, value)

    is_instance = type(Deferred).__instancecheck__
    monkeypatch.setattr(type(Deferred), "__instancecheck__", ask)
    gpu = TimedGpu()
    train(monkeypatch, Recorded(gpu), BATCHES, device=gpu)
    # It takes microseconds of each value of each event.
    assert asked == {DeferredScalar, DeferredMap}
