"""Work of a GPU, on one with ``make gpu``.

In other runs it is done on the host as far as it can be, so that the tests are known to be right.
"""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpus import BATCHES, SIZE, make_loader, make_network, make_trainer, no_waits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from training import Act

import offloop
from offloop.attached.samples import BatchSamples
from offloop.bus import Publisher, Subscriber
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.recording import Recording
from offloop.bus.runs.directory import find_run
from offloop.bus.tensors.segments import SegmentPool
from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.bus.types.health import HEALTH, Health
from offloop.consumers import Callback
from offloop.consumers.callbacks.checkpoint_saver import CheckpointSaver
from offloop.trainer import Classifier, State
from offloop.trainer.checkpoints.file import read_checkpoint
from offloop.trainer.device.device import get_device
from offloop.trainer.distributed.ranks import Ranks, make_equal
from offloop.trainer.fields.registry import BUILT_IN
from offloop.trainer.stream.description import describe_system
from offloop.trainer.stream.tensor_sharing import pin

CPU, GPU = "cpu", pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(params=[CPU, GPU])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def ends(run: str = "r") -> list[Snapshot]:
    """Return the ends of a run's batches, as they were recorded."""
    recording = Recording(find_run(run).path)
    found = list(recording.snapshots([Event.BATCH_END]))
    assert not recording.gaps
    return found


def everything() -> Callback:
    """Request every field of each batch but checkpoints."""

    class Everything(Callback):
        """Within a function: the process of callbacks cannot import this module."""

        barrier_events = frozenset({Event.EPOCH_END})
        fields = dict.fromkeys(BUILT_IN.keys() - {"checkpoint", "weights_checkpoint"}, 1) | {"weights": 2 * BATCHES}

        def demand(self) -> Demand:
            return Demand({Event.EPOCH_END: EventDemand(), Event.BATCH_END: EventDemand(1, self.fields)})

        def epoch_end(self, state: Snapshot, logger: object) -> None:
            """Let the second epoch begin when this process is there."""

        def batch_end(self, state: Snapshot, logger: object) -> None:
            """Has what it requests in the recording, which the test reads."""

    return Everything()


class Seen:
    """Notes what a training has in each batch, on its device."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        """What has waited so far."""
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.weights: list[dict[str, Tensor]] = []
        self.waits: list[int] = []
        self.algorithms = [
            Act(self._before_step, Event.AFTER_TRAIN_BATCH),
            Act(self._after_batch, Event.BATCH_CHECKPOINT),
        ]

    def _before_step(self, event: Event, state: State, logger: object) -> None:
        assert state.batch_loss is not None
        self.losses.append(state.batch_loss.detach().clone())
        gradients = [one.grad for one in state.model.parameters() if one.grad is not None]
        self.norms.append(torch.nn.utils.get_total_norm(gradients))

    def _after_batch(self, event: Event, state: State, logger: object) -> None:
        self.weights.append({name: value.clone() for name, value in state.model.state_dict().items()})
        self.waits.append(len(self.waiting))


def numbers(tensors: list[Tensor]) -> list[float]:
    return [float(one) for one in tensors]


# -- numbers ----------------------------------------------------------------------------------------------------------

KINDS = {
    torch.float32: lambda index: index + 0.1,
    torch.bfloat16: lambda index: index + 0.1,
    torch.float16: lambda index: index + 0.1,
    torch.float64: lambda index: index + 0.1,
    torch.int64: lambda index: 2**40 + index,
    torch.bool: lambda index: index % 2 == 0,
}


def value_of(read: Any) -> Any:
    return read.value() if hasattr(read, "value") else read


def test_numbers_of_every_kind_arrive_in_order_although_the_gpu_lags(device: str) -> None:
    place = get_device(device)
    # More than the slots of a ring.
    on_host = [torch.tensor(make(index), dtype=dtype) for index in range(100) for dtype, make in KINDS.items()]
    there = [one.to(place.torch_device) for one in on_host]
    vectors = [torch.stack(there[index :: len(KINDS)]) for index in (0, 3)]
    with no_waits(device) as waits:
        if device == "gpu":
            torch.cuda._sleep(1_000_000_000)
        read = [place.read_later(one) for one in there]
        several = [place.read_many_later(one) for one in vectors]
        is_late = device == "gpu" and not read[-1].ready()  # type: ignore[union-attr]
    assert waits == []
    assert is_late == (device == "gpu")
    assert [value_of(one) for one in read] == [one.item() for one in on_host]
    assert [value_of(one) for one in several] == [
        torch.stack(on_host[index :: len(KINDS)]).tolist() for index in (0, 3)
    ]


def test_a_number_is_what_it_was_when_it_was_read(device: str) -> None:
    place = get_device(device)
    number = torch.zeros((), device=place.torch_device)
    read = []
    with no_waits(device):
        for _ in range(300):
            read.append(place.read_later(number))
            number += 1
    assert [value_of(one) for one in read] == list(range(300))


@pytest.mark.gpu
def test_numbers_from_another_stream_are_those_of_that_stream() -> None:
    place, side = get_device("gpu"), torch.cuda.Stream()
    number = torch.zeros((), device=place.torch_device)
    side.wait_stream(torch.cuda.current_stream())
    with no_waits("gpu"), torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        number += 5
        read: Any = place.read_later(number)
    assert not read.ready()
    assert read.value() == 5


def test_samples_of_batches_are_read_without_a_wait(device: str) -> None:
    place = get_device(device)
    ids = torch.arange(60, device=place.torch_device).reshape(10, 6)
    batches = [
        {"input_ids": ids, "attention_mask": (ids % 6 < 5).long(), "labels": ids.where(ids % 6 > 2, -100)},
        {"input_ids": ids, "completion_mask": (ids % 6 > 3).long()},
    ]
    samples = BatchSamples(lambda row: " ".join(map(str, row)), place, ("chosen", "rejected"))
    with no_waits(device) as waits:
        if device == "gpu":
            torch.cuda._sleep(1_000_000_000)
        for step, batch in enumerate(batches):
            samples.take(batch, step)
        early = [step for step, _ in samples.arrived()] if device == "gpu" else []
    assert waits == early == []
    first, second = (rows() for _, rows in samples.arrived(wait=True))
    assert [row["text"] for row in first] == ["0 1 2 3 4", "6 7 8 9 10", "30 31 32 33 34", "36 37 38 39 40"]
    assert [row["kind"] for row in first] == ["chosen", "chosen", "rejected", "rejected"]
    assert (first[0]["loss_text"], second[3]["loss_text"]) == ("3 4 5", "40 41")


# -- whole steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        (CPU, "amp_fp16"),
        *(pytest.param("gpu", one, marks=pytest.mark.gpu) for one in ("fp32", "amp_bf16", "amp_fp16")),
    ],
)
def test_steps_with_all_fields_and_checkpoints_never_wait_and_publish_what_was_computed(
    device: str, precision: str, runs_dir: Path, tmp_path: Path
) -> None:
    saver = CheckpointSaver(str(tmp_path), "ba{batch}", None, None, None, f"{3 * BATCHES // 2}ba")
    seen = Seen()
    with make_trainer(
        device,
        precision=precision,
        device_train_microbatch_size=SIZE // 2,
        algorithms=seen.algorithms,
        callbacks=[everything(), saver],
        max_duration="2ep",
        wait_for="callbacks",
    ) as trainer:
        with no_waits(device) as seen.waiting:
            trainer.fit()
        facts = describe_system(trainer.state)
    # Between the epochs the process of callbacks is waited for, and what it has to get first.
    assert (set(seen.waits[:BATCHES]), len(set(seen.waits[BATCHES:]))) == ({0}, 1)
    found = ends()
    assert [one.loss for one in found] == pytest.approx(numbers(seen.losses), rel=1e-6)
    assert [one.gradient_norm for one in found] == pytest.approx(numbers(seen.norms), rel=1e-3, nan_ok=True)
    for index, one in enumerate(found):
        unsupported = {"memory_stats", "gpu_utilization"} if device == "cpu" else set()
        expected = BUILT_IN.keys() - {"checkpoint", "weights_checkpoint", "weights"} - unsupported
        assert expected <= set(one.on_demand), one.not_sent
        assert 0 <= one.train_metrics["accuracy"] <= 1
        assert one.phases["device"] is (device == "gpu")
        spans = one.phases["spans"]
        assert [name for name, *_ in spans[:4]] == ["data", "forward", "loss", "backward"]
        assert min(duration for *_, duration in spans) >= 0
        weights = seen.weights[index]
        norms = {name: float(weights[name].norm()) for name in one.parameter_norms}
        assert one.parameter_norms == pytest.approx(norms, rel=1e-3)
        if device == "gpu":
            assert one.memory_stats["allocated_bytes.all.current"] > 0
            assert 0 <= one.gpu_utilization <= 100
    saved = sorted(tmp_path.iterdir(), key=lambda path: int(path.name.removeprefix("ba")))
    assert [path.name for path in saved] == ["ba18", "ba24"]
    for path in saved:
        tree = read_checkpoint(path)
        weights = seen.weights[tree["timestamp"][2] - 1]
        assert all(torch.equal(value, weights[name].cpu()) for name, value in tree["model"].items())
    assert (facts["accelerators"], "cuda" in facts) == ((1, True) if device == "gpu" else (0, False))


@pytest.mark.gpu
def test_the_health_of_the_gpu_is_measured_and_its_rank_known(runs_dir: Path) -> None:
    torch.ones(1, device="cuda")
    with Publisher("r", runs_dir=runs_dir), Subscriber("r", runs_dir=runs_dir, events=[HEALTH]) as subscriber:
        health = Health.of(next(iter(subscriber)).fields)
    assert health is not None
    assert [0] in [gpu.ranks for gpu in health.gpus]
    assert health.gpus[0].values.keys() >= {"utilization_percent", "memory_used_bytes", "clock_hertz", "throttled"}


@pytest.mark.gpu
def test_a_training_within_another_stream_publishes_what_it_computed(runs_dir: Path) -> None:
    seen, side = Seen(), torch.cuda.Stream()
    with make_trainer("gpu", algorithms=seen.algorithms) as trainer:
        side.wait_stream(torch.cuda.current_stream())
        with no_waits("gpu"), torch.cuda.stream(side):
            trainer.fit()
    assert [one.loss for one in ends()] == numbers(seen.losses)


class Whole(nn.Module):
    """Computes its loss within the forward pass: compiled with CUDA graphs, it lies in the same memory every time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_network(dropout=0.0)

    def forward(self, batch: Any) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs


COMPILED: list[Any] = [
    (CPU, {"backend": "eager"}),
    pytest.param("gpu", {}, marks=pytest.mark.gpu),
    pytest.param("gpu", {"mode": "reduce-overhead"}, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("device", "config"), COMPILED, ids=str)
def test_a_compiled_model_publishes_the_losses_of_one_that_is_not(
    device: str, config: dict[str, Any], runs_dir: Path
) -> None:
    for name, compiled in (("plain", None), ("compiled", config)):
        for microbatch in (None, SIZE // 4):
            run = f"{name}{microbatch}"
            settings: dict[str, Any] = {"device_train_microbatch_size": microbatch, "compile_config": compiled}
            with make_trainer(device, Whole(), run_name=run, **settings) as trainer:
                trainer.fit()
                # Compiling may wait; what is compiled does not.
                with no_waits(device):
                    trainer.fit(duration="1ep")
    for microbatch in (None, SIZE // 4):
        plain, found = ([one.loss for one in ends(f"{name}{microbatch}")] for name in ("plain", "compiled"))
        assert len(found) == 2 * BATCHES
        assert found == pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize(("device", "config"), COMPILED, ids=str)
def test_a_watched_loop_with_a_compiled_model_publishes_each_loss(
    device: str, config: dict[str, Any], runs_dir: Path
) -> None:
    place = get_device(device)
    model = torch.compile(Whole().to(place.torch_device), **config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        # Of its own: those that CUDA graphs return are overwritten by the next batch (torch's issue 169545).
        parameter.grad = torch.zeros_like(parameter)
    run = offloop.watch(model, optimizer, gradient_accumulation_steps=2, run_name="r")
    losses = []
    for index, batch in enumerate(run.batches(make_loader(device))):
        loss = model(place.batch_to_device(batch))
        losses.append(loss.detach().clone())
        loss.backward()
        run.log(loss=loss, doubled=loss.detach().double() * 2)
        if index % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    run.close()
    expected = [(one + other) / 2 for one, other in zip(*[iter(numbers(losses))] * 2, strict=True)]
    assert [one.loss for one in ends()] == pytest.approx(expected, rel=1e-5)


@pytest.mark.gpu
def test_a_loop_that_replays_a_cuda_graph_publishes_each_loss(runs_dir: Path) -> None:
    model, loader = make_network(dropout=0.0).cuda(), make_loader("gpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows, classes = (one.cuda() for one in next(iter(loader)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad()
            cross_entropy(model(rows), classes).backward()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = cross_entropy(model(rows), classes)
        loss.backward()
    run = offloop.watch(model, optimizer, run_name="r")
    losses = []
    with no_waits("gpu"):
        for batch in run.batches(loader):
            rows.copy_(batch[0], non_blocking=True)
            classes.copy_(batch[1], non_blocking=True)
            graph.replay()
            losses.append(loss.detach().clone())
            optimizer.step()
            run.log(loss=loss)
    run.close()
    assert [one.loss for one in ends()] == numbers(losses)
    assert len(set(numbers(losses))) == BATCHES


def test_a_watched_loop_never_waits(device: str, runs_dir: Path) -> None:
    place = get_device(device)
    model = make_network().to(place.torch_device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    run = offloop.watch(model, optimizer, run_name="r", record="all")
    losses = []
    with no_waits(device) as waits:
        for batch in run.batches(make_loader(device)):
            rows, classes = place.batch_to_device(batch)
            loss = cross_entropy(model(rows), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss, right=(loss > 0).sum())
            losses.append(loss.detach().clone())
        assert waits == []
    run.close()
    found = ends()
    assert [one.loss for one in found] == numbers(losses)
    assert [values["right"] for one in found for _, values in one.logged] == [1] * BATCHES


# -- resuming, memory -------------------------------------------------------------------------------------------------


def test_a_resumed_training_draws_the_same_random_numbers(device: str, tmp_path: Path) -> None:
    def train(**arguments: Any) -> dict[str, Tensor]:
        with make_trainer(device, precision="amp_fp16", publish=False, **arguments) as trainer:
            trainer.fit()
            return {name: value.cpu() for name, value in trainer.state.model.state_dict().items()}

    whole = train(save_folder=tmp_path, save_interval="5ba")
    [middle] = tmp_path.glob("*ba5-*")
    resumed = train(load_path=middle)
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value)
    random = read_checkpoint(middle)["dataloader"][0]["random"]
    assert (random["cuda"] is not None) == (device == "gpu" or torch.cuda.is_initialized())


def test_microbatches_become_smaller_when_the_memory_of_the_device_is_full(
    device: str, runs_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Large(Classifier):
        def forward(self, batch: Any) -> Any:
            if len(batch[0]) > 2:
                torch.empty(1 << 50, dtype=torch.uint8, device=batch[0].device)
            return super().forward(batch)

    with make_trainer(device, Large(make_network()), device_train_microbatch_size="auto") as trainer:
        trainer.fit()
    assert trainer.state.device_train_microbatch_size == 2
    assert "out of memory in batch 0: microbatches of 2 samples from now on" in capfd.readouterr().err
    assert len(ends()) == BATCHES


@pytest.mark.gpu
def test_shared_memory_is_pinned_and_a_refusal_is_not_left_to_the_next_kernel() -> None:
    place = torch.device("cuda", torch.cuda.current_device())
    pool = SegmentPool(1, pin=lambda memory: pin(place, memory))
    pool.prepare(32 << 20)
    segment = pool.reserve(32 << 20, "weights")
    assert segment is not None
    memory = torch.frombuffer(segment.buffer, dtype=torch.uint8)
    assert memory.is_pinned()
    with pytest.raises(OSError, match=r"CUDA cannot pin 33554432 bytes of shared memory: error \d+"):
        pin(place, segment.buffer)
    source = torch.ones(32 << 20, dtype=torch.uint8, device=place)
    with no_waits("gpu"):
        torch.cuda._sleep(100_000_000)
        memory.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        # The host went on while the GPU was at work.
        assert not event.query()
    event.synchronize()
    assert int(memory.sum()) == 32 << 20
    segment.release()
    pool.close()
    assert not memory.is_pinned()


# -- ranks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def group(device: str) -> Any:
    """Return a process group of one rank: NCCL for what is on a GPU."""
    backend = "cpu:gloo,cuda:nccl" if device == "gpu" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_one_rank_of_a_group_agrees_with_itself(device: str) -> None:
    place, ranks = get_device(device), Ranks(owns_group=False)
    model = make_network().to(place.torch_device)
    tensor = torch.arange(3.0, device=place.torch_device)
    # NCCL makes its connections with the first tensor.
    make_equal(model.parameters())
    with no_waits(device):
        make_equal(model.parameters())
        added = ranks.add(tensor)
        assert ranks.sum(1, 2) == [1, 2]
        assert ranks.agree(5, True) == (5, True, False)
    assert added.tolist() == [0.0, 1.0, 2.0]
    assert (ranks.share({"a": 1}), ranks.collect(b"x")) == ({"a": 1}, [b"x"])
    ranks.disconnect()


@pytest.mark.usefixtures("group")
def test_a_watched_loop_with_a_data_parallel_model_never_waits(device: str, runs_dir: Path) -> None:
    place = get_device(device)
    model = DistributedDataParallel(make_network().to(place.torch_device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = offloop.watch(model, optimizer, run_name="r")
    losses = []
    with contextlib.ExitStack() as stack:
        for index, batch in enumerate(run.batches(make_loader(device))):
            if index == 3:
                # Torch settles in the first batches how it joins gradients.
                stack.enter_context(no_waits(device))
            rows, classes = place.batch_to_device(batch)
            loss = cross_entropy(model(rows), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            losses.append(loss.detach().clone())
    run.close()
    assert [one.loss for one in ends()] == numbers(losses)
