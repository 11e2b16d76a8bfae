"""The callbacks that come with offloop log what the reference logs, from the same inputs."""

import json
from datetime import timedelta
from itertools import groupby
from typing import Any

import pytest
from callback_calls import calls_of as log_of
from callback_calls import goes_on_alike
from consumers_stream import batch_end
from helpers import REFERENCE
from reference_options import SPEED_MONITORS, snapshots_of_run

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers import Callback, LRMonitor, SpeedMonitor, TrainerMetrics
from offloop.consumers.callbacks.speed_monitor import peak_flops

SPEED = json.loads((REFERENCE / "cb_speed_monitor.json").read_text())
LR = json.loads((REFERENCE / "cb_lr_monitor.json").read_text())
TRAINER_LOG = json.loads((REFERENCE / "trainer_log_microbatch4_2ep.json").read_text())


def calls_of(callback: Callback, snapshots: list[Snapshot]) -> list[list[Any]]:
    return log_of(callback, snapshots).calls


def rows_of(calls: list[list[Any]]) -> list[list[Any]]:
    """Joins the metrics of consecutive calls with the same step and event, as the logger does."""
    return [
        [*place, [item for _, _, metrics in group for item in metrics.items()]]
        for place, group in groupby(calls, lambda call: call[:2])
    ]


# -- SpeedMonitor -----------------------------------------------------------------------------------------------------


def speed_snapshots(run: str) -> list[Snapshot]:
    return snapshots_of_run(SPEED["input_columns"], SPEED["runs"][run]["inputs"], 100.0 if run == "flops" else None)


@pytest.mark.parametrize("run", SPEED["runs"])
def test_speed_monitor_logs_what_the_reference_logs(run: str) -> None:
    monitor = SPEED_MONITORS[run]()
    if run.startswith("resumed"):
        # Two evaluations of 1.75 s had gone by before the checkpoint that this run goes on from.
        monitor.load_state_dict({"total_eval_wct": 3.5})
    calls = calls_of(monitor, speed_snapshots(run))
    assert rows_of(calls) == rows_of(SPEED["runs"][run]["logged"])
    reference = SPEED["runs"][run]["state_dict_at_end"]["SpeedMonitor"]
    assert {name: monitor.state_dict()[name] for name in reference} == reference
    goes_on_alike(SPEED_MONITORS[run], speed_snapshots(run), step=5)


def test_speed_monitor_divides_by_the_number_of_ranks() -> None:
    [_, [_, _, metrics]] = calls_of(SpeedMonitor(window_size=1), [batch_end(1), batch_end(2, world_size=4)])
    assert {name: value for name, value in metrics.items() if name.startswith("throughput/")} == {
        "throughput/batches_per_sec": 4.0,
        "throughput/samples_per_sec": 32.0,
        "throughput/device/batches_per_sec": 1.0,
        "throughput/device/samples_per_sec": 8.0,
    }


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5e12),
        ("Tesla T4", "bf16", None),
        (None, None, None),
    ],
)
def test_peaks_are_found_by_device_and_precision(
    device: str | None, precision: str | None, expected: float | None
) -> None:
    assert peak_flops(device, precision) == expected


# -- LRMonitor --------------------------------------------------------------------------------------------------------


def lr_snapshots(logged: list[list[Any]]) -> list[Snapshot]:
    rates: dict[int, dict[str, list[float]]] = {}
    for step, metrics, _ in logged:
        for name, rate in metrics.items():
            optimizer = name.removeprefix("lr-").partition("/")[0]
            rates.setdefault(step, {}).setdefault(optimizer, []).append(rate)
    return [batch_end(step, lr=lr) for step, lr in rates.items()]


@pytest.mark.parametrize("run", LR["runs"])
def test_lr_monitor_logs_what_the_reference_logs(run: str) -> None:
    logged = LR["runs"][run]["logged"]
    expected = [[step, event, metrics] for step, metrics, event in logged]
    assert rows_of(calls_of(LRMonitor(), lr_snapshots(logged))) == rows_of(expected)


# -- TrainerMetrics ---------------------------------------------------------------------------------------------------


def trainer_snapshots() -> list[Snapshot]:
    calls = [(call["step"], call["data"]) for call in TRAINER_LOG["calls"] if call["kind"] == "metrics"]
    losses = [data["loss/train/total"] for _, data in calls if "loss/train/total" in data]
    metrics = [
        {name.removeprefix("metrics/train/"): value for name, value in data.items()}
        for _, data in calls
        if "metrics/train/CrossEntropy" in data
    ]
    timestamp, snapshots = Timestamp(), []
    sizes = TRAINER_LOG["config"]["batches"]
    for _ in range(2):
        snapshots.append(Snapshot.build(Event.EPOCH_START, timestamp=timestamp))
        for size in sizes:
            previous, timestamp = timestamp, timestamp.advance_batch(size, 0, 1000)
            fields = {"loss": losses.pop(0), "train_metrics": metrics.pop(0)}
            snapshots.append(
                Snapshot.build(Event.BATCH_END, timestamp=timestamp, previous_timestamp=previous, **fields)
            )
        timestamp = timestamp.to_next_epoch()
        snapshots.append(Snapshot.build(Event.EPOCH_END, timestamp=timestamp, train_metrics=metrics.pop(0)))
    return [*snapshots, Snapshot.build(Event.FIT_END, timestamp=timestamp)]


def test_speed_is_that_of_the_training_since_a_time_that_goes_back() -> None:
    def batches(first: int, seconds: float) -> list[Snapshot]:
        times = [timedelta(seconds=seconds * batch) for batch in range(first, first + 4)]
        stamps = [Timestamp(batch=first + place, sample=first + place, total_wct=at) for place, at in enumerate(times)]
        return [Snapshot.build(Event.BATCH_END, timestamp=stamp) for stamp in stamps]

    def speeds(monitor: SpeedMonitor, snapshots: list[Snapshot]) -> list[float]:
        name = "throughput/batches_per_sec"
        return [metrics[name] for _, _, metrics in log_of(monitor, snapshots).calls if name in metrics]

    assert speeds(SpeedMonitor(window_size=3), batches(10, 0.125) + batches(1, 0.5)) == [8.0, 2.0]
    monitor, other = SpeedMonitor(window_size=3), SpeedMonitor(window_size=3)
    speeds(monitor, batches(10, 0.125))
    speeds(other, batches(2, 2)[:1])
    monitor.load_state_dict(other.state_dict())
    assert speeds(monitor, batches(3, 2)) == [0.5, 0.5]


def test_a_part_of_a_loss_that_is_no_number_leaves_out_itself_alone() -> None:
    stream = [batch_end(1, loss=1.5, losses={"ce": 1.0, "kl": None, "heads": [0.25, 0.25]})]
    logged = {
        name: value for _, _, metrics in log_of(TrainerMetrics(), stream).calls for name, value in metrics.items()
    }
    losses = {name: value for name, value in logged.items() if name.startswith("loss")}
    assert losses == {
        "loss/train/total": 1.5,
        "loss/train/ce": 1.0,
        "loss/train/heads/0": 0.25,
        "loss/train/heads/1": 0.25,
    }


def test_trainer_metrics_logs_what_a_trainer_logs_by_itself() -> None:
    expected = [
        [call["step"], call["data"]]
        for call in TRAINER_LOG["calls"]
        if call["kind"] == "metrics" and "trainer/device_train_microbatch_size" not in call["data"]
    ]
    assert [[step, metrics] for step, _, metrics in calls_of(TrainerMetrics(), trainer_snapshots())] == expected


def test_trainer_metrics_logs_tokens_parts_of_losses_numbers_in_lists_and_maps_and_what_algorithms_log() -> None:
    began = Timestamp(batch=3, token=70, token_in_epoch=70)
    losses = {"loss": 0.5, "losses": {"classes": 0.3, "boxes": 0.2}}
    batch = Snapshot.build(
        Event.BATCH_END, timestamp=began.advance_batch(8, 70, 1000), previous_timestamp=began, **losses
    )
    [[step, _, metrics], [_, _, parts]] = calls_of(TrainerMetrics(), [batch])
    assert (step, metrics["time/token"], metrics["time/token_in_epoch"]) == (3, 70, 70)
    assert parts == {"loss/train/total": 0.5, "loss/train/classes": 0.3, "loss/train/boxes": 0.2}
    of_epoch = {"recall": [0.5, 1.0], "by_kind": {"cat": 1, "dog": {"big": 2}}, "unknown": None}
    [[_, _, logged]] = calls_of(TrainerMetrics(), [Snapshot.build(Event.EPOCH_END, train_metrics=of_epoch)])
    assert logged == {
        "metrics/train/recall/0": 0.5,
        "metrics/train/recall/1": 1.0,
        "metrics/train/by_kind/cat": 1,
        "metrics/train/by_kind/dog/big": 2,
    }
    snapshot = Snapshot.build(
        Event.EVAL_START, timestamp=Timestamp(batch=4), logged=[[3, {"a": 1.5}], [4, {"a": 2.5}], [5]]
    )
    assert calls_of(TrainerMetrics(), [snapshot]) == [[3, "EVAL_START", {"a": 1.5}], [4, "EVAL_START", {"a": 2.5}]]
    batch = Snapshot.build(Event.BATCH_END, loss=0.5, logged=[[0, {"step": 7, "time": 1.5, "a": 2.5}]])
    calls = calls_of(TrainerMetrics(), [batch])
    assert [calls[0][2], calls[-1][2]] == [{"log/step": 7, "log/time": 1.5, "a": 2.5}, {"loss/train/total": 0.5}]
