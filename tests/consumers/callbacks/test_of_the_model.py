"""The callbacks that look at the model: its gradients, its optimizer, its memory, its activations."""

import json
import logging
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from callback_calls import calls_of, goes_on_alike
from consumers_stream import Collector, batch_end
from gold import GoldMLP, gold_batches
from helpers import REFERENCE
from hypothesis import example, given
from hypothesis import strategies as st
from tensor_stream import TensorStream
from torch import Tensor, nn
from training import gold_trainer

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.bus.types.histograms import BINS, EDGES, MAX_EXPONENT, MIN_EXPONENT, SIDE
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers import Callback, Runner
from offloop.consumers.api.logger import Histogram, Logger, Row, Table
from offloop.consumers.callbacks.activation_monitor import ActivationMonitor
from offloop.consumers.callbacks.histograms import Histograms
from offloop.consumers.callbacks.memory_monitor import MemoryMonitor
from offloop.consumers.callbacks.nan_monitor import NaNMonitor
from offloop.consumers.callbacks.optimizer_monitor import OptimizerMonitor
from offloop.trainer import State
from offloop.trainer.device.device import CpuDevice, Device
from offloop.trainer.fields.norms import NORM_FIELDS
from offloop.trainer.stream.run_stream import TrainingStream

OPTIMIZED = json.loads((REFERENCE / "cb_optimizer_monitor.json").read_text())["runs"]
MEMORY = json.loads((REFERENCE / "cb_memory_monitor.json").read_text())

Logged = list[tuple[int, dict[str, Any]]]


def logged(rows: Sequence[Row]) -> Logged:
    return [(row.step, row.metrics) for row in rows]


Training = Callable[..., Logged]


@pytest.fixture
def in_training(monkeypatch: pytest.MonkeyPatch) -> Training:
    """Trains, and returns what a callback logs of what is published at its request."""

    def train(make: Callable[[], Callback], **arguments: Any) -> Logged:
        stream, collector = TensorStream(make()), Collector()
        with monkeypatch.context() as patched:
            patched.setattr(TrainingStream, "_start_publisher", lambda *_: stream)
            with gold_trainer(publish=True, run_name="r", **arguments) as trainer:
                trainer.fit()
        Runner(stream.snapshots, [make()], [collector]).run()
        return logged(collector.rows)

    return train


# -- OptimizerMonitor -------------------------------------------------------------------------------------------------


class DecoupledAdamW(torch.optim.AdamW):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=1e-5 / lr)

    def report_per_parameter_metrics(
        self, param: Tensor, name: str, optimizer_metrics: dict[str, Any]
    ) -> dict[str, Any]:
        [group], kept = self.param_groups, self.state[param]
        step, (beta1, beta2) = float(kept["step"]), group["betas"]
        root = kept["exp_avg_sq"].sqrt() / math.sqrt(1 - beta2**step) + group["eps"]
        update = group["lr"] / (1 - beta1**step) * kept["exp_avg"] / root - group["lr"] * group["weight_decay"] * param
        norms = {"moment": kept["exp_avg"], "param": param, "update": update, "grad": param.grad}
        return optimizer_metrics | {
            f"l2_norm/{what}/{name}": torch.linalg.vector_norm(values) for what, values in norms.items()
        }


def optimizer_of(run: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    if run.startswith("SGD"):
        return lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    kind = {"Adam(lr=0.01)": torch.optim.Adam, "DecoupledAdamW(lr=0.01)": DecoupledAdamW}[run]
    return lambda model: kind(model.parameters(), lr=0.01)


@pytest.mark.parametrize("run", OPTIMIZED)
def test_optimizer_monitor_logs_what_the_reference_logs(run: str, in_training: Training) -> None:
    model = GoldMLP()
    model.net[0].bias.requires_grad_("frozen" not in run)
    is_default = "default" in run
    found = in_training(
        OptimizerMonitor if is_default else lambda: OptimizerMonitor(batch_log_interval=1),
        model=model,
        optimizers=optimizer_of(run),
        max_duration="24ba" if is_default else "2ep",
        device_train_microbatch_size=4 if "microbatch" in run else None,
    )
    expected = OPTIMIZED[run]["logged"]
    assert [step for step, _ in found] == [step for step, _, _ in expected]
    for (_, metrics), (_, event, reference) in zip(found, expected, strict=True):
        assert event == "BATCH_END"
        assert list(metrics) == list(reference)
        assert metrics == pytest.approx(reference, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("options", [{"log_optimizer_metrics": False}, {"only_global": True}])
def test_optimizer_monitor_logs_less_when_asked_to(in_training: Training, options: dict[str, bool]) -> None:
    run = "DecoupledAdamW(lr=0.01)"
    found = in_training(lambda: OptimizerMonitor(batch_log_interval=4, **options), optimizers=optimizer_of(run))
    kept = "l2_norm/grad/global" if "only_global" in options else "l2_norm/grad/"
    expected = [
        (step, {name: value for name, value in metrics.items() if name.startswith(kept)})
        for step, _, metrics in OPTIMIZED[run]["logged"]
        if step % 4 == 0
    ]
    assert [step for step, _ in found] == [4, 8]
    for (_, metrics), (_, reference) in zip(found, expected, strict=True):
        assert metrics == pytest.approx(reference, rel=1e-6, abs=1e-6)
        assert list(metrics) == list(reference)


# -- MemoryMonitor ----------------------------------------------------------------------------------------------------


def test_optimizer_monitor_asks_for_no_more_than_it_logs() -> None:
    demands = {
        OptimizerMonitor(): ("optimizer_norms", 10),
        OptimizerMonitor(log_optimizer_metrics=False, batch_log_interval=3): ("gradient_norms", 3),
        OptimizerMonitor(only_global=True): ("gradient_norm", 10),
    }
    for monitor, (field, every) in demands.items():
        assert monitor.demand() == Demand({Event.BATCH_END: EventDemand(1, {field: every})})


FAKE = MEMORY["fake_memory_stats"]


def test_memory_monitor_logs_what_the_reference_logs(in_training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: FAKE["input"])
    device, custom = Device(), FAKE["output_custom_keys"]
    device.name = "gpu"
    for keys, output in ((custom["arg"], custom["result"]), (None, FAKE["output_default_keys"])):
        found = in_training(lambda keys=keys: MemoryMonitor(keys), device=device)
        # For the step at which the batch began, as AFTER_TRAIN_BATCH has it.
        assert found == [(step, {f"memory/{name}": value for name, value in output.items()}) for step in range(8)]


def test_memory_monitor_says_on_a_cpu_that_it_logs_nothing(
    in_training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "offloop"):
        assert in_training(MemoryMonitor) == []
    assert "memory monitor logs nothing" in caplog.text


def after_train_batch(batch: int, rank: int, statistics: dict[str, Any]) -> Snapshot:
    return Snapshot.build(
        Event.AFTER_TRAIN_BATCH, rank=rank, timestamp=Timestamp(batch=batch), world_size=3, memory_stats=statistics
    )


def test_memory_of_all_ranks_is_put_together_when_the_last_one_has_told_its_own() -> None:
    snapshots = [
        after_train_batch(batch, rank, {"reserved_bytes.all.peak": (rank + 1) * 1e9, "num_alloc_retries": rank})
        for batch in range(5)
        for rank in (0, 2, 1)
    ]
    keys = {"reserved_bytes.all.peak": "peak", "num_alloc_retries": "retries"}
    monitor = MemoryMonitor(keys, dist_aggregate_batch_interval=2)
    assert monitor.all_ranks
    assert not MemoryMonitor().all_ranks
    own = [[batch, "AFTER_TRAIN_BATCH", {"memory/peak": 1.0, "memory/retries": 0}] for batch in range(5)]
    of_all = {
        "memory/peak_avg": 2.0, "memory/peak_min": 1.0, "memory/peak_max": 3.0,
        "memory/retries_avg": 1.0, "memory/retries_min": 0, "memory/retries_max": 2,
    }  # fmt: skip
    calls = calls_of(monitor, snapshots).calls
    goes_on_alike(lambda: MemoryMonitor(keys, dist_aggregate_batch_interval=2), snapshots)
    assert [call for call in calls if "memory/peak" in call[2]] == own
    assert [call for call in calls if "memory/peak" not in call[2]] == [
        [batch, "AFTER_TRAIN_BATCH", of_all] for batch in (0, 2, 4)
    ]


# -- ActivationMonitor ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("interval", "steps"), [("3ba", [0, 3, 6]), ("1ep", [0, 4])])
def test_activations_are_logged_as_often_as_asked(in_training: Training, interval: int | str, steps: list[int]) -> None:
    found = in_training(lambda: ActivationMonitor(interval, ignore_module_types=["net.1"]), max_duration="8ba")
    assert [step for step, _ in found] == steps
    model = GoldMLP()
    [batch, *_] = gold_batches("train", 24, 6)
    hidden = model.net[1](model.net[0](batch[0]))
    outputs = model.net[2](hidden)
    metrics = found[0][1]
    statistics = ("average", "std", "l2_norm", "kurtosis", "max", "max_abs", "zeros")
    places = [f"{module}_{what}.0" for module in ("net", "net.0", "net.2") for what in ("input", "output")]
    assert set(metrics) == {f"activations/{statistic}/{place}" for statistic in statistics for place in places}
    assert metrics["activations/l2_norm/net.2_input.0"] == pytest.approx(hidden.norm(dim=-1).mean().item())
    assert metrics["activations/max/net.2_output.0"] == pytest.approx(outputs.max(-1).values.mean().item())
    assert metrics["activations/average/net.0_input.0"] == pytest.approx(batch[0].mean().item())


# -- NaNMonitor -------------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


class Kept(Collector):
    def __init__(self) -> None:
        super().__init__()
        self.tables: list[Table] = []
        self.histograms: list[Histogram] = []

    def log_histogram(self, entry: Histogram, state: Snapshot) -> None:
        self.histograms.append(entry)

    def log_table(self, entry: Table, state: Snapshot) -> None:
        self.tables.append(entry)


def watched(monitor: Callback, snapshots: list[Snapshot]) -> Kept:
    kept = Kept()
    Runner(snapshots, [monitor], [kept]).run()
    return kept


def batches_with(losses: list[float | None], **fields: Any) -> list[Snapshot]:
    return [batch_end(number, loss=loss, **fields) for number, loss in enumerate(losses, 1)]


def test_nan_monitor_tells_of_each_episode_once_and_keeps_the_first_bad_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    losses = [None, 1.0, NAN, INF, 2.0, 2.0, -INF, NAN]
    kept = watched(NaNMonitor(), batches_with(losses, gradient_norm=0.5, on_demand=["gradient_norm"]))
    assert [(row.step, row.metrics) for row in kept.rows] == [
        (3, {"nan/loss": 1, "nan/gradients": 0, "nan/batches": 1}),
        (4, {"nan/loss": 1, "nan/gradients": 0, "nan/batches": 2}),
        (5, {"nan/loss": 0, "nan/gradients": 0, "nan/batches": 2}),
        (7, {"nan/loss": 1, "nan/gradients": 0, "nan/batches": 3}),
        (8, {"nan/loss": 1, "nan/gradients": 0, "nan/batches": 4}),
    ]
    assert capsys.readouterr().err.splitlines() == [
        "run run, batch 3: the loss is nan; learning rates SGD 0.1",
        "run run, batch 7: the loss is -inf; learning rates SGD 0.1",
    ]
    [table] = kept.tables
    assert (table.name, table.step, table.columns) == ("nan/first_bad_batch", 3, ["what", "value"])
    assert table.rows == [["batch", 3], ["loss", "NaN"], ["lr/SGD/group0", 0.1], ["gradient_norm/all", 0.5]]


def test_nan_monitor_finds_the_parameter_whose_gradient_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    norms = {"a": 1.0, "b": NAN, "c": INF, "d": NAN, "e": NAN}
    snapshots = batches_with([1.0, 2.0], gradient_norms=norms, on_demand=["gradient_norms"])
    kept = watched(NaNMonitor(per_parameter=True), snapshots)
    assert kept.rows[0].metrics == {"nan/loss": 0, "nan/gradients": 1, "nan/batches": 1}
    assert "the gradients of b, c, d and 1 more are not finite" in capsys.readouterr().err
    expected = {"batch": 1, "loss": 1.0, "lr/SGD/group0": 0.1}
    expected |= {
        f"gradient_norm/{name}": {"b": "NaN", "c": "Infinity", "d": "NaN", "e": "NaN"}.get(name, norm)
        for name, norm in norms.items()
    }
    assert dict(kept.tables[0].rows) == expected


@pytest.mark.parametrize(("action", "expected"), [("stop", [(2, "stop"), (3, "stop")]), ("alert", [])])
def test_nan_monitor_asks_for_the_end_of_the_training(action: Any, expected: list[tuple[int, str]]) -> None:
    commands: list[tuple[int, str]] = []

    def ended(number: int, loss: float) -> Snapshot:
        on_command = lambda name, arguments: commands.append((number, name))  # noqa: E731
        return Snapshot.build(Event.BATCH_END, timestamp=Timestamp(batch=number), on_command=on_command, loss=loss)

    watched(NaNMonitor(action, check_gradients=False), [ended(1, 1.0), ended(2, NAN), ended(3, NAN)])
    assert commands == expected
    assert NaNMonitor.barrier_events == (Event.BATCH_END,)


def test_nan_monitor_leaves_the_gradients_of_amp_fp16_to_the_scaler() -> None:
    snapshots = batches_with([1.0], gradient_norm=INF, on_demand=["gradient_norm"], precision="amp_fp16")
    assert watched(NaNMonitor(), snapshots).rows == []
    assert watched(NaNMonitor(check_gradients=False), batches_with([1.0], gradient_norm=INF)).rows == []


def test_nan_monitor_goes_on_from_where_it_was() -> None:
    goes_on_alike(NaNMonitor, batches_with([NAN, NAN, 1.0, NAN]))


# -- norms of sharded weights -----------------------------------------------------------------------------------------


def of_shards(batch: int, rank: int, norm: Any, field: str = "gradient_norm", **fields: Any) -> Snapshot:
    value = {"shards": norm, "ranks": 0 if rank else 2}
    return batch_end(batch, rank=rank, **{"loss": 1.0, field: value, "on_demand": [field], **fields})


def test_norms_of_shards_are_added_up_and_incomplete_batches_are_left_out_and_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    snapshots = [
        of_shards(1, 1, {"a": 1.0}, "gradient_norms"),  # before the first rank got the request
        *(of_shards(2, rank, {"a": 3.0 + rank, "b": 0.5} if rank else {"a": 3.0}, "gradient_norms") for rank in (0, 1)),
        of_shards(3, 1, {"a": NAN}, "gradient_norms"),
        of_shards(4, 0, {"a": 1.0}, "gradient_norms"),
        of_shards(3, 0, {"a": 1.0, "c": 2.0}, "gradient_norms"),
        batch_end(4, rank=2, gradient_norms=None, on_demand=["gradient_norms"]),  # a replica
        of_shards(4, 1, {}, "gradient_norms"),
    ]

    def make() -> OptimizerMonitor:
        return OptimizerMonitor(log_optimizer_metrics=False, batch_log_interval=1)

    two = {"l2_norm/grad/a": 5.0, "l2_norm/grad/b": 0.5, "l2_norm/grad/global": math.hypot(5, 0.5)}
    three = {"l2_norm/grad/a": NAN, "l2_norm/grad/c": 2.0, "l2_norm/grad/global": NAN}
    four = {"l2_norm/grad/a": 1.0, "l2_norm/grad/global": 1.0}
    calls = calls_of(make(), snapshots).calls
    assert [step for step, _, _ in calls] == [2, 3, 4]
    assert [metrics for _, _, metrics in calls] == [pytest.approx(one, nan_ok=True) for one in (two, three, four)]
    goes_on_alike(make, snapshots[:3] + snapshots[4:5] + snapshots[6:])
    capsys.readouterr()
    # A rank that no longer reports.
    silent = [of_shards(batch, 0, {"a": 1.0}, "gradient_norms") for batch in range(1, 100)]
    assert calls_of(make(), silent).calls == []
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(";")[0].split()[-2] for line in lines] == ["1", "2", "4", "8", "16", "32"]
    assert "the shards of 1 of 2 ranks came" in lines[0]


def test_nan_monitor_checks_the_gradients_of_all_ranks_in_one_episode() -> None:
    bad_everywhere = [of_shards(5, 0, NAN, loss=NAN), of_shards(5, 1, NAN, loss=NAN)]
    snapshots = [
        *(of_shards(1, rank, 1.0) for rank in (0, 1)),
        *(of_shards(batch, rank, INF if rank else 1.0) for batch in (2, 3) for rank in (batch % 2, 1 - batch % 2)),
        *(of_shards(4, rank, 1.0) for rank in (1, 0)),
        *bad_everywhere,
    ]
    kept = watched(NaNMonitor(), snapshots)
    assert [(row.step, row.metrics) for row in kept.rows] == [
        (2, {"nan/loss": 0, "nan/gradients": 1, "nan/batches": 1}),
        (3, {"nan/loss": 0, "nan/gradients": 1, "nan/batches": 2}),
        (4, {"nan/loss": 0, "nan/gradients": 0, "nan/batches": 2}),
        (5, {"nan/loss": 1, "nan/gradients": 1, "nan/batches": 3}),
    ]
    goes_on_alike(NaNMonitor, snapshots)


# -- histograms -------------------------------------------------------------------------------------------------------


def counts_of(*values: tuple[int, int]) -> list[int]:
    counts = [0] * (BINS + 1)
    for number, count in values:
        counts[number] = count
    return counts


def test_histograms_of_shards_are_added_up_and_shown_where_they_have_values() -> None:
    field = "gradient_histograms"
    shards = [{"a": counts_of((SIDE - 2, 3), (SIDE, 1)), "b": counts_of((BINS, 2))}, {"a": counts_of((SIDE, 4))}]
    snapshots = [of_shards(1, rank, shard, field) for rank, shard in enumerate(shards)]
    found = watched(Histograms(of=("gradients",), batch_log_interval=1), snapshots)
    [shown] = found.histograms
    assert (shown.step, shown.name, shown.counts) == (1, "histogram/gradients/a", [3, 0, 5])
    smallest = 2.0 ** (MIN_EXPONENT - 1)
    assert shown.edges == [-4 * smallest, -2 * smallest, -smallest, smallest]
    assert found.rows[0].metrics == {"histogram/gradients/b/not_finite": 2}
    assert Histograms(batch_log_interval=5).demand() == Demand(
        {Event.BATCH_END: EventDemand(1, {"gradient_histograms": 5, "parameter_histograms": 5})}
    )
    with pytest.raises(ConfigurationError, match="use gradients, parameters"):
        Histograms(of=("weights",))
    with pytest.raises(ConfigurationError, match="has 2 edges for 2 counts: give one more edge than counts"):
        Logger().log_histogram([1, 2], [0.0, 1.0], "h")


@given(st.lists(st.floats(width=32), max_size=20))
@example(
    [2.0**MIN_EXPONENT, 2.0 ** (MIN_EXPONENT - 1), 2.0 ** (MIN_EXPONENT - 2), -0.5, -1.0, 1.0, 2.0**16, -(2.0**17)]
)
def test_each_value_is_in_the_bin_whose_edges_are_around_it(values: list[float]) -> None:
    state = State(model=torch.nn.Linear(1, 1), device=CpuDevice(), seed=1, run_name="r")
    state.model.weight = torch.nn.Parameter(torch.tensor([values]))
    [counts, _] = NORM_FIELDS["parameter_histograms"].compute(state).values()
    expected = counts_of()
    for value in values:
        inside = min(abs(value), 2.0**MAX_EXPONENT * 0.99) * (1 if value > 0 else -1)
        below = [low <= inside < high if value > 0 else low < inside <= high for low, high in pairwise(EDGES)]
        place = SIDE if abs(value) < 2.0 ** (MIN_EXPONENT - 1) else below.index(True) if math.isfinite(value) else BINS
        expected[place] += 1
    assert counts.tolist() == expected
