"""The fields that every training has: their values, their cost, and that nobody waits for them."""

import copy
import logging
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, reads
from field_stream import Stream, asking, train
from gold import GoldMLP, gold_loader
from torch import Tensor, nn
from training import Act

from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.trainer import State
from offloop.trainer.algorithms import GradientClipping
from offloop.trainer.device.device import CpuDevice
from offloop.trainer.fields.model import ACTIVATION_FIELDS, MAX_MODULES
from offloop.trainer.fields.norms import NORM_FIELDS, l2_norms
from offloop.trainer.fields.registry import BUILT_IN, FieldsOnDemand
from offloop.trainer.fields.tensors import TENSOR_FIELDS

BATCH_END, AFTER_TRAIN_BATCH = Event.BATCH_END, Event.AFTER_TRAIN_BATCH
NAMES = ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
NUMBERS = [name for name in BUILT_IN if name not in TENSOR_FIELDS]


def norms_by_hand(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(one.detach().double().norm()) for name, one in tensors.items()}


def values_of(stream: Stream, field: str, event: Event = BATCH_END) -> list[Any]:
    return [fields[field] for one, _, fields in stream.sent if one is event and field in fields]


def state_of(model: nn.Module, **arguments: Any) -> State:
    return State(model=model, seed=1, run_name="r", **({"device": CpuDevice()} | arguments))


# -- norms ------------------------------------------------------------------------------------------------------------


def test_norms_of_tensors_of_every_kind_are_taken_together() -> None:
    sparse = torch.sparse_coo_tensor([[0, 0, 3]], [1.0, 2.0, 4.0], (9,), check_invariants=True)
    tensors = {
        "float": torch.tensor([3.0, 4.0]),
        "double": torch.tensor([1e200, 0.0], dtype=torch.float64),
        "half": torch.full((4,), 60000.0, dtype=torch.float16),
        "brain": torch.full((3, 3), 1.001, dtype=torch.bfloat16),
        "complex": torch.tensor([3 + 4j]),
        "whole": torch.tensor([6, 8]),
        "empty": torch.zeros(0),
        "scalar": torch.tensor(-2.0),
        "strided": torch.arange(12.0).reshape(3, 4).t()[1:],
        "sparse": sparse,
        "nan": torch.tensor([float("nan"), 1.0]),
        "inf": torch.tensor([float("inf"), 1.0]),
    }
    found = dict(zip(tensors, [float(one) for one in l2_norms(tensors.values())], strict=True))
    expected = {
        name: float(one.to_dense().to(torch.complex128 if one.is_complex() else torch.float64).norm())
        for name, one in tensors.items()
    }
    assert found == pytest.approx(expected, nan_ok=True)
    assert found["sparse"] == 5.0
    assert l2_norms([]) == []


class NotingSGD(torch.optim.SGD):
    """Notes gradients before each step, and what the step added to each parameter."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model.parameters(), **options)
        self._model = model
        self.gradients: list[dict[str, float]] = []
        self.updates: list[dict[str, float]] = []
        self.moments: list[dict[str, float]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        named = dict(self._model.named_parameters())
        trained = {name: one for name, one in named.items() if one.grad is not None}
        self.gradients.append(norms_by_hand({name: one.grad for name, one in trained.items() if one.grad is not None}))
        before = {name: one.detach().clone() for name, one in named.items() if one.requires_grad}
        super().step(closure)
        self.updates.append(norms_by_hand({name: named[name] - old for name, old in before.items()}))
        moments = {name: self.state[one]["momentum_buffer"] for name, one in trained.items()}
        self.moments.append(norms_by_hand(moments))


def test_norms_are_of_what_the_optimizers_use(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GoldMLP()
    model.net[0].bias.requires_grad_(False)
    optimizer = NotingSGD(model, lr=0.1, momentum=0.9, weight_decay=0.1)
    asked = {"gradient_norms": 1, "parameter_norms": 1, "moment_norms": 1, "update_norms": 1}
    totals = {"gradient_norm": 1, "parameter_norm": 1}
    of_events = {BATCH_END: asked | totals, AFTER_TRAIN_BATCH: {"gradient_norms": 1}, Event.EPOCH_END: totals}
    stream = Stream(Demand({event: EventDemand(1, fields) for event, fields in of_events.items()}))
    clipping = GradientClipping("norm", 0.05)
    settings = {"algorithms": clipping, "precision": "amp_bf16", "device_train_microbatch_size": 4}
    train(monkeypatch, stream, 6, model=model, optimizers=optimizer, **settings)
    trained = [name for name in NAMES if name != "net.0.bias"]
    for event in (AFTER_TRAIN_BATCH, BATCH_END):
        found = values_of(stream, "gradient_norms", event)
        assert [list(one) for one in found] == [trained] * 6
        for one, expected in zip(found, optimizer.gradients, strict=True):
            assert one == pytest.approx(expected)
    for kind in ("gradient_norm", "parameter_norm"):
        for found, total in zip(values_of(stream, f"{kind}s"), values_of(stream, kind), strict=True):
            assert sum(norm**2 for norm in found.values()) ** 0.5 == pytest.approx(total)
    # There are no gradients of an epoch, so nobody gets any, and nobody is told of trouble.
    assert all(
        fields["on_demand"] == ["parameter_norm"] for event, _, fields in stream.sent if event is Event.EPOCH_END
    )
    assert not any("not_sent" in fields for _, _, fields in stream.sent)
    for field, noted in (("moment_norms", optimizer.moments), ("update_norms", optimizer.updates)):
        for one, expected in zip(values_of(stream, field), noted, strict=True):
            assert one == pytest.approx(expected, rel=1e-4)
    assert values_of(stream, "parameter_norms")[-1] == pytest.approx(norms_by_hand(dict(model.named_parameters())))
    assert list(values_of(stream, "parameter_norms")[0]) == NAMES


def copies_of_weights(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    copied: list[int] = []
    copy = torch._foreach_copy_

    def counting(to: list[Tensor], source: list[Tensor], **options: Any) -> Any:
        copied.append(sum(one.numel() for one in source))
        return copy(to, source, **options)

    monkeypatch.setattr(torch, "_foreach_copy_", counting)
    return copied


@pytest.mark.parametrize(("interval", "batches"), [(10, [10, 20, 30]), ("60sp", [10, 20, 30]), ("1ep", [])])
def test_weights_are_copied_only_where_updates_are_due(
    monkeypatch: pytest.MonkeyPatch, interval: int | str, batches: list[int]
) -> None:
    copied = copies_of_weights(monkeypatch)
    stream = Stream(Demand({BATCH_END: EventDemand(1, {"update_norms": interval})}))
    train(monkeypatch, stream, 35)
    assert stream.batches_with("update_norms") == batches
    if interval != "60sp":
        # How many samples a batch has is known when it is over.
        assert copied == [212] * len(batches)


def test_without_requests_nothing_is_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = copies_of_weights(monkeypatch)
    hooks: list[int] = []

    def look(event: Event, state: State, logger: object) -> None:
        modules = list(state.model.modules())
        hooks.append(sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in modules))

    both = {"update_norms": 1, "activations": 1}
    stream = Stream(Demand({BATCH_END: EventDemand(1, both)}))
    stream.after_sending = {10: Demand()}
    train(monkeypatch, stream, 12, algorithms=[Act(look, AFTER_TRAIN_BATCH)])
    last = stream.batches_with("activations")[-1]
    assert 3 < last < 10
    assert stream.batches_with("update_norms") == stream.batches_with("activations") == list(range(1, last + 1))
    # That nobody asks any more is learnt when a batch is over.
    assert len(copied) == last + 1
    assert all(hooks[: last + 1])
    assert not any(hooks[last + 1 :])


@pytest.mark.parametrize("sent", range(4, 8))
def test_fields_that_need_hooks_are_complete_from_the_first_batch_of_a_demand(
    monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    both = {"update_norms": 1, "activations": 1}
    stream = Stream(Demand({AFTER_TRAIN_BATCH: EventDemand()}))
    stream.after_sending = {sent: Demand({BATCH_END: EventDemand(1, both)})}
    train(monkeypatch, stream, 12)
    [(before, _)] = stream.in_effect
    fields = [fields for event, _, fields in stream.sent[before:] if event is BATCH_END]
    assert all(one["on_demand"] == list(both) for one in fields)
    assert not any("not_sent" in one for one in fields)


def test_another_model_s_optimizer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = copies_of_weights(monkeypatch)
    state, other = state_of(GoldMLP()), GoldMLP()
    state.optimizers = [torch.optim.SGD(state.model.parameters(), lr=0.1)]
    fields = FieldsOnDemand(state, BUILT_IN)
    fields.use(asking(1, field="update_norms"))
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert copied == []
    state.optimizers[0].step()
    assert copied == [212]
    del fields
    state.timestamp = state.timestamp.advance_batch(6, 0, 1)
    state.optimizers[0].step()
    assert copied == [212], "who asked is gone, and so is what watched for it"


# -- losses, the model, the GPU ---------------------------------------------------------------------------------------


class SeveralLosses(GoldMLP):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._make = make

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return self._make(super().loss(outputs, batch))


@pytest.mark.parametrize("microbatch_size", [None, 3])
@pytest.mark.parametrize(
    ("make", "shares"),
    [
        (lambda loss: {"total": loss, "part": loss * 0.5, "rows": torch.ones(4)}, {"part": 0.5}),
        (lambda loss: [loss, loss * 3], {"loss0": 1 / 4, "loss1": 3 / 4}),
    ],
    ids=["with total", "list"],
)
def test_the_parts_of_a_loss_are_published_for_the_whole_batch(
    monkeypatch: pytest.MonkeyPatch, make: Any, shares: dict[str, float], microbatch_size: int | None
) -> None:
    stream = Stream()
    train(monkeypatch, stream, 5, model=SeveralLosses(make), device_train_microbatch_size=microbatch_size)
    for found, total in zip(values_of(stream, "losses"), values_of(stream, "loss"), strict=True):
        assert found == pytest.approx({name: share * total for name, share in shares.items()})


def test_the_model_s_summary_counts_each_parameter_once() -> None:
    model = GoldMLP()
    model.net[0].bias.requires_grad_(False)
    model.again = model.net[2]
    summary = BUILT_IN["model_summary"].compute(state_of(model))
    assert (summary["name"], summary["parameters"], summary["trainable"]) == ("GoldMLP", 212, 196)
    assert summary["columns"] == ["name", "class", "parameters", "trainable"]
    assert summary["modules"] == [
        ["net", "Sequential", 212, 196],
        ["net.0", "Linear", 144, 128],
        ["net.1", "Tanh", 0, 0],
        ["net.2", "Linear", 68, 68],
    ]
    assert summary["modules_left_out"] == 0
    wide = nn.Sequential(*(nn.Identity() for _ in range(MAX_MODULES + 500)))
    summary = BUILT_IN["model_summary"].compute(state_of(wide))
    assert len(summary["modules"]) + summary["modules_left_out"] == MAX_MODULES + 500


def test_fields_of_a_gpu_are_left_out_on_a_cpu_with_one_warning_each(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Stream(Demand({BATCH_END: EventDemand(1, {"memory_stats": 1, "gpu_utilization": 1})}))
    with caplog.at_level(logging.WARNING, "offloop"):
        train(monkeypatch, stream, 5)
    reasons = [fields["not_sent"] for event, _, fields in stream.sent if event is BATCH_END]
    assert len(reasons) == 5
    assert all("memory_stats: " in reason and "gpu_utilization: " in reason for reason in reasons)
    assert len(caplog.records) == 2


def test_statistics_of_a_gpu_are_sent_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"allocated_bytes.all.current": 123456789012, "num_alloc_retries": 3}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: told)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 37)
    fields = FieldsOnDemand(state_of(GoldMLP(), device=FakeGpu()), BUILT_IN)
    found = fields.compute(BATCH_END, ["memory_stats", "gpu_utilization"])
    assert (found["memory_stats"], found["gpu_utilization"]) == (told, 37)

    def without_nvml(device: object) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", without_nvml)
    assert "pip install nvidia-ml-py" in fields.compute(BATCH_END, ["gpu_utilization"])["not_sent"]


# -- activations ------------------------------------------------------------------------------------------------------


def statistics_by_hand(values: Tensor) -> dict[str, float]:
    values = values.detach().double()
    deviations = values - values.mean(-1, keepdim=True)
    kurtosis = (deviations**4).mean(-1) / (deviations**2).mean(-1) ** 2
    return {
        "average": float(values.mean()),
        "std": float(values.std(correction=0)),
        "l2_norm": float((values**2).sum(-1).sqrt().mean()),
        "kurtosis": float(kurtosis.mean()),
        "max": float(values.max(-1).values.mean()),
        "max_abs": float(values.abs().max()),
        "zeros": float((values == 0).double().mean()),
    }


class Seen(GoldMLP):
    """Keeps what went through its layers, forward pass by forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.ReLU()
        self.passes: list[tuple[bool, list[Tensor]]] = []

    def forward(self, batch: Any) -> Tensor:
        steps = [batch[0]]
        for layer in self.net:
            steps.append(layer(steps[-1]))
        self.passes.append((self.training, steps))
        return steps[-1]

    def eval_forward(self, batch: Any, outputs: Tensor | None = None) -> Tensor:
        made: Tensor = self(batch) if outputs is None else outputs
        return made


@pytest.mark.parametrize("microbatch", [None, 4])
def test_activations_are_those_of_the_first_forward_pass_of_the_batch(
    monkeypatch: pytest.MonkeyPatch, microbatch: int | None
) -> None:
    model = Seen()
    stream = Stream(Demand({AFTER_TRAIN_BATCH: EventDemand(1, {"activations": 2})}))
    train(
        monkeypatch, stream, 6, model=model, eval_dataloader=gold_loader("eval_a", 12, 5), eval_interval="1ba",
        device_train_microbatch_size=microbatch,
    )  # fmt: skip
    assert stream.batches_with("activations", AFTER_TRAIN_BATCH) == [2, 4, 6]
    passes = [steps for is_training, steps in model.passes if is_training]
    per_batch = len(passes) // 6
    assert per_batch == (1 if microbatch is None else 2)
    for found, batch in zip(values_of(stream, "activations", AFTER_TRAIN_BATCH), (1, 3, 5), strict=True):
        steps = passes[batch * per_batch]
        expected = {}
        for index in range(3):
            for what, values in (("input", steps[index]), ("output", steps[index + 1])):
                for statistic, number in statistics_by_hand(values).items():
                    expected[f"{statistic}/net.{index}_{what}.0"] = number
        assert found == pytest.approx(expected, rel=1e-4)
        assert found["zeros/net.1_output.0"] > 0


def test_activations_of_tuples_maps_and_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(nn.Module):
        def forward(self, values: Tensor, flags: list[Tensor]) -> tuple[Any, ...]:
            return values, {"double": 2 * values}, torch.tensor([1, 2]), "text", torch.tensor(0.5), torch.zeros(0)

    class Model(GoldMLP):
        def __init__(self) -> None:
            super().__init__()
            self.odd = Odd()

        def forward(self, batch: Any) -> Tensor:
            self.odd(batch[0], [batch[0] > 0, batch[0] + 1])
            return super().forward(batch)

    stream = Stream(Demand({BATCH_END: EventDemand(1, {"activations": 1})}))
    train(monkeypatch, stream, 1, model=Model())
    [found] = values_of(stream, "activations")
    places = {key.partition("/")[2] for key in found}
    assert {place for place in places if place.startswith("odd")} == {
        "odd_input.0",
        "odd_1_input.1",
        "odd_output.0",
        "odd_double_output.1",
    }


def test_activations_follow_a_model_that_takes_another_s_place(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(GoldMLP())
    fields = FieldsOnDemand(state, BUILT_IN)
    fields.use(asking(1, field="activations"))
    batch = next(iter(gold_loader("train", 6, 6)))
    state.model(batch)
    assert "activations" in fields.compute(BATCH_END, ["activations"])
    old, state.model = state.model, Seen()
    state.timestamp = state.timestamp.advance_batch(6, 0, 1)
    state.model(batch)
    assert "activations" in fields.compute(BATCH_END, ["activations"])["not_sent"]
    state.timestamp = state.timestamp.advance_batch(6, 0, 1)
    state.model(batch)
    assert "activations" in fields.compute(BATCH_END, ["activations"])
    assert not old._forward_hooks
    assert not old._forward_pre_hooks


def test_a_copy_of_an_observed_model_is_not_observed() -> None:
    state = state_of(GoldMLP())
    fields = FieldsOnDemand(state, BUILT_IN)
    fields.use(asking(1, field="activations"))
    batch = next(iter(gold_loader("train", 6, 6)))
    for other in (copy.deepcopy(state.model), pickle.loads(pickle.dumps(state.model))):
        other(batch)
        assert "activations" not in fields.compute(BATCH_END, ["activations"])
    state.model(batch)
    assert "activations" in fields.compute(BATCH_END, ["activations"])


def test_a_forward_pass_that_fails_leaves_no_hooks_behind() -> None:
    class Broken(GoldMLP):
        def forward(self, batch: Any) -> Tensor:
            super().forward(batch)
            raise ZeroDivisionError

    state = state_of(Broken())
    fields = FieldsOnDemand(state, BUILT_IN)
    fields.use(asking(1, field="activations"))
    with pytest.raises(ZeroDivisionError):
        state.model(next(iter(gold_loader("train", 6, 6))))
    assert not any(module._forward_hooks for module in state.model.net.modules())


# -- nobody waits -----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": 3})
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 37)
    return FakeGpu()


class ReportingAdam(torch.optim.AdamW):
    def report_per_parameter_metrics(self, param: Tensor, name: str, optimizer_metrics: dict[str, Any]) -> Any:
        optimizer_metrics[f"l2_norm/moment/{name}"] = self.state[param]["exp_avg"].norm()
        return optimizer_metrics


def everywhere(names: Iterable[str]) -> Demand:
    return Demand(dict.fromkeys(Event, EventDemand(1, dict.fromkeys(names, 1))))


@pytest.mark.parametrize("name", NUMBERS)
def test_a_field_is_read_without_waiting_and_in_one_copy(
    monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, name: str
) -> None:
    def outcome(demand: Demand) -> tuple[list[str], int, Stream]:
        stream, model = Stream(demand), SeveralLosses(lambda loss: {"a": loss, "b": loss})
        optimizer = ReportingAdam(model.parameters(), lr=0.01, foreach=True)
        gpu.issued = gpu.done = 0
        with reads() as found:
            train(monkeypatch, stream, 6, model=model, optimizers=optimizer, device=gpu)
        issued = gpu.issued
        gpu.run()
        return found, issued, stream

    plain, asked = outcome(everywhere([])), outcome(everywhere([name]))
    sent = [fields for _, _, fields in asked[2].sent if name in fields]
    assert len(sent) >= 6
    assert asked[0] == plain[0]
    assert gpu.waits == 0
    deferred = [fields[name] for fields in sent if hasattr(fields[name], "ready")]
    assert len(deferred) == (len(sent) if name in NORM_FIELDS | ACTIVATION_FIELDS else 0)
    # The loss crosses once a batch in any case.
    assert asked[1] - plain[1] == len(deferred)
    for one in deferred:
        assert one.ready()
        value = one.value()
        numbers = value.values() if isinstance(value, dict) else [value]
        assert all(isinstance(number, list if name.endswith("histograms") else float) for number in numbers)
    if name == "optimizer_norms":
        assert "l2_norm/moment/net.2.bias" in deferred[0].value()
    if name in ("gradient_norms", "parameter_norms", "moment_norms", "update_norms"):
        assert list(deferred[0].value()) == NAMES


def test_norms_of_weights_that_are_flattened_over_ranks_are_refused() -> None:
    state = state_of(GoldMLP(), world_size=2)
    for parameter in state.model.parameters():
        parameter._fsdp_flattened = True  # as FullyShardedDataParallel marks them
    found = FieldsOnDemand(state, BUILT_IN).compute(BATCH_END, ["parameter_norm"])
    assert list(found) == ["not_sent"]
    assert "use torch's fully_shard" in found["not_sent"]


def test_a_thousand_norms_are_a_few_steps_of_the_device(gpu: FakeGpu) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(500)))
    fields = FieldsOnDemand(state_of(model, device=gpu), BUILT_IN)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = fields.compute(BATCH_END, ["parameter_norms"])
    gpu.run()
    assert (gpu.issued, len(found["parameter_norms"].value())) == (1, 1000)
    counts = {one.key: one.count for one in profile.key_averages()}
    assert counts["aten::_foreach_norm"] == counts["aten::stack"] == 1


def test_an_event_requested_for_an_unavailable_field_is_published_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(Demand({AFTER_TRAIN_BATCH: EventDemand(None, {"memory_stats": 1})}))
    train(monkeypatch, stream, 5)
    assert [batch for event, batch, _ in stream.sent if event is AFTER_TRAIN_BATCH] == [0]


def test_memory_that_is_full_for_a_field_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")

    monkeypatch.setattr(torch, "empty_like", full)
    monkeypatch.setattr("offloop.trainer.fields.model.statistics", full)
    stream = Stream(Demand({BATCH_END: EventDemand(1, {"update_norms": 1, "activations": 1, "gradient_norm": 1})}))
    train(monkeypatch, stream, 3)
    sent = [fields for event, _, fields in stream.sent if event is BATCH_END]
    assert len(sent) == 3
    assert all("gradient_norm" in fields for fields in sent)
    assert all(fields["not_sent"].count("CUDA out of memory") == 2 for fields in sent)
