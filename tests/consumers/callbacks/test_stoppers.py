"""The stoppers decide what the reference's decide: from its rows, live in a training, and over its recording."""

import json
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from gold import gold_loader
from helpers import REFERENCE, wait_for
from training import gold_trainer

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers import CannotWorkError, Logger, LRMonitor
from offloop.consumers.callbacks.stoppers import EarlyStopper, Stopper, ThresholdStopper
from offloop.trainer import Evaluator

RUNS = json.loads((REFERENCE / "cb_stoppers.json").read_text())["runs"]

STOPPERS: dict[str, Callable[[], Stopper]] = {
    "early_acc_patience1": lambda: EarlyStopper("MyAccuracy", "eval_a", patience=1),
    "early_acc_patience0": lambda: EarlyStopper("MyAccuracy", "eval_a", patience=0),
    "early_acc_min_delta": lambda: EarlyStopper("MyAccuracy", "eval_a", patience=1, min_delta=0.15),
    "early_loss_comp_gt": lambda: EarlyStopper("MyLoss", "eval_a", comp="gt", patience=1),
    "early_train_label_2ba": lambda: EarlyStopper("MyAccuracy", "train", patience="2ba"),
    "threshold_acc": lambda: ThresholdStopper("MyAccuracy", "eval_a", 0.3),
    "threshold_train_epoch": lambda: ThresholdStopper("MyAccuracy", "train", 0.22),
    "early_real_accuracy": lambda: EarlyStopper("MulticlassAccuracy", "eval_a", patience=1),
}

Row = list[Any]
Asked = list[tuple[Event, int]]


def rows_of(run: str) -> list[Row]:
    return [row for row in RUNS[run]["rows"] if isinstance(row, list)]


def stop_of(run: str) -> tuple[Event, int]:
    *_, change = (row for row in RUNS[run]["rows"] if isinstance(row, dict))
    return Event(change["first_seen_at"]), change["batch"]


def snapshot_of(row: Row, monitor: str, asked: Asked, **fields: Any) -> Snapshot:
    event, label, epoch, batch, value = Event(row[0]), *row[1:5]
    if value is not None and event is Event.EVAL_END:
        fields["eval_metrics"] = {label: {monitor: value}}
    elif value is not None:
        fields["train_metrics"] = {monitor: value}
    return Snapshot.build(
        event,
        timestamp=Timestamp(epoch=epoch, batch=batch),
        dataloader_label=label,
        on_command=lambda name, arguments: asked.append((event, batch)) if name == "stop" else None,
        **fields,
    )


def hand(stopper: Stopper, snapshot: Snapshot) -> None:
    if snapshot.event in stopper.demand().events:
        stopper.run_event(snapshot.event, snapshot, Logger())


def kept(stopper: Stopper) -> list[Any]:
    occurred = getattr(stopper, "best_occurred", None)
    return [getattr(stopper, "best", None), occurred and [int(occurred.epoch), int(occurred.batch)]]


@pytest.mark.parametrize("run", STOPPERS)
def test_a_stopper_keeps_and_decides_what_the_reference_does_also_one_that_goes_on(run: str) -> None:
    stopper, asked = STOPPERS[run](), []
    for number, row in enumerate(rows_of(run)):
        hand(stopper, snapshot_of(row, stopper.monitor, asked))
        assert kept(stopper) == row[5:7]
        if number % 2:
            fresh = STOPPERS[run]()
            fresh.load_state_dict(msgpack.unpackb(msgpack.packb(stopper.state_dict())))
            stopper = fresh
    assert asked[0] == stop_of(run)


def training_of(run: str, **arguments: Any) -> Any:
    evaluator = Evaluator("eval_a", gold_loader("eval_a", 12, 5))
    settings = {"max_duration": RUNS[run]["rows"][0]["new_max_duration"], **arguments}
    return gold_trainer(eval_dataloader=evaluator, publish=True, run_name=run, **settings)


# -- what the reference does wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "values", "best", "asks"),
    [
        ({}, [math.nan, 0.5, 0.6, 0.7], [math.nan, 0.5, 0.6, 0.7], []),  # any number is better than NaN
        ({}, [math.nan] * 3, [math.nan] * 3, [3]),
        ({}, [0.5, math.nan, math.nan], [0.5] * 3, [3]),
        ({"min_delta": 0.15, "patience": 5}, [0.1, 0.2, 0.3], [0.1, 0.1, 0.3], []),  # better by less is no improvement
    ],
)
def test_nan_and_what_is_hardly_better_are_no_improvement(
    options: Any, values: list[float], best: list[float], asks: list[int]
) -> None:
    stopper, asked, found = EarlyStopper("MyAccuracy", "eval_a", **options), [], []
    for epoch, value in enumerate(values, 1):
        hand(stopper, snapshot_of(["EVAL_END", "eval_a", epoch, 2 * epoch, value], "MyAccuracy", asked))
        kept_value, since = kept(stopper)
        found.append(kept_value)
        assert since == [1 + best.index(kept_value), 2 + 2 * best.index(kept_value)] or math.isnan(kept_value)
    assert list(map(str, found)) == list(map(str, best))
    assert asked == [(Event.EVAL_END, 2 * epoch) for epoch in asks]


@pytest.mark.parametrize("monitor", ["time", "log/time", "hours"])
def test_a_logged_value_is_found_by_its_name_and_by_the_one_under_which_it_is_shown(monitor: str) -> None:
    stopper, asked = ThresholdStopper(monitor, "logged", 3), []
    for batch in (1, 2, 3, 4):
        logged = [[batch - 1, {"time": float(batch), "hours": float(batch)}]]
        hand(stopper, snapshot_of(["BATCH_END", "train", 0, batch, None], monitor, asked, logged=logged))
    assert asked[0] == (Event.BATCH_END, 4)


def test_a_label_that_does_not_come_is_an_error_at_the_end_of_the_first_evaluation() -> None:
    stopper, asked = EarlyStopper("MyAccuracy", "nope"), []
    hand(stopper, snapshot_of(["EVAL_END", "eval_a", 1, 2, 0.1], "MyAccuracy", asked))
    metrics = {"eval_a": {"MyAccuracy": 0.25}, "eval_b": {"MyAccuracy": 0.5, "MyLoss": 1.0}}
    after_all = Snapshot.build(Event.EVAL_AFTER_ALL, timestamp=Timestamp(batch=2), eval_metrics=metrics)
    with pytest.raises(CannotWorkError, match="eval_a/MyAccuracy, eval_b/MyAccuracy, eval_b/MyLoss"):
        hand(stopper, after_all)
    announced = EarlyStopper("MyAccuracy", "nope")
    hand(announced, Snapshot.build(Event.FIT_START, evaluators=["eval_a", "nope"]))
    announced.load_state_dict(msgpack.unpackb(msgpack.packb(announced.state_dict())))
    hand(announced, after_all)  # that one may be evaluated less often


def test_a_label_that_never_came_is_an_error_at_the_end_of_the_training() -> None:
    stopper, asked = EarlyStopper("MyAccuracy", "nope"), []
    end = Snapshot.build(Event.FIT_END, eval_metrics={"eval_a": {"MyAccuracy": 0.25}})
    with pytest.raises(CannotWorkError):
        hand(stopper, end)
    seen = EarlyStopper("MyAccuracy", "eval_a")
    hand(seen, snapshot_of(["EVAL_END", "eval_a", 1, 2, 0.1], "MyAccuracy", asked))
    hand(seen, Snapshot.build(Event.FIT_END))
    # It was evaluated before the training was resumed.
    hand(EarlyStopper("MyAccuracy", "eval_a"), end)


def test_a_trainer_does_not_wait_for_a_stopper_that_cannot_work(
    runs_dir: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    callbacks = [EarlyStopper("nope", "eval_a"), LRMonitor()]
    with training_of("early_real_accuracy", callbacks=callbacks, wait_for="callbacks", wait_seconds=60) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.epoch == trainer.state.max_duration
        publisher = trainer._publisher
        wait_for(lambda: publisher.poll() or not publisher.consumers, "nobody to be waited for")
    told = capfd.readouterr().err
    assert "'eval_a' has no metric 'nope'" in told
    assert "Traceback" not in told
    assert caplog.text == ""


# -- options ----------------------------------------------------------------------------------------------------------


def test_less_is_better_where_the_name_says_so() -> None:
    for name in ("MyLoss", "top1_error", "LanguagePerplexity", "CrossEntropy", "metrics/eval/MSE"):
        assert EarlyStopper(name, "b").comp_func is ThresholdStopper(name, "b", 1).comp_func is operator.lt
    assert EarlyStopper("Accuracy", "b").comp_func is operator.gt


@pytest.mark.parametrize("comp", ["less", operator.lt, torch.lt, np.less, lambda a, b: a < b])
def test_a_comparison_is_a_word_or_a_function_of_python_torch_or_numpy(comp: Any) -> None:
    stopper, asked = ThresholdStopper("Score", "eval_a", 0.3, comp=comp), []
    for batch, value in enumerate((0.4, 0.3, 0.2)):
        hand(stopper, snapshot_of(["EVAL_END", "eval_a", 0, batch, value], "Score", asked))
    assert asked == [(Event.EVAL_END, 2)]


@pytest.mark.parametrize(("value", "stops"), [(0.3, False), (float(np.float32(0.3)), False), (0.30000001, True)])
def test_a_metric_in_single_precision_has_not_passed_a_threshold_that_it_equals(value: float, stops: bool) -> None:
    stopper, asked = ThresholdStopper("Score", "eval_a", 0.3), []
    hand(stopper, snapshot_of(["EVAL_END", "eval_a", 0, 1, value], "Score", asked))
    assert bool(asked) == stops
