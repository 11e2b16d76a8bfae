"""Batches, outputs, weights: what is sent of them, and what when there is no memory for it."""

import math
import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_trees import exactly
from gold import GoldMLP, gold_data
from helpers import wait_for
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from tensor_stream import TensorStream, Wide
from training import fitted, gold_trainer

from offloop.bus.checkpoints.image import write_draft
from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.tensors import segments
from offloop.bus.tensors.segments import SegmentPool
from offloop.bus.tensors.view import open_tensors
from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger
from offloop.trainer import Algorithm, AlgorithmLogger
from offloop.trainer.checkpoints.file import read_checkpoint, write_checkpoint
from offloop.trainer.engine.state import State
from offloop.trainer.fields.tensors import TENSOR_FIELDS, TensorPayload
from offloop.trainer.stream.run_stream import TrainingStream
from offloop.trainer.stream.tensor_sharing import TensorSharing

LARGE = 400_000


class Taker(Callback):
    """Takes tensors at an event, every so often, and keeps copies."""

    def __init__(self, event: Event, *names: str, every: int | str = 1) -> None:
        self._event = event
        self._names = names
        self._every = every
        self.taken: list[tuple[int, dict[str, Any]]] = []

    def demand(self) -> Demand:
        return Demand({self._event: EventDemand(self._every, dict.fromkeys(self._names, self._every))})

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        copies = {
            name: {key: torch.from_numpy(view.numpy().copy()) for key, view in getattr(state, name).items()}
            for name in self._names
            if name in state.on_demand
        }
        self.taken.append((state.timestamp.values[2], copies))


def train(monkeypatch: pytest.MonkeyPatch, *callbacks: Callback, **arguments: Any) -> TensorStream:
    stream = TensorStream(*callbacks)
    monkeypatch.setattr(TrainingStream, "_start_publisher", lambda *_: stream)
    fitted(publish=True, run_name="r", **arguments)
    return stream


def test_batch_and_outputs_are_those_that_the_model_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    taker = Taker(Event.BEFORE_BACKWARD, "inputs", "targets", "outputs", every="3ba")
    train(monkeypatch, taker, device_train_microbatch_size=2)
    inputs, targets = gold_data("train", 24)
    assert [batch for batch, _ in taker.taken] == [0, 3, 6]
    for batch, taken in taker.taken:
        rows = slice(batch * 6 % 24, batch * 6 % 24 + 2)
        assert torch.equal(taken["inputs"]["0"], inputs[rows])
        assert torch.equal(taken["targets"]["1"], targets[rows])
        assert taken["outputs"]["outputs"].shape == (2, 4)
    assert torch.equal(taker.taken[0][1]["outputs"]["outputs"], GoldMLP().net(inputs[:2]).detach())


def test_observing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with gold_trainer(model=Wide()) as alone:
        alone.fit()
    everything = [Taker(event, *TENSOR_FIELDS) for event in (Event.BATCH_END, Event.EPOCH_CHECKPOINT, Event.FIT_END)]
    stream = TensorStream(*everything)
    monkeypatch.setattr(TrainingStream, "_start_publisher", lambda *_: stream)
    with gold_trainer(model=Wide(), publish=True) as watched:
        watched.fit()
    assert sum(len(taken) for taker in everything for _, taken in taker.taken) > 30
    for name, value in alone.state.model.state_dict().items():
        assert torch.equal(value, watched.state.model.state_dict()[name])


@pytest.mark.parametrize(
    ("batch", "inputs", "targets"),
    [
        ([torch.ones(1), torch.zeros(1), torch.full((1,), 2.0)], {"0": 1.0, "2": 2.0}, {"1": 0.0}),
        ({"a": {"b": torch.ones(1)}, "n": 3, "Labels": torch.zeros(1)}, {"a.b": 1.0}, {"Labels": 0.0}),
        (torch.ones(1), {"inputs": 1.0}, None),
        ((1, 2), None, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_parts_are_named_by_their_paths(
    batch: Any, inputs: Mapping[str, float] | None, targets: Mapping[str, float] | None
) -> None:
    state = State.__new__(State)
    state.batch = batch
    for name, expected in (("inputs", inputs), ("targets", targets)):
        if expected is None:
            with pytest.raises(ConfigurationError):
                TENSOR_FIELDS[name].compute(state)
        else:
            out = TENSOR_FIELDS[name].compute(state)
            assert {key: value.item() for key, value in out.tensors.items()} == expected


# -- where there is no memory -----------------------------------------------------------------------------------------


class Batches(torch.utils.data.Dataset[Any]):
    """Two samples too large for an event."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.full((LARGE,), float(index)), index % 4


class Narrow(GoldMLP):
    def forward(self, batch: Any) -> torch.Tensor:
        outputs: torch.Tensor = self.net(batch[0][:, :8])
        return outputs


def test_skipped_tensors_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    taker = Taker(Event.BATCH_START, "inputs")
    monkeypatch.setattr(TensorStream, "is_handled", lambda *_: False)
    monkeypatch.setattr(TensorSharing, "drain", lambda *_: None)
    data = torch.utils.data.DataLoader(Batches(), batch_size=1)
    stream = train(monkeypatch, taker, model=Narrow(), train_dataloader=data, max_duration="8ba")
    # Four segments, which nobody says to have handled.
    assert [batch for batch, taken in taker.taken if taken] == [0, 1, 2, 3]
    told = [
        fields["not_sent"] for event, _, fields in stream.sent if event is Event.BATCH_START and "not_sent" in fields
    ]
    assert [text[text.index("here") :] for text in told] == [f"here, {count} times so far" for count in range(1, 5)]


def test_the_end_of_the_training_waits_until_what_was_lent_is_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(TensorStream):
        def wait(self) -> None:
            self.waits += 1
            self.is_all_handled = self.waits == 3

    stream = Slow(Taker(Event.FIT_END, "weights"))
    stream.is_all_handled = False
    monkeypatch.setattr(TrainingStream, "_start_publisher", lambda *_: stream)
    with gold_trainer(model=Wide(), publish=True) as trainer:
        trainer.fit()
        assert stream.waits == 0
    assert stream.waits == 3


class Allocated(Algorithm):
    """Waits in a batch until the memory is there that is being allocated."""

    def __init__(self, batch: int, there: threading.Event | None = None) -> None:
        self.batch, self.there = batch, there

    def match(self, event: Event, state: State) -> bool:
        return event is Event.BATCH_START and state.timestamp.values.batch == self.batch

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        sharing = self.trainer._stream.sharing
        if self.there is not None:
            assert sharing.is_allocating
            self.there.set()
        wait_for(lambda: not sharing.is_allocating, "the memory")

    def train(self, **arguments: Any) -> None:
        with gold_trainer(publish=True, run_name="r", algorithms=[self], **arguments) as self.trainer:
            self.trainer.fit()

    trainer: Any


@pytest.mark.parametrize("every", ["6ba", "2ep"])
def test_memory_for_large_tensors_is_prepared_before_they_are_due(monkeypatch: pytest.MonkeyPatch, every: str) -> None:
    monkeypatch.setattr(segments, "DEFER_BYTES", 0)
    taker = Taker(Event.EPOCH_CHECKPOINT if every == "2ep" else Event.BATCH_CHECKPOINT, "checkpoint", every=every)
    stream = TensorStream(taker)
    monkeypatch.setattr(TrainingStream, "_start_publisher", lambda *_: stream)
    model = Wide()
    # Adam's moments are counted in.
    Allocated(5).train(model=model, optimizers=torch.optim.Adam(model.parameters()))
    assert [batch for batch, tensors in taker.taken if tensors] == [8 if every == "2ep" else 6]
    assert not any("not_sent" in fields for _, _, fields in stream.sent)


def test_the_training_continues_while_memory_is_allocated_and_the_tensors_come_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there, create = threading.Event(), segments.create_memory

    def create_slowly(size: int, token: bytes) -> tuple[int, int]:
        assert there.wait(30)
        return create(size, token)

    monkeypatch.setattr(segments, "create_memory", create_slowly)
    monkeypatch.setattr(segments, "DEFER_BYTES", 0)
    taker = Taker(Event.BATCH_CHECKPOINT, "weights", every="3ba")
    stream = TensorStream(taker)
    monkeypatch.setattr(TrainingStream, "_start_publisher", lambda *_: stream)
    Allocated(5, there).train(model=Wide())
    # Once at batch 3, and not again until there is memory.
    assert [(batch, bool(tensors)) for batch, tensors in taker.taken] == [(3, False), (6, True)]
    told = [fields["not_sent"] for _, _, fields in stream.sent if "not_sent" in fields]
    assert [text[text.index("their") :] for text in told] == [
        "their shared memory is still being allocated: it comes with the next event for which it is requested"
    ]


# -- a GPU ------------------------------------------------------------------------------------------------------------


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


class Copies:
    """Stands for the copies that a GPU has been given."""

    done = False
    waits = 0

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waits += 1


def test_tensors_on_two_gpus_are_ready_when_both_have_copied_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnOther(OnGpu):
        device = torch.device("cuda", 1)

    copies = {torch.device("cpu"): Copies(), OnOther.device: Copies()}
    monkeypatch.setattr("offloop.trainer.stream.tensor_sharing.copied", lambda tensor: copies[tensor.device])
    sharing = TensorSharing(SegmentPool(is_handled=lambda seq, field: True), TensorStream())
    large = torch.arange(LARGE, dtype=torch.float32)
    tensors = {"a": large.as_subclass(OnGpu), "b": torch.ones(3).as_subclass(OnOther), "c": torch.ones(3)}
    monkeypatch.setattr("torch.empty", lambda *shape, pin_memory, **more: torch.zeros(*shape, **more))
    later: Any = sharing.share("weights", TensorPayload(tensors))
    for one in copies.values():
        assert not later.ready()
        one.done = True
    assert later.ready()
    with open_tensors(later.value()) as opened:
        assert opened["a"].numpy()[-1] == LARGE - 1
    assert [one.waits for one in copies.values()] == [0, 0]
    sharing.close()


def test_memory_is_used_again_only_when_copies_that_were_begun_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(OnGpu):
        """What a GPU without memory for a contiguous copy does."""

        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch._foreach_copy_:
                assert pool.unhandled == 0
                raise torch.OutOfMemoryError("out of memory")
            return super().__torch_function__(function, types, args, kwargs)

    copies, pool = Copies(), SegmentPool(1)
    monkeypatch.setattr("offloop.trainer.stream.tensor_sharing.copied", lambda tensor: copies)
    sharing = TensorSharing(pool, TensorStream())
    with pytest.raises(torch.OutOfMemoryError):
        sharing.share("weights", TensorPayload({"w": torch.zeros(LARGE).as_subclass(Broken)}))
    assert copies.waits == 1
    assert pool.reserve(1, "weights") is not None
    sharing.close()


# -- tensors that become others from one time to the next --------------------------------------------------------------

SHAPES = st.sampled_from([(), (0,), (3,), (2, 5), (4, 0, 2), (LARGE,), (2, LARGE)])
KINDS = st.sampled_from(
    [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]
)


@st.composite
def tensor_maps(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Tensors under few names: any of them may have become another one, or be gone."""
    found: dict[str, torch.Tensor] = {}
    for name in draw(st.lists(st.sampled_from("abc"), unique=True, min_size=1)):
        shape, dtype, start = draw(SHAPES), draw(KINDS), draw(st.integers(0, 99))
        tensor = (torch.arange(math.prod(shape)) % 251 + start).to(dtype).reshape(shape)
        if len(shape) == 2 and draw(st.booleans()):
            tensor = tensor.T
        found[name] = tensor.conj() if dtype.is_complex and draw(st.booleans()) else tensor
    return found


@given(st.lists(st.tuples(tensor_maps(), st.text(max_size=3), st.booleans()), min_size=2, max_size=5))
@settings(max_examples=25, deadline=None)
def test_every_image_has_the_tensors_at_its_moment(
    moments: list[tuple[dict[str, torch.Tensor], str, bool]],
) -> None:
    sharing = TensorSharing(SegmentPool(slots=2, is_handled=lambda seq, field: True), TensorStream())
    for tensors, text, is_again in moments:
        for _ in range(2 if is_again else 1):
            value: Any = sharing.share("own", TensorPayload(tensors, {"text": text * 2000}))
            with open_tensors(value) as opened:
                image = bytes(opened.image)  # a file of safetensors
                assert opened.metadata == {"text": text * 2000}
            loaded = load(image)
            assert loaded.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert loaded[name].dtype == tensor.dtype
                assert torch.equal(loaded[name], tensor)
            tensors = {name: tensor + 1 if tensor.dtype != torch.bool else ~tensor for name, tensor in tensors.items()}
    sharing.close()


class Changing(torch.nn.Module):
    """A model that is another one at each checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50_000, 8, sparse=True)
        self.first = torch.nn.Linear(8, 8)
        self.last = torch.nn.Linear(8, 8)
        self.none = torch.nn.Parameter(torch.empty(0, 3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(self.table(rows).to(self.first.weight.dtype))).float().square().mean()


def test_a_checkpoint_equals_that_of_torch_whatever_changes_in_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Changing()
    dense = torch.optim.Adam([*model.first.parameters(), model.none], lr=0.1)
    sparse = torch.optim.SparseAdam(model.table.parameters(), lr=0.1)
    noise = random.Random(0)

    def tree() -> dict[str, Any]:
        return {
            "model": model.state_dict(),
            "optimizers": {"Adam": dense.state_dict(), "SparseAdam": sparse.state_dict()},
            "random": noise.getstate()[1][: noise.randrange(600)],
            "bytes": noise.randbytes(noise.randrange(9000)),
        }

    def step() -> None:
        dense.zero_grad()
        sparse.zero_grad()
        model(torch.tensor([1, 5, 7])).backward()
        dense.step()
        sparse.step()

    changes: list[Callable[[], object]] = [
        lambda: None,
        step,  # the optimizers have a state from here on
        step,
        lambda: model.first.requires_grad_(False),
        lambda: dense.add_param_group({"params": list(model.last.parameters()), "lr": 0.01}),
        step,
        lambda: setattr(model.last, "weight", model.first.weight),  # tied
        lambda: setattr(model.first.weight, "data", model.first.weight.data.T),  # not contiguous
        lambda: model.register_buffer("seen", torch.zeros(3, dtype=torch.bool)),
        lambda: delattr(model, "none"),
        lambda: model.first.to(torch.bfloat16),
        lambda: model.last.to(torch.bfloat16),
    ]
    state = State.__new__(State)
    state.world_size, state.timestamp, now = 1, Timestamp(), {}
    state.gather_checkpoint = lambda: now
    sharing = TensorSharing(SegmentPool(is_handled=lambda seq, field: True), TensorStream())
    for number, change in enumerate(changes):
        change()
        now = tree()
        torch.save(now, tmp_path / "torch.pt")
        value: Any = sharing.share("checkpoint", TENSOR_FIELDS["checkpoint"].compute(state))
        if number in (2, 5):
            step()  # what comes later is not in it
        with open_tensors(value) as draft:
            write_draft(tmp_path / "drafted", draft, None)
        saved, expected = read_checkpoint(tmp_path / "drafted"), torch.load(tmp_path / "torch.pt")
        del saved["timestamp"]
        assert exactly(saved) == exactly(expected), f"checkpoint {number}"
        if number not in (2, 5):
            write_checkpoint(tmp_path / "written", {**now, "timestamp": list(state.timestamp.values)})
            assert (tmp_path / "written").read_bytes() == (tmp_path / "drafted").read_bytes()
    sharing.close()
