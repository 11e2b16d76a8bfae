"""What a training leaves in its flight recorder, and what becomes of its memory."""

import os
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import TimedGpu
from field_stream import BATCH_END, Stream, asking, train
from training import Act, gold_trainer

from offloop.bus.errors import RunDirectoryError
from offloop.bus.protocol.frames import EventBody, decode_whole_event, split_frame
from offloop.bus.types.event import Event
from offloop.trainer import AlgorithmLogger, State
from offloop.trainer.stream.run_stream import TrainingStream

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

    def __init__(self, gpu: TimedGpu, *demand: Any, broker_until: int | None = None) -> None:
        super().__init__(*demand)
        self._broker_until = broker_until
        self._gpu = gpu
        self._issued = 0

    def send(self, event: Event, *rest: Any) -> None:
        super().send(event, *rest)
        if event is BATCH_END:
            self._gpu.run(self._issued)
            self._issued = len(self._gpu._copies)
            if len(self.batches_with("loss")) == self._broker_until:
                self.requested_events.clear()


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Ring:
    """Return the ring of the next training."""
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


def test_a_field_that_cannot_be_packed_beside_a_value_on_a_gpu_does_not_end_the_training(
    monkeypatch: pytest.MonkeyPatch, ring: Ring
) -> None:
    def log(event: Event, state: State, logger: AlgorithmLogger) -> None:
        if state.timestamp.batch == 3:
            logger.log_metrics({"large": 2**70})

    gpu = TimedGpu()
    stream = Recorded(gpu)
    train(monkeypatch, stream, BATCHES, device=gpu, algorithms=Act(log, Event.AFTER_LOSS))
    assert stream.batches_with("loss") == list(range(1, BATCHES + 1))
    # As the publisher sends it, when the values are there.
    assert [end.timestamp.batch for end in ring.ends if list(end.fields) == ["not_sent"]] == [4]


def test_batches_are_counted_without_a_broker_too(monkeypatch: pytest.MonkeyPatch, ring: Ring) -> None:
    gpu = TimedGpu()
    stream = Recorded(gpu, broker_until=3)
    train(monkeypatch, stream, BATCHES, device=gpu)
    assert stream.batches_with("loss") == [1, 2, 3]
    assert len(ring.ends) == ring.batch == BATCHES


def test_a_run_that_cannot_be_started_keeps_no_memory(tmp_path: Path) -> None:
    def refuse() -> int:
        with pytest.raises(RunDirectoryError):
            gold_trainer(publish=True, run_name="r", runs_dir=tmp_path / "file", flight_recorder="5ba")
        return len(os.listdir("/dev/fd"))

    (tmp_path / "file").touch()
    assert refuse() == refuse()
