"""What the reference logs and writes, from real trainings: by consumers that follow them, and from their recordings."""

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gold import gold_loader
from helpers import REFERENCE, wait_for
from reference_options import OPTIONS as ESTIMATORS
from reference_options import SPEED_MONITORS
from training import Act, FakeClock, gold_evaluators, gold_trainer

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.recording import Recording
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.bus.types.event import Event
from offloop.consumers import Callback, LoggerDestination, Runner
from offloop.consumers.api.callback import demand_of
from offloop.consumers.api.logger import Row
from offloop.consumers.callbacks.runtime_estimator import RuntimeEstimator
from offloop.consumers.runner.entries import requested_events
from offloop.trainer import DataSpec, State

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


def train(callbacks: Sequence[Callback], kept: Kept, **arguments: Any) -> None:
    """Trains while a consumer in a thread of its own follows the run, from before its first batch on."""

    def is_heard() -> bool:
        publisher = trainer._publisher
        assert publisher is not None
        publisher.poll()
        return publisher.demand_version > 0

    def await_consumer(event: Event, state: State, logger: object) -> None:
        wait_for(is_heard, "what the consumer asks for")

    def follow(stream: Subscriber) -> None:
        with stream:
            Runner(stream, callbacks, [kept]).run()

    algorithms = [*arguments.pop("algorithms"), Act(await_consumer, Event.FIT_START)]
    with ThreadPoolExecutor(1) as thread:
        with gold_trainer(publish=True, run_name="r", algorithms=algorithms, **arguments) as trainer:
            stream = Subscriber("r", events=requested_events(callbacks), demand=demand_of(callbacks))
            assert stream.live
            running = thread.submit(follow, stream)
            trainer.fit()
        running.result(timeout=100)


def replay(runs_dir: Path, callbacks: Sequence[Callback], kept: Kept) -> None:
    """The same consumer, when the training is over."""
    Runner(Recording(runs_dir / "r"), callbacks, [kept]).run()


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


def test_speeds_are_those_of_the_reference_live_and_in_replay(runs_dir: Path) -> None:
    run = "window3_seconds_tokens_eval"
    live, replayed, monitor, again = Kept(), Kept(), SPEED_MONITORS[run](), SPEED_MONITORS[run]()
    data = DataSpec(gold_loader("train", 20, 6), get_num_tokens_in_batch=lambda batch: 7 * len(batch[0]))
    train([monitor], live, **timed(), train_dataloader=data, eval_dataloader=gold_evaluators(EVAL_B))
    replay(runs_dir, [again], replayed)
    assert live.calls == replayed.calls == by_event(SPEED[run]["logged"])
    reference = SPEED[run]["state_dict_at_end"]["SpeedMonitor"]
    assert monitor.state_dict() == again.state_dict()
    assert {name: monitor.state_dict()[name] for name in reference} == reference


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
