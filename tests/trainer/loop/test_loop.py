"""What the training loop computes: weights, losses, times, and how it ends."""

import json
from typing import Any

import pytest
from gold import GoldMLP, gold_loader, gold_optimizer
from helpers import REFERENCE
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from training import Act, FakeClock, fitted, gold_evaluators, gold_trainer

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer import DataSpec, State
from offloop.trainer.data.metrics import read_metrics
from offloop.trainer.schedulers import LinearScheduler

RATES = json.loads((REFERENCE / "cb_lr_monitor.json").read_text())["runs"]
SPEED = json.loads((REFERENCE / "cb_speed_monitor.json").read_text())["runs"]["window3_seconds_tokens_eval"]
LOGGED = json.loads((REFERENCE / "trainer_log_microbatch4_2ep.json").read_text())["calls"]


def test_training_metrics_and_losses_are_those_of_each_batch() -> None:
    seen: list[dict[str, Any]] = []

    def note(event: Event, state: State, logger: object) -> None:
        assert state.total_loss is not None
        seen.append({"loss/train/total": state.total_loss.item()})
        seen.append({f"metrics/train/{name}": value for name, value in read_metrics(state.train_metrics).items()})

    act = Act(note, Event.BATCH_END)
    fitted(20, device_train_microbatch_size=4, algorithms=act)
    expected = [call["data"] for call in LOGGED if call["last_event_before"] == "AFTER_TRAIN_BATCH"]
    expected = [data for data in expected if not any("microbatch" in name for name in data)]
    assert len(seen) == len(expected) == 16
    for ours, theirs in zip(seen, expected, strict=True):
        assert ours == {name: pytest.approx(value, abs=1e-6) for name, value in theirs.items()}


@pytest.mark.parametrize(
    ("name", "every_batch"),
    [
        ("torch:StepLR(step_size=1,gamma=0.5) default=per epoch", None),
        ("torch:CosineAnnealingLR(T_max=12) every batch", True),
    ],
)
def test_schedulers_step_before_batch_end_and_epoch_end(name: str, every_batch: bool | None) -> None:
    model = GoldMLP()
    optimizer = gold_optimizer(model)
    scheduler = CosineAnnealingLR(optimizer, T_max=12) if every_batch else StepLR(optimizer, step_size=1, gamma=0.5)
    used, shown = [], []

    def note(event: Event, state: State, logger: object) -> None:
        (used if event is Event.BEFORE_TRAIN_BATCH else shown).append(optimizer.param_groups[0]["lr"])

    trainer = gold_trainer(
        model=model,
        optimizers=optimizer,
        schedulers=scheduler,
        step_schedulers_every_batch=every_batch,
        max_duration="3ep",
        algorithms=Act(note, Event.BEFORE_TRAIN_BATCH, Event.BATCH_END),
    )
    with trainer:
        trainer.fit()
    assert used == pytest.approx([rates[0] for rates in RATES[name]["lr_used"]])
    assert shown == pytest.approx([logged["lr-SGD/group0"] for _, logged, _ in RATES[name]["logged"]])


def test_wall_clock_times_leave_out_evaluation() -> None:
    clock = FakeClock(1000.0)
    rows = []

    def tick(event: Event, state: State, logger: object) -> None:
        batch, eval_batch = int(state.timestamp.batch), int(state.eval_timestamp.batch)
        clock.seconds += {
            Event.AFTER_DATALOADER: 0.125,
            Event.BEFORE_FORWARD: 0.25 * (1 + batch % 3),
            Event.EVAL_BEFORE_FORWARD: 0.5 * (1 + eval_batch),
            Event.BATCH_CHECKPOINT: 0.0625,
            Event.EPOCH_END: 1.0,
            Event.EVAL_START: 0.25,
            Event.EVAL_END: 2.0,
        }.get(event, 0)
        if event in (Event.BATCH_START, Event.BATCH_END, Event.EPOCH_END, Event.EVAL_END, Event.FIT_END):
            rows.append(clock_row(event, state, clock.seconds))

    trainer = gold_trainer(
        train_dataloader=DataSpec(gold_loader("train", 20, 6), get_num_tokens_in_batch=lambda batch: 7 * len(batch[0])),
        eval_dataloader=gold_evaluators({"eval_b": {"n": 8, "batch_size": 4}}),
        algorithms=Act(tick),
        clock=clock,
    )
    with trainer:
        trainer.fit()
    assert rows == SPEED["inputs"]


def clock_row(event: Event, state: State, now: float) -> list[Any]:
    """Return the columns of the reference's table."""
    timestamp, elapsed = state.timestamp, state.get_elapsed_duration()
    durations = (timestamp.total_wct, timestamp.epoch_wct, timestamp.batch_wct, state.eval_timestamp.total_wct)
    counts = (timestamp.epoch, timestamp.batch, timestamp.batch_in_epoch, timestamp.sample, timestamp.token)
    return [
        *(event.name, now, *(duration.total_seconds() for duration in durations)),
        *(*map(int, counts), elapsed and elapsed.value),
        *(state.dataloader_label, state.dataloader_len, str(state.max_duration)),
    ]


@pytest.mark.parametrize(
    ("max_duration", "batches"),
    [(1, 4), ("20sp", 4), ("25tok", 3), ("5sec", 5)],
)
def test_training_ends_in_any_unit(max_duration: Any, batches: int) -> None:
    clock = FakeClock(0)

    def tick(event: Event, state: State, logger: object) -> None:
        clock.seconds += 1

    data = DataSpec(gold_loader("train", 24, 6), get_num_tokens_in_batch=lambda batch: 10)
    act = Act(tick, Event.BATCH_START)
    trainer = fitted(train_dataloader=data, max_duration=max_duration, algorithms=act, clock=clock)
    assert trainer.state.timestamp.batch == batches


@pytest.mark.parametrize(
    ("max_duration", "stopped_at"),
    [("12sp", "6sp"), ("2ep", "1ba"), ("90tok", "10tok"), ("8sec", "1sec"), ("2iter", "0iter")],
)
def test_a_training_that_is_stopped_keeps_the_unit_of_its_duration_unless_it_is_epochs(
    max_duration: str, stopped_at: str
) -> None:
    clock = FakeClock(0)
    elapsed: list[float] = []

    def tick(_: Event, state: State, logger: object) -> None:
        clock.seconds += 1

    def stop(_: Event, state: State, logger: object) -> None:
        if int(state.timestamp.batch) == 1:
            state.stop_training()
            elapsed.append(float(state.get_elapsed_duration() or 0))

    data = DataSpec(gold_loader("train", 24, 6), get_num_tokens_in_batch=lambda batch: 10)
    trainer = fitted(
        train_dataloader=data,
        max_duration=max_duration,
        iteration_length="1ep",
        algorithms=[Act(tick, Event.BATCH_START), Act(stop, Event.AFTER_LOSS)],
        schedulers=LinearScheduler(),
        progress_bar=True,
        clock=clock,
    )
    assert str(trainer.state.max_duration) == stopped_at
    assert trainer.state.timestamp.batch == 2
    assert elapsed == [1.0]


def test_an_empty_dataloader_does_not_train_forever() -> None:
    with pytest.raises(ConfigurationError):
        fitted(train_dataloader=[], max_duration="1ep")


def test_a_further_training_takes_all_of_the_seconds_that_it_was_given() -> None:
    clock = FakeClock(1000.0)

    def take_time(event: Event, state: State, logger: object) -> None:
        clock.seconds += 0.75

    with gold_trainer(clock=clock, max_duration="2ba", algorithms=Act(take_time, Event.AFTER_TRAIN_BATCH)) as trainer:
        trainer.fit()
        trainer.fit(duration="1sec")
    # From 1.5 s to 3 s.
    assert trainer.state.timestamp.batch == 4
