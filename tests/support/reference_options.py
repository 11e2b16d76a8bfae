"""Arguments of the callbacks and schedulers of the reference's runs, and what these callbacks were given."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers import SpeedMonitor
from offloop.trainer.schedulers import (
    ConstantScheduler,
    CosineAnnealingScheduler,
    ExponentialScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    MultiStepWithWarmupScheduler,
    PolynomialScheduler,
    Scheduler,
    StepScheduler,
)

OF_THE_RUNS: dict[str, Callable[[], Scheduler]] = {
    "ConstantScheduler(alpha=0.5, t_max='5ba')": lambda: ConstantScheduler(alpha=0.5, t_max="5ba"),
    "StepScheduler('1ep', 0.5)": lambda: StepScheduler("1ep", 0.5),
    "LinearScheduler(1.0, 0.0)": lambda: LinearScheduler(1.0, 0.0),
    "ExponentialScheduler(0.9, '1ba')": lambda: ExponentialScheduler(0.9, "1ba"),
    "CosineAnnealingScheduler(alpha_f=0.1)": lambda: CosineAnnealingScheduler(alpha_f=0.1),
    "PolynomialScheduler(2.0)": lambda: PolynomialScheduler(2.0),
    "LinearWithWarmupScheduler('3ba')": lambda: LinearWithWarmupScheduler("3ba"),
    "MultiStepWithWarmupScheduler('2ba', ['6ba'], 0.5)": lambda: MultiStepWithWarmupScheduler("2ba", ["6ba"], 0.5),
    "two param groups, Adam lr 0.01/0.001, LinearScheduler": LinearScheduler,
    "LinearScheduler with max_duration 10ba": LinearScheduler,
}

SPEED_MONITORS = {
    "window3_seconds_tokens_eval": lambda: SpeedMonitor(window_size=3, time_unit="seconds"),
    "flops": lambda: SpeedMonitor(window_size=2, gpu_flops_available=5000, time_unit="minutes"),
    "resumed_from_4ba": lambda: SpeedMonitor(window_size=2, time_unit="seconds"),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "ep_noeval": {"time_unit": "seconds"},
    "ep_eval_1ep": {"time_unit": "seconds"},
    "sp_skip0_hours": {"skip_batches": 0},
}


def snapshots_of_run(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], flops_per_sample: float | None = None
) -> list[Snapshot]:
    """The events of a run of the reference, as its file has them."""
    snapshots: list[Snapshot] = []
    previous = None
    for values in rows:
        row = dict(zip(columns, values, strict=True))
        counts = {name: row[name] for name in ("epoch", "batch", "batch_in_epoch", "sample", "token")}
        durations = {name: timedelta(seconds=row[name]) for name in ("total_wct", "epoch_wct", "batch_wct")}
        fields = {name: row.get(name) for name in ("max_duration", "dataloader_label", "dataloader_len")}
        if flops_per_sample is not None:
            fields["flops_per_batch"] = flops_per_sample * (row["sample"] - int(previous.sample if previous else 0))
        timestamp = Timestamp(**counts, **durations)
        snapshots.append(
            Snapshot.build(
                Event(row["event"].lower()),
                time_ns=int(row["time.time()"] * 1e9),
                timestamp=timestamp,
                previous_timestamp=previous,
                eval_timestamp=Timestamp(total_wct=timedelta(seconds=row["eval_total_wct"])),
                **fields,
            )
        )
        previous = timestamp
    return snapshots
