"""Callbacks on real trainings: what they give live and in a replay."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from consumers_stream import Collector
from gold import gold_batches, gold_loader
from helpers import REFERENCE, wait_for
from training import Act, FakeClock, gold_evaluators, gold_trainer

from offloop.bus.recording.recording import Recording
from offloop.bus.types.event import Event
from offloop.consumers import Callback, JsonlLogger, Runner
from offloop.consumers.callbacks.alert import Alert
from offloop.consumers.callbacks.mlperf import MLPerfCallback
from offloop.consumers.callbacks.runtime_estimator import RuntimeEstimator
from offloop.consumers.callbacks.stall_monitor import StallMonitor
from offloop.trainer import Evaluator, State


def test_runtime_estimates_are_those_of_the_reference_live_and_in_replay(runs_dir: Path, tmp_path: Path) -> None:
    runs = json.loads((REFERENCE / "cb_runtime_estimator.json").read_text())["runs"]
    clock = FakeClock(1000.0)

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

    callbacks: list[Callback] = [RuntimeEstimator(time_unit="seconds")]
    trainer = gold_trainer(
        publish=True,
        run_name="timed",
        max_duration="3ep",
        eval_dataloader=gold_evaluators({"eval_a": {"n": 12, "batch_size": 5}, "eval_b": {"n": 8, "batch_size": 4}}),
        algorithms=Act(tick),
        clock=clock,
        callbacks=callbacks,
        loggers=[JsonlLogger(str(tmp_path / "live.jsonl"))],
    )
    with trainer:
        trainer.fit()
    expected = [[step, metrics] for step, _, metrics in runs["ep_eval_1ep"]["logged"]]
    live = [json.loads(line) for line in (tmp_path / "live.jsonl").read_text().splitlines()]
    name = "time/remaining_estimate"
    assert [[row["step"], {name: row[name]}] for row in live if name in row] == expected
    collector = Collector()
    Runner(Recording(runs_dir / "timed"), [RuntimeEstimator(time_unit="seconds")], [collector]).run()
    assert [[row.step, row.metrics] for row in collector.rows] == expected


@pytest.mark.parametrize("name", ["run_target_high", "run_target_low_exit"])
def test_mlperf_results_are_those_of_the_reference_live_and_in_replay(
    name: str, runs_dir: Path, tmp_path: Path
) -> None:
    golden = json.loads((REFERENCE / "cb_mlperf.json").read_text())[name]

    def mlperf(root: Path) -> MLPerfCallback:
        return MLPerfCallback(
            str(root),
            0,
            metric_label="eval_b",
            target=0.9 if name == "run_target_high" else 0.1,
            exit_at_target=name == "run_target_low_exit",
            system_name="mysys",
            submitter="MosaicML",
        )

    trainer = gold_trainer(
        publish=True,
        run_name="gold",
        eval_dataloader=Evaluator("eval_b", gold_loader("eval_b", 8, 4)),
        callbacks=[mlperf(tmp_path / "live")],
    )
    with trainer:
        trainer.fit()
    Runner(Recording(runs_dir / "gold"), [mlperf(tmp_path / "replay")]).run()
    live, replay = ((tmp_path / place / "results/mysys/resnet/result_0.txt") for place in ("live", "replay"))
    assert live.read_text() == replay.read_text()
    found = [json.loads(line.removeprefix(":::MLLOG ")) for line in live.read_text().splitlines()]
    expected = golden["mllog_lines (time_ms, file, lineno removed)"]
    assert [(line["key"], line["value"]) for line in found] == [(line["key"], line["value"]) for line in expected]
    described = json.loads((tmp_path / "live/systems/mysys.json").read_text())
    assert described["host_processor_model_name"]
    assert described["framework"].startswith("PyTorch 2")


class Stuck:
    """A dataloader that hangs before its third batch until ``is_over``."""

    def __init__(self, is_over: Any) -> None:
        self._is_over = is_over

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(gold_batches("train", 24, 6)):
            if number == 2:
                wait_for(self._is_over, "word of the stall", timeout=30)
            yield batch


def test_a_training_that_hangs_in_its_dataloader_is_told_of_while_it_hangs(
    runs_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def is_told() -> bool:
        said.append(capfd.readouterr().err)
        return "hangs after batch 2: in the dataloader, or in batch 3" in "".join(said)

    trainer = gold_trainer(
        train_dataloader=Stuck(is_told),
        publish=True,
        run_name="stuck",
        max_delay=0,
        max_duration="4ba",
        callbacks=[StallMonitor(factor=1, min_seconds=0.3)],
        loggers=[JsonlLogger(str(tmp_path / "log.jsonl"))],
    )
    with trainer:
        trainer.fit()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    live = [(row["step"], row["stall/seconds"], row["stall/count"]) for row in rows if "stall/count" in row]
    assert 3 in [step for step, _, _ in live]
    collector = Collector()
    Runner(Recording(runs_dir / "stuck"), [StallMonitor(factor=1, min_seconds=0.3)], [collector]).run()
    assert [(row.step, *row.metrics.values()) for row in collector.rows] == live


def test_an_alert_knows_the_loss_and_a_field_that_it_asked_for(
    runs_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    alert = Alert(["loss/train/total > 0", "gradient_norm > 0 for 2ba"])
    with gold_trainer(publish=True, run_name="watched", max_duration="1ep", callbacks=[alert]) as trainer:
        trainer.fit()
    err = capfd.readouterr().err
    assert "ALERT: loss/train/total > 0 (loss/train/total is 1." in err
    assert "run watched, epoch 0, batch 2" in err
