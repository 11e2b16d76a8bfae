"""Rows as JSON lines."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from offloop.bus.errors import ClosedError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.strict_json import plain
from offloop.consumers.api.logger import Row
from offloop.consumers.loggers.files import FileDestination


def _number(value: Any) -> float | int | str:
    """Convert a subclass of a plain type, such as numpy.float64."""
    return float(value) if isinstance(value, float) else int(value) if isinstance(value, int) else str(value)


_escape = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_encoder = msgspec.json.Encoder(enc_hook=_number)
_find_null = re.compile(b"null").search  # twice as fast as the operator "in"


class JsonlLogger(FileDestination):
    """Writes each row as one JSON object in a line, by default to ``metrics.jsonl`` in the run's directory.

    The keys are ``step``, ``time`` (seconds since 1970) and the metrics. The JSON is strict: NaN and infinities are the
    strings ``NaN``, ``Infinity`` and ``-Infinity``. Hyperparameters are an object with the key ``hyperparameters`` in
    place of ``step``. Equal streams give files with equal bytes. Rows of a history are in the file at most 50 ms after
    their event, rows of a live run at once."""

    name = "jsonl"

    def __init__(self, path: str | None = None, overwrite: bool = False) -> None:
        super().__init__(path, overwrite)
        self._rows: list[Row] = []

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        if self._file is None:
            raise ClosedError(self._not_open)
        self._rows += rows

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any], state: Snapshot) -> None:
        self.flush()
        self._append(_line({"hyperparameters": plain(hyperparameters), "time": state.time}))

    def flush(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            self._append(_lines(rows))

    def state_dict(self) -> dict[str, Any]:
        self.flush()
        return super().state_dict()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            super().close()


def _lines(rows: Sequence[Row]) -> bytes:
    values = [{"step": step, "time": time, **metrics} for step, time, metrics in rows]
    return _encode(values) or b"".join(map(_line, values))


def _encode(values: list[dict[str, Any]]) -> bytes | None:
    """Encode objects as lines; ``None`` for NaN, infinities, or text other than ASCII."""
    try:
        lines = _encoder.encode_lines(values)
    except (TypeError, ValueError):
        return None
    # The encoder writes NaN as null, and characters that some readers take for the end of a line.
    return lines if lines.isascii() and _find_null(lines) is None else None


def _line(values: dict[str, Any]) -> bytes:
    return _encode([values]) or f"{_escape(plain(values))}\n".encode()
