"""What the reference logs and writes, from real trainings: by consumers that follow them, and from their recordings."""

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gold import GoldMLP, gold_loader, gold_optimizer
from helpers import REFERENCE, wait_for
from reference_options import OF_THE_RUNS as SCHEDULERS
from reference_options import OPTIONS as ESTIMATORS
from reference_options import SPEED_MONITORS
from training import Act, FakeClock, gold_evaluators, gold_trainer

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.recording import Recording
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.bus.types.event import Event
from offloop.consumers import Callback, LoggerDestination, LRMonitor, Runner
from offloop.consumers.api.callback import demand_of
from offloop.consumers.api.logger import Row
from offloop.consumers.callbacks.runtime_estimator import RuntimeEstimator
from offloop.consumers.runner.entries import barrier_events_of, requested_events
from offloop.consumers.runner.runner import RunnerStatistics
from offloop.trainer import DataSpec, State, Trainer

NAME = "golden"
"""What the consumers are called."""

RATES = json.loads((REFERENCE / "cb_lr_monitor.json").read_text())["runs"]
SPEED = json.loads((REFERENCE / "cb_speed_monitor.json").read_text())["runs"]
ESTIMATED = json.loads((REFERENCE / "cb_runtime_estimator.json").read_text())["runs"]
EVAL_A = {"eval_a": {"n": 12, "batch_size": 5}}
EVAL_B = {"eval_b": {"n": 8, "batch_size": 4}}


class Kept(LoggerDestination):
    """Keeps what is logged as the reference lists it."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        """``[step, event, metrics]``"""
        self.hyperparameters: list[dict[str, Any]] = []

    def log_rows(self, rows: Iterable[Row], state: Snapshot) -> None:
        self.calls += [[row.step, state.event.name, row.metrics] for row in rows]

    def log_hyperparameters(self, hyperparameters: Any, state: Snapshot) -> None:
        self.hyperparameters.append(hyperparameters)


def train(
    callbacks: Sequence[Callback], kept: Kept, run_name: str = "myrun", **arguments: Any
) -> tuple[Trainer, RunnerStatistics]:
    """Trains while a consumer in a thread of its own follows the run, from before its first batch on."""

    def is_heard() -> bool:
        publisher = trainer._publisher
        assert publisher is not None
        publisher.poll()
        return publisher.demand_version > 0

    def await_consumer(event: Event, state: State, logger: object) -> None:
        wait_for(is_heard, "what the consumer asks for")

    def follow(stream: Subscriber) -> RunnerStatistics:
        with stream:
            return Runner(stream, callbacks, [kept]).run()

    algorithms = [*arguments.pop("algorithms", ()), Act(await_consumer, Event.FIT_START)]
    with ThreadPoolExecutor(1) as thread:
        with gold_trainer(publish=True, run_name=run_name, algorithms=algorithms, **arguments) as trainer:
            stream = Subscriber(
                run_name,
                events=requested_events(callbacks),
                demand=demand_of(callbacks),
                name=NAME,
                barrier_events=barrier_events_of(callbacks),
            )
            assert stream.live
            running = thread.submit(follow, stream)
            trainer.fit()
        return trainer, running.result(timeout=100)


def replay(runs_dir: Path, callbacks: Sequence[Callback], kept: Kept, run_name: str = "myrun") -> RunnerStatistics:
    """The same consumer, when the training is over."""
    return Runner(Recording(runs_dir / run_name), callbacks, [kept]).run()


def tick(clock: FakeClock) -> Act:
    """Makes the time pass as it did for the reference."""

    def advance(event: Event, state: State, logger: object) -> None:
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

    return Act(advance)


def timed() -> dict[str, Any]:
    """Arguments of a trainer in whose training the time passes so."""
    clock = FakeClock(1000.0)
    return {"clock": clock, "algorithms": [tick(clock)]}


def by_event(calls: Iterable[Sequence[Any]]) -> list[list[Any]]:
    """``[step, event, metrics]``, with what is logged at one event in one, as destinations are given it."""
    rows: list[list[Any]] = []
    for step, event, metrics in calls:
        if rows and rows[-1][:2] == [step, event]:
            rows[-1][2] |= metrics
        else:
            rows.append([step, event, dict(metrics)])
    return rows


# -- LRMonitor --------------------------------------------------------------------------------------------------------


def scheduled(run: str) -> dict[str, Any]:
    """Arguments of a trainer whose rates go as in a run of the reference."""
    model = GoldMLP()
    arguments: dict[str, Any] = {"model": model, "max_duration": "3ep"}
    if run.startswith("torch:"):
        optimizer: torch.optim.Optimizer = gold_optimizer(model)
        arguments["schedulers"] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        arguments["step_schedulers_every_batch"] = True
    else:
        groups = [{"params": model.net[0].parameters(), "lr": 0.01}, {"params": model.net[2].parameters(), "lr": 0.001}]
        optimizer = torch.optim.Adam(groups)
        arguments["schedulers"] = SCHEDULERS[run]()
    return arguments | {"optimizers": optimizer}


# All schedulers are compared in trainer/schedulers/test_schedulers.py.
@pytest.mark.parametrize("run", [run for run in RATES if run.startswith(("two param groups", "torch:Cosine"))])
def test_rates_are_those_of_the_reference_live_and_in_replay(run: str, runs_dir: Path) -> None:
    expected = by_event([step, event, metrics] for step, metrics, event in RATES[run]["logged"])
    live, replayed = Kept(), Kept()
    train([LRMonitor()], live, **scheduled(run))
    replay(runs_dir, [LRMonitor()], replayed)
    assert live.calls == replayed.calls
    assert [call[:2] for call in live.calls] == [call[:2] for call in expected]
    for (*_, metrics), (*_, reference) in zip(live.calls, expected, strict=True):
        assert metrics == pytest.approx(reference, rel=1e-12, abs=1e-17)


# -- SpeedMonitor -----------------------------------------------------------------------------------------------------


class Counted(GoldMLP):
    def flops_per_batch(self, batch: Any) -> int:
        return 100 * len(batch[0])


def sped(run: str) -> dict[str, Any]:
    """Arguments of a trainer as it was in a run of the reference."""
    if run == "flops":
        return {"n_train": 20, "model": Counted(), "max_duration": "1ep", "device_train_microbatch_size": 4}
    loader = gold_loader("train", 20, 6)
    return {
        "train_dataloader": DataSpec(loader, get_num_tokens_in_batch=lambda batch: 7 * len(batch[0])),
        "eval_dataloader": gold_evaluators(EVAL_B),
    }


@pytest.mark.parametrize("run", ["flops", "window3_seconds_tokens_eval"])
def test_speeds_are_those_of_the_reference_live_and_in_replay(run: str, runs_dir: Path) -> None:
    live, replayed, monitor, again = Kept(), Kept(), SPEED_MONITORS[run](), SPEED_MONITORS[run]()
    train([monitor], live, **timed(), **sped(run))
    replay(runs_dir, [again], replayed)
    assert live.calls == replayed.calls == by_event(SPEED[run]["logged"])
    reference = SPEED[run]["state_dict_at_end"]["SpeedMonitor"]
    assert monitor.state_dict() == again.state_dict()
    assert {name: monitor.state_dict()[name] for name in reference} == reference


# -- RuntimeEstimator -------------------------------------------------------------------------------------------------


def test_estimates_are_those_of_the_reference_live_and_in_replay(runs_dir: Path) -> None:
    live, replayed, run = Kept(), Kept(), "ep_eval_1ep"
    evaluators = gold_evaluators(EVAL_A | EVAL_B)
    train([RuntimeEstimator(**ESTIMATORS[run])], live, max_duration="3ep", eval_dataloader=evaluators, **timed())
    replay(runs_dir, [RuntimeEstimator(**ESTIMATORS[run])], replayed)
    assert live.calls == replayed.calls == ESTIMATED[run]["logged"]
    assert live.hyperparameters == replayed.hyperparameters
    *logged, of_the_run = live.hyperparameters
    assert logged == ESTIMATED[run]["hyperparameters"]
    # What the run says of itself comes without a callback.
    assert of_the_run["model/name"] == "GoldMLP"
