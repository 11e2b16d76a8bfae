"""Learning rates over a training, with a stand-in for the state that counts four batches of six samples an epoch."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import REFERENCE
from reference_options import OF_THE_RUNS
from torch.optim import SGD, Adam, Optimizer

from offloop.bus.errors import ConfigurationError, InvalidTimeError
from offloop.bus.types.timestamp import Time, Timestamp
from offloop.trainer.schedulers import (
    ConstantScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWarmRestartsScheduler,
    CosineAnnealingWithWarmupScheduler,
    ExponentialScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
    MultiStepWithWarmupScheduler,
    PolynomialWithWarmupScheduler,
    Scheduler,
    StepScheduler,
    compile_scheduler,
)

RECORDED = dict(json.loads((REFERENCE / "cb_lr_monitor.json").read_text())["runs"])
BATCH_SIZE = 6
WITH_WARMUP: list[Callable[..., Scheduler]] = [
    lambda warmup, **others: MultiStepWithWarmupScheduler(warmup, ["1dur"], **others),
    ConstantWithWarmupScheduler,
    LinearWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    PolynomialWithWarmupScheduler,
]


@dataclass
class Training:
    """What schedules read of a state."""

    max_duration: Time | None = field(default_factory=lambda: Time(3, "ep"))
    dataloader_len: int | None = 4
    timestamp: Timestamp = field(default_factory=Timestamp)

    def advance(self) -> None:
        """One batch of six samples, each of ten tokens, in half a second; epochs end after every fourth."""
        self.timestamp = self.timestamp.to_next_batch(BATCH_SIZE, 10 * BATCH_SIZE, timedelta(seconds=0.5))
        if self.timestamp.batch_in_epoch == 4:
            self.timestamp = self.timestamp.to_next_epoch()


def lasting(duration: str | None, dataloader_len: int | None = 4) -> Any:
    return Training(None if duration is None else Time.from_input(duration), dataloader_len)


def sgd(*rates: float) -> SGD:
    return SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (0.1,)])


def rates_of(optimizer: Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def multipliers(scheduler: Any, batches: int, state: Any = None, ssr: float = 1.0) -> list[float]:
    """Return the multiplier before each of so many batches."""
    state = state or lasting("3ep")

    def each() -> Iterator[float]:
        for _ in range(batches):
            yield scheduler(state, ssr)
            state.advance()

    return list(each())


def at(scheduler: Scheduler, batch: int, state: Any = None, ssr: float = 1.0) -> float:
    return multipliers(scheduler, batch + 1, state, ssr)[batch]


@pytest.mark.parametrize("run", OF_THE_RUNS)
def test_rates_are_those_of_the_reference(run: str) -> None:
    recorded = RECORDED[run]
    groups = len(recorded["lr_used"][0])
    optimizer: Optimizer = sgd()
    if groups == 2:
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        optimizer = Adam([{"params": [one], "lr": rate} for one, rate in zip(parameters, (0.01, 0.001), strict=True)])
    state = lasting("10ba" if "10ba" in run else "3ep")
    scheduler = compile_scheduler(OF_THE_RUNS[run](), optimizer, state)
    used, logged = [], []
    for _ in recorded["lr_used"]:
        used.append(rates_of(optimizer))
        scheduler.step()
        state.advance()
        logged += rates_of(optimizer)
    assert used == [pytest.approx(rates, rel=1e-12) for rates in recorded["lr_used"]]
    assert logged == pytest.approx(
        [value for _, values, _ in recorded["logged"] for value in values.values()], rel=1e-12
    )


@pytest.mark.parametrize("make", WITH_WARMUP)
@pytest.mark.parametrize("warmup", ["5ba", "300tok", "0.5dur"])
def test_a_warmup_rises_by_equal_steps_to_where_the_schedule_begins(
    make: Callable[..., Scheduler], warmup: str
) -> None:
    unit = Time.from_input(warmup).unit.value
    state = lasting({"ba": "10ba", "sp": "60sp", "tok": "600tok", "dur": "10ba"}[unit])
    values = multipliers(make(warmup), 10, state)
    assert values[:6] == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(one >= other for one, other in pairwise(values[5:]))


def test_milestones_count_from_the_start_of_the_training_also_after_a_warmup() -> None:
    values = multipliers(MultiStepWithWarmupScheduler("2ba", ["4ba", "6ba"], 0.5), 8)
    assert values == pytest.approx([0.0, 0.5, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25])


@pytest.mark.parametrize("period", ["18sp", "0.25dur"])
def test_a_cosine_restarts_after_each_cycle(period: str) -> None:
    values = multipliers(CosineAnnealingWarmRestartsScheduler(period, alpha_f=0.1), 12)
    cycle = [0.1 + 0.9 * (1 + math.cos(math.pi * part / 3)) / 2 for part in range(3)]
    assert values == pytest.approx(cycle * 4)


def test_cycles_of_a_cosine_grow_by_a_factor_and_are_cut_off_to_whole_batches() -> None:
    values = multipliers(CosineAnnealingWarmRestartsScheduler("3ba", 1.5), 18)
    assert [batch for batch, value in enumerate(values) if value == 1.0] == [0, 3, 7, 13]  # 3, 4.5, 6, 9 batches


@pytest.mark.parametrize("half", ["36sp", "360tok", "3sec", "0.5dur", Time(6, "ba"), timedelta(seconds=3)])
def test_times_are_counted_in_any_unit(half: Any) -> None:
    assert at(LinearScheduler(t_max=half), 3) == pytest.approx(0.5)


def test_epochs_are_counted_in_batches_where_their_number_is_known() -> None:
    assert multipliers(LinearScheduler(t_max="1ep"), 4) == [1.0, 0.75, 0.5, 0.25]
    assert at(ExponentialScheduler(0.25), 2) == pytest.approx(0.5)


def test_without_a_length_of_the_dataloader_rates_move_between_epochs() -> None:
    values = multipliers(LinearScheduler(), 12, lasting("4ep", None))
    assert values == [1.0] * 4 + [0.75] * 4 + [0.5] * 4
    assert multipliers(LinearScheduler(t_max="4ba"), 4, lasting("4ep", None)) == [1.0, 0.75, 0.5, 0.25]


def test_a_schedule_follows_a_training_that_is_extended() -> None:
    state = lasting("4ba")
    assert at(LinearScheduler(), 2, state) == 0.5
    state.max_duration = Time(12, "ba")
    assert LinearScheduler()(state) == 0.75


@pytest.mark.parametrize("ssr", [0.5, 2.0])
@pytest.mark.parametrize(
    "scheduler",
    [
        MultiStepScheduler(["4ba", "1ep", "36sp"]),
        ExponentialScheduler(0.5, "4ba"),
        CosineAnnealingScheduler("4ba"),
        CosineAnnealingWarmRestartsScheduler("4ba", 2.0),
        CosineAnnealingWithWarmupScheduler("2ba", "6ba", scale_warmup=True),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, Scheduler) else str(case),
)
def test_a_schedule_is_stretched_by_the_ratio(scheduler: Scheduler, ssr: float) -> None:
    plain = multipliers(scheduler, 13, lasting("12ba"))
    stretched = multipliers(scheduler, 13, lasting(f"{12 * ssr:g}ba"), ssr)
    if ssr < 1:
        plain, stretched = stretched, plain
    assert stretched[::2] == pytest.approx(plain[:7])


@pytest.mark.parametrize("make", WITH_WARMUP)
def test_a_warmup_is_stretched_only_when_asked_for(make: Callable[..., Scheduler]) -> None:
    assert at(make("2ba"), 1, ssr=2.0) == 0.5
    assert at(make("2ba", scale_warmup=True), 1, ssr=2.0) == 0.25


def test_a_scheduler_resumes_from_its_state_with_another_base_rate_and_optimizer() -> None:
    def train(scheduler: Any, optimizer: Optimizer, state: Any, batches: int) -> list[list[float]]:
        used = []
        for _ in range(batches):
            used.append(rates_of(optimizer))
            scheduler.step()
            state.advance()
        return used

    whole, state = sgd(0.1, 0.03), lasting("3ep")
    expected = train(compile_scheduler(CosineAnnealingScheduler(), whole, state), whole, state, 12)

    first, state = sgd(0.1, 0.03), lasting("3ep")
    scheduler = compile_scheduler(CosineAnnealingScheduler(), first, state)
    used = train(scheduler, first, state, 5)
    saved = json.loads(json.dumps(scheduler.state_dict()))

    second, resumed = sgd(5.0, 5.0), lasting("3ep")
    scheduler = compile_scheduler(CosineAnnealingScheduler(), second, resumed)
    scheduler.load_state_dict(saved)
    resumed.timestamp = state.timestamp
    assert used + train(scheduler, second, resumed, 7) == expected


def test_a_parameter_group_that_joins_later_is_scheduled_from_its_own_rate() -> None:
    optimizer, state = sgd(0.1), lasting("4ba")
    scheduler = compile_scheduler(LinearScheduler(), optimizer, state)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.4})
    state.advance()
    scheduler.step()
    assert rates_of(optimizer) == pytest.approx([0.075, 0.3])


def test_rates_stay_as_they_are_when_training_is_stopped_within_a_batch() -> None:
    optimizer, state = sgd(), lasting("720tok")
    compiled = compile_scheduler(LinearWithWarmupScheduler("180tok"), optimizer, state)
    for _ in range(2):
        state.advance()
        compiled.step()
    before = rates_of(optimizer)
    state.max_duration = Time(2, "ba")
    compiled.step()
    assert rates_of(optimizer) == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: LinearScheduler(t_max="0ba"),
        lambda: ConstantScheduler(t_max="infdur"),
        lambda: StepScheduler("1ep", "0.1"),  # type: ignore[arg-type]
        lambda: CosineAnnealingWarmRestartsScheduler("1ep", 0.5),
        lambda: MultiStepScheduler([]),
        lambda: MultiStepWithWarmupScheduler("1ba", ["1ep", "9ba", "6ba"]),
        lambda: LinearWithWarmupScheduler("9ba", t_max="8ba"),
        lambda: StepScheduler("10steps"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_when_the_schedule_is_made(make: Callable[[], object]) -> None:
    with pytest.raises((ConfigurationError, InvalidTimeError)):
        make()


@pytest.mark.parametrize(
    ("scheduler", "duration", "ssr", "named"),
    [
        (MultiStepWithWarmupScheduler("2ba", ["0.5dur"]), None, 1.0, "milestone"),
        (StepScheduler("1ba"), "50ba", 0.5, "step_size"),
        (LinearWithWarmupScheduler("20ba"), "3ep", 1.0, "t_warmup"),
        (LinearWithWarmupScheduler("6sp"), "3ep", 1.0, "units"),
        (LinearScheduler(), "3ep", 0.0, "ssr"),
        (LinearScheduler, "3ep", 1.0, "LinearScheduler"),
        (lambda state, ssr: math.nan, "3ep", 1.0, "nan"),
    ],
)
def test_schedules_that_do_not_fit_the_training_are_refused_before_it_starts(
    scheduler: Any, duration: str | None, ssr: float, named: str
) -> None:
    optimizer = sgd(0.1)
    with pytest.raises(ConfigurationError, match=named):
        compile_scheduler(scheduler, optimizer, lasting(duration), ssr)
    assert rates_of(optimizer) == [0.1]


def test_a_warmup_in_a_share_of_epochs_needs_the_length_of_the_dataloader() -> None:
    with pytest.raises(ConfigurationError, match="t_warmup"):
        compile_scheduler(LinearWithWarmupScheduler("0.1dur"), sgd(0.1), lasting("3ep", None))
