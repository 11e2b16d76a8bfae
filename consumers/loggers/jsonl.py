"""Rows as JSON lines."""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from offloop.bus.errors import ClosedError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.strict_json import plain
from offloop.consumers.api.logger import Row
from offloop.consumers.loggers.files import FileDestination

_encode = json.JSONEncoder(allow_nan=False).encode
_encode_numbers = msgspec.json.Encoder().encode
_IN_NUMBERS = b"0123456789.,-"
_MANY = 8


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
        self.write(f"{_text({'hyperparameters': dict(hyperparameters), 'time': state.time})}\n")

    def flush(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            self.write("".join(_lines(rows)))

    def state_dict(self) -> dict[str, Any]:
        self.flush()
        return super().state_dict()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            super().close()


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each row. Many rows of the same names are encoded by column, in a third of the time."""
    for names, group in groupby(rows, lambda row: tuple(row.metrics)):
        entries = [(row.step, row.time, *row.metrics.values()) for row in group]
        if len(entries) < _MANY:
            for entry in entries:
                yield f"{_text(dict(zip(('step', 'time', *names), entry, strict=True)))}\n"
        else:
            columns = map(_texts, zip(*entries, strict=True))
            yield from map(_form(names).__mod__, zip(*columns, strict=True))


@functools.lru_cache(64)
def _form(names: tuple[str, ...]) -> str:
    members = (_encode({name: 0})[1:-2].replace("%", "%%") + "%s" for name in ("step", "time", *names))
    return f"{{{', '.join(members)}}}\n"


def _texts(values: Sequence[Any]) -> Sequence[str]:
    try:
        packed = _encode_numbers(values)[1:-1]
    except TypeError:  # kinds of numbers that are not Python's own
        return list(map(_text, values))
    # Other values leave other characters. Very small and large numbers have another form in Python.
    if packed.translate(None, _IN_NUMBERS) or b"0.0000" in packed:
        return list(map(_text, values))
    return packed.decode().split(",")


def _text(value: Any) -> str:
    if type(value) is float and value - value == 0:
        return float.__repr__(value)
    try:
        return _encode(value)
    except ValueError:
        return _encode(plain(value))
