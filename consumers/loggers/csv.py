"""Rows as a table."""

import csv
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from bus.snapshot import Snapshot
from consumers.logger import Row, RunPlace
from consumers.loggers.files import FileDestination

__all__ = ["CsvLogger"]


class CsvLogger(FileDestination):
    """Writes each row as a line of one wide table, by default to ``metrics.csv`` in the run's directory.

    The columns are ``step``, ``time`` (seconds since 1970) and the metrics in the order in which they first appeared; a
    metric that a row does not have is left empty. When a new metric appears, the file is replaced as a whole by one
    with the wider header. Hyperparameters are left out. Equal streams give files with equal bytes.
    """

    name = "csv"

    def __init__(self, path: str | None = None, overwrite: bool = False) -> None:
        super().__init__(path, overwrite)
        self._metrics: dict[str, None] = {}

    def open(self, place: RunPlace) -> None:
        """Creates the file with its header."""
        super().open(place)
        _write(self.file, [self._header()])

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        """Writes a line for each."""
        new = {name: None for row in rows for name in row.metrics if name not in self._metrics}
        if new:
            self._metrics |= new
            self.replace_file(lambda file: self._copy_widened(file, len(new)))
        _write(
            self.file, ([row.step, row.time, *(row.metrics.get(name, "") for name in self._metrics)] for row in rows)
        )

    def _header(self) -> list[str]:
        return ["step", "time", *self._metrics]

    def _copy_widened(self, file: TextIO, columns: int) -> None:
        with open(self.file.name, encoding="utf-8", newline="") as old:
            lines = csv.reader(old)
            next(lines)
            _write(file, [self._header()])
            _write(file, (line + [""] * columns for line in lines))


def _write(file: TextIO, lines: Iterable[Iterable[Any]]) -> None:
    csv.writer(file, lineterminator="\n").writerows(lines)
