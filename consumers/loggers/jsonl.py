"""Rows as JSON lines."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bus.protocol.snapshot import Snapshot
from bus.strict_json import plain
from consumers.api.logger import Row
from consumers.loggers.files import FileDestination

_encode = json.JSONEncoder(allow_nan=False).encode


class JsonlLogger(FileDestination):
    """Writes each row as one JSON object in a line, by default to ``metrics.jsonl`` in the run's directory.

    The keys are ``step``, ``time`` (seconds since 1970) and the metrics. The JSON is strict: NaN and infinities are the
    strings ``NaN``, ``Infinity`` and ``-Infinity``. Hyperparameters are an object with the key ``hyperparameters`` in
    the place of ``step``. Equal streams give files with equal bytes.
    """

    name = "jsonl"

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        """Writes a line for each."""
        self.write("".join(_line({"step": row.step, "time": row.time, **row.metrics}) for row in rows))

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any], state: Snapshot) -> None:
        """Writes one line."""
        self.write(_line({"hyperparameters": dict(hyperparameters), "time": state.time}))


def _line(entry: dict[str, Any]) -> str:
    try:
        return f"{_encode(entry)}\n"
    except ValueError:
        return f"{_encode(plain(entry))}\n"
