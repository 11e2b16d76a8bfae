"""The runs of the reference's MLPerf logger, and the lines that are compared."""

import json
from pathlib import Path
from typing import Any

from helpers import REFERENCE

from offloop.consumers.callbacks.mlperf import MLPerfCallback

GOLDEN = json.loads((REFERENCE / "cb_mlperf.json").read_text())

RUNS = ["run_target_high", "run_target_low_exit", "run_target_low_noexit"]

LINES = "mllog_lines (time_ms, file, lineno removed)"

SIZES: dict[str, Any] = {
    "seed": 17,
    "global_train_batch_size": 6,
    "device_train_microbatch_size": 6,
    "train_samples": 24,
    "eval_samples": 8,
}

SYSTEM: dict[str, Any] = {"cpu": "Some CPU", "cpu_cores": 4, "memory_bytes": 64 * 2**30, "torch": "2.13.0", "nodes": 1}


def mlperf(root: Path, run: str = "run_target_high", **options: Any) -> MLPerfCallback:
    settings: dict[str, Any] = {
        "metric_label": "eval_b",
        "system_name": "mysys",
        "submitter": "MosaicML",
        "target": 0.9 if run == "run_target_high" else 0.1,
        "exit_at_target": run == "run_target_low_exit",
    }
    return MLPerfCallback(str(root), 0, **(settings | options))


def lines_of(root: Path) -> list[dict[str, Any]]:
    text = (root / "results/mysys/resnet/result_0.txt").read_text()
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in text.splitlines()]


def stable(line: dict[str, Any]) -> dict[str, Any]:
    metadata = {key: value for key, value in line["metadata"].items() if key not in ("file", "lineno")}
    return {key: value for key, value in line.items() if key != "time_ms"} | {"metadata": metadata}
