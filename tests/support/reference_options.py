"""Arguments of the callbacks and schedulers of the reference's runs."""

from collections.abc import Callable
from typing import Any

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
