"""JSON that the project writes, as programs other than Python's read it: it has no NaN and no infinities."""

import math
from pathlib import Path

from click.testing import CliRunner
from helpers import strict_json

from offloop.bus import Publisher, Recording
from offloop.bus.cli.main import bus
from offloop.consumers import JsonlLogger, TrainerMetrics
from offloop.consumers.callbacks.nan_monitor import NaNMonitor
from offloop.consumers.runner.runner import run_session


def test_what_is_not_finite_is_a_text_in_all_json_of_a_run(runs_dir: Path, tmp_path: Path) -> None:
    with Publisher("r", info={"config": {"lr": math.nan}}) as publisher:
        publisher.publish("fit_start")
        publisher.publish("batch_end", batch=1, loss=math.nan, lr={"SGD": [math.inf]}, train_metrics={"a": -math.inf})
        publisher.publish("eval_end", dataloader_label="eval", eval_metrics={"eval": {"accuracy": math.nan}})
    callbacks = [TrainerMetrics(), NaNMonitor()]
    logger = JsonlLogger(str(tmp_path / "metrics.jsonl"))
    _, statistics = run_session(lambda _, __: Recording(publisher.recording), callbacks, [logger])
    assert statistics.problems == []
    rows = [strict_json(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any(row.get("metrics/train/a") == "-Infinity" for row in rows)
    assert strict_json((runs_dir / "r" / "run.json").read_text())["attempts"][0]["info"]["config"] == {"lr": "NaN"}
    for arguments in (["runs"], ["show", "r"], ["compare", "r", "r"], ["compare", "r", "r", "--events"]):
        strict_json(CliRunner().invoke(bus, [*arguments, "--json"]).stdout)
