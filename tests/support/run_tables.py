"""Tables of runs that were never recorded."""

import time
from typing import Any

from offloop.bus.index.entry import MetricValues, RunEntry
from offloop.bus.index.table import RunTable

ACCURACY = "metrics/eval/accuracy"


def entry(name: str, accuracy: float = 0.5, **values: Any) -> RunEntry:
    now = time.time()
    usual = {"status": "finished", "started": now - 1000, "ended": now - 900, "attempts": 1, "size": 2048}
    metrics = {ACCURACY: MetricValues(accuracy / 2, 9, 0.0, 1, accuracy, 5)}
    return RunEntry(name, **{**usual, "metrics": metrics, **values})


def table(*entries: RunEntry) -> RunTable:
    return RunTable({one.run: one for one in entries})
