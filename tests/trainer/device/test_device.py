"""Numbers from a GPU, with a stand-in for the GPU: nothing waits until something is drained."""

import itertools

import pytest
import torch
from fake_gpu import FakeGpu, reads
from field_stream import Stream, train
from gold import GoldMLP, gold_optimizer
from torchmetrics import MeanMetric
from training import FakeStream

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.deferred import Deferred
from offloop.bus.types.event import Event
from offloop.trainer import AlgorithmLogger, Classifier, State
from offloop.trainer.device.device import CpuDevice, copied, get_device
from offloop.trainer.loop.progress import ProgressDisplay
from offloop.trainer.loop.step import TrainStep
from offloop.trainer.stream.publishing import StatePublisher


def test_only_draining_waits() -> None:
    gpu = FakeGpu()
    number = gpu.read_later(torch.tensor(1.5))
    assert number.value() == 1.5
    assert gpu.waits == 1
    assert number.value() == 1.5
    assert gpu.waits == 1


def test_slots_are_reused_without_losing_unread_numbers() -> None:
    gpu = FakeGpu(size=4)
    numbers = []
    for value in range(40):
        numbers.append(gpu.read_later(torch.tensor(float(value))))
        gpu.run()
    assert [number.value() for number in numbers] == [float(value) for value in range(40)]
    assert (gpu.waits, gpu.allocations) == (0, 1)


def test_a_gpu_that_lags_behind_makes_the_ring_grow_and_nothing_waits() -> None:
    gpu = FakeGpu(size=4)
    numbers = [gpu.read_later(torch.tensor(float(value))) for value in range(10)]
    assert gpu.waits == 0
    assert not any(number.ready() for number in numbers)
    gpu.run()
    numbers += [gpu.read_later(torch.tensor(float(value))) for value in range(10, 14)]
    gpu.run()
    assert [number.value() for number in numbers] == [float(value) for value in range(14)]
    assert (gpu.waits, gpu.allocations) == (0, 3)


def test_many_numbers_cross_in_one_copy_and_arrive_together() -> None:
    gpu = FakeGpu()
    with reads() as found:
        first = gpu.read_many_later(torch.arange(3.0))
        second = gpu.read_many_later(torch.arange(1000.0))
    assert (found, gpu.issued) == ([], 2)
    gpu.run(1)
    assert isinstance(first, Deferred)
    assert (first.ready(), second.ready()) == (True, False)
    assert first.value() == [0.0, 1.0, 2.0]
    gpu.run()
    assert second.value() == [float(number) for number in range(1000)]
    assert gpu.waits == 0


@pytest.mark.parametrize(
    "number",
    [
        torch.tensor(2**24 + 1),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor(0.1, dtype=torch.bfloat16),
        torch.tensor(True),
        torch.tensor([2.5]),
    ],
    ids=lambda number: f"{number.dtype} {tuple(number.shape)}",
)
def test_a_number_of_any_kind_arrives_as_it_is(number: torch.Tensor) -> None:
    gpu = FakeGpu()
    promise = gpu.read_later(number)
    gpu.run()
    assert repr(promise.value()) == repr(number.item()) == repr(CpuDevice().read_later(number))


def test_copies_are_waited_for_on_the_gpu_that_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def record(self, stream: str) -> None:
            self.stream = stream

    class OnOther(torch.Tensor):
        is_cuda = True
        device = torch.device("cuda", 1)

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device=None: f"the stream of {device}")
    assert copied(torch.ones(1).as_subclass(OnOther)).stream == "the stream of cuda:1"  # type: ignore[attr-defined]
    assert copied(torch.ones(1)).stream == "the stream of None"  # type: ignore[attr-defined]


def test_publishing_from_a_gpu_never_waits_and_keeps_what_each_event_held() -> None:
    gpu = FakeGpu()
    model = GoldMLP()
    optimizer = gold_optimizer(model)
    state = State(model=model, device=gpu, seed=1, run_name="r", optimizers=[optimizer])
    state.train_metrics = {"mean": MeanMetric()}
    stream = FakeStream()
    publisher = StatePublisher(state, AlgorithmLogger(state), stream)
    for batch in range(3):
        state.batch_loss = torch.tensor(float(batch))
        state.train_metrics["mean"].reset()
        state.train_metrics["mean"].update(10.0 * batch)
        optimizer.param_groups[0]["lr"] = 0.5**batch
        publisher.publish(Event.BATCH_END)
    assert gpu.waits == 0
    gpu.run()
    sent = [fields for _, fields, _ in stream.sent]
    assert [fields["loss"].value() for fields in sent] == [0.0, 1.0, 2.0]
    assert [fields["train_metrics"].value() for fields in sent] == [{"mean": 0.0}, {"mean": 10.0}, {"mean": 20.0}]
    assert [fields["lr"] for fields in sent] == [{"SGD": [1.0]}, {"SGD": [0.5]}, {"SGD": [0.25]}]
    assert gpu.waits == 0


def test_a_loss_that_is_the_same_tensor_every_time_is_read_in_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, numbers = torch.zeros(()), itertools.count(1.0)
    monkeypatch.setattr(TrainStep, "_compute_gradients", lambda self: memory.fill_(next(numbers)))
    gpu, stream = FakeGpu(), Stream()
    train(monkeypatch, stream, 3, model=Classifier(GoldMLP().net), device=gpu)
    gpu.run()
    assert [fields["loss"].value() for event, _, fields in stream.sent if event is Event.BATCH_END] == [1.0, 2.0, 3.0]


def test_progress_shows_the_last_loss_that_arrived() -> None:
    class Lines:
        written: list[str] = []  # noqa: RUF012

        def write(self, text: str) -> None:
            self.written.append(text)

        def flush(self) -> None:
            """Nothing is kept back."""

        def isatty(self) -> bool:
            return False

    gpu = FakeGpu()
    state = State(model=GoldMLP(), device=gpu, seed=1, run_name="r")
    progress = ProgressDisplay(state, lambda: 0, Lines())  # type: ignore[arg-type]
    for loss in (1.0, 2.0, 3.0):
        state.batch_loss = torch.tensor(loss)
        progress.draw()
        gpu.run()
    assert ["loss" in line for line in Lines.written] == [False, True, True]
    assert "loss 1" in Lines.written[1]
    assert "loss 2" in Lines.written[2]
    assert gpu.waits == 0


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert get_device("auto").name == "cpu"
    for name in ("gpu", "tpu"):
        with pytest.raises(ConfigurationError):
            get_device(name)
