"""Rows as a table."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers.api.logger import Row
from offloop.consumers.loggers.files import FileDestination

_FIXED = ["step", "time"]


class CsvLogger(FileDestination):
    """Writes each row as a line of one wide table, by default to ``metrics.csv`` in the run's directory.

    The columns are ``step``, ``time`` (seconds since 1970) and the metrics in the order of their first values; a metric
    that a row lacks is left empty. A new metric replaces the file by one with a wider header. Hyperparameters are left
    out. Equal streams give files with equal bytes."""

    name = "csv"
    blank = "step,time\n"

    def __init__(self, path: str | None = None, overwrite: bool = False) -> None:
        super().__init__(path, overwrite)
        self._metrics: dict[str, None] = {}

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        new = {name: None for row in rows for name in row.metrics if name not in self._metrics}
        if new:
            self._metrics |= new
            self.replace_file(_widened(self.opened_path, len(new), self._header()))
        self.write(_lines([row.step, row.time, *(row.metrics.get(name, "") for name in self._metrics)] for row in rows))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "metrics": list(self._metrics)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._metrics = dict.fromkeys(state["metrics"])

    def begin(self) -> None:
        # A pipe cannot be read again and replaced; reading it would wait forever.
        if not self.opened_path.is_file():
            raise self._problem("is not a regular file, which a table with new columns needs:")
        self._metrics = {}
        super().begin()

    def roll_back(self, length: int, checksum: int) -> None:
        """Cut the open file to the committed rows, and to the committed columns if it has become wider."""
        committed = self._header()
        found = next(_read(self.opened_path), [])
        if len(found) > len(committed) and found[: len(committed)] == committed:
            self.replace_file(_narrowed(self.opened_path, len(committed), length), (length, checksum))
        else:
            super().roll_back(length, checksum)

    def _header(self) -> list[str]:
        return [*_FIXED, *self._metrics]


def _lines(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _read(path: Path) -> Iterator[list[str]]:
    # Anything may follow the committed part, also half a character.
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        yield from csv.reader(file)


def _widened(path: Path, columns: int, header: list[str]) -> Iterator[str]:
    rows = _read(path)
    next(rows)
    yield _lines([header])
    for row in rows:
        yield _lines([row + [""] * columns])


def _narrowed(path: Path, columns: int, length: int) -> Iterator[str]:
    written = 0
    for row in _read(path):
        line = _lines([row[:columns]])
        written += len(line.encode())
        if written > length:
            return
        yield line
