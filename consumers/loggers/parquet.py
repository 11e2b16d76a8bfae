"""Rows as a table of Parquet files."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offloop.bus.errors import ClosedError, ConfigurationError
from offloop.bus.files import open_directory, open_file, sync
from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers.api.logger import LoggerDestination, LogValue, Row, RunContext
from offloop.consumers.loggers.files import default_path, lock

if TYPE_CHECKING:
    import pyarrow as pa


# Arrow's names of the types, which are also how a position keeps them.
_WHOLE, _NUMBER, _TEXT = "int64", "double", "string"
_FIXED = {"step": _WHOLE, "time": _NUMBER}


class ParquetLogger(LoggerDestination):
    """Writes rows to one wide table of Parquet files, by default in the directory ``metrics.parquet`` of the run's
    directory (``metrics-2.parquet`` for the second attempt of a run, and so on).

    The columns are ``step``, ``time`` (seconds since 1970) and the metrics in the order in which they first appeared; a
    metric that a row does not have is null. Numbers are 64-bit floats, texts are strings, and a metric that was both is
    a column of strings. When a metric appears, the files are written anew with the wider table, one after the other, so
    that all have the same columns. ``pandas.read_parquet("metrics.parquet")`` reads the directory, DuckDB
    ``'metrics.parquet/*.parquet'``. Hyperparameters, images, tables, texts and files are left out.

    A file has ``rows_per_file`` rows, which is what is held in memory. The last one is replaced by a longer one every
    ``flush_interval`` seconds of the run's own time, and whenever the consumer keeps how far it is. Files are replaced
    as a whole, so they can be read at any moment, also after a crash. An existing table is refused unless ``overwrite``
    is true, or unless this is a consumer that goes on: then the table is cut back to where that consumer had committed
    it. A table has one writer at a time. Equal streams give files with equal bytes.
    """

    requires = ("parquet", "pyarrow.parquet")

    def __init__(
        self,
        path: str | None = None,
        rows_per_file: int = 10_000,
        flush_interval: float = 10.0,
        overwrite: bool = False,
    ) -> None:
        if rows_per_file < 1:
            raise ConfigurationError(f"rows_per_file is at least 1, not {rows_per_file}")
        if not flush_interval >= 0:
            raise ConfigurationError(f"flush_interval is a number of seconds, 0 or more, not {flush_interval}")
        self._chosen = None if path is None else Path(path)
        self._rows_per_file = rows_per_file
        self._flush_interval = flush_interval
        self._overwrite = overwrite
        self._directory: Path | None = None
        self._lock: int | None = None
        self._columns: dict[str, str] = dict(_FIXED)
        self._full = 0
        self._written: pa.Table | None = None
        self._rows: list[dict[str, LogValue]] = []
        self._next_flush = float("-inf")
        self._committed: int | None = None

    def open(self, context: RunContext) -> None:
        self._directory = self._chosen or default_path(context, "parquet", "DIR")
        self.where = str(self._directory)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            if self._chosen is None:
                self._lock = open_directory(self._directory)
            else:
                self._lock = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if not lock(self._lock):
                raise self._problem("is being written by another process:")
            if self._committed is None:
                self._begin()
            else:
                self._roll_back(self._committed)
        except OSError as error:
            problem = self._problem(f"cannot be written: {error.strerror};")
            self._release()
            raise problem from None
        except ConfigurationError:
            self._release()
            raise
        self._committed = None

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        if self._directory is None:
            raise ClosedError("parquet was given rows while its table was not open: call open() first")
        for row in rows:
            self._fit_columns(row.metrics)
            self._rows.append({"step": row.step, "time": row.time, **row.metrics})
            if self._row_count() == self._rows_per_file:
                self._flush()
                self._full += 1
                self._written = None
        if state.time >= self._next_flush:
            self._next_flush = state.time + self._flush_interval
            self._flush()

    def close(self) -> None:
        try:
            if self._directory is not None:
                self._flush()
        finally:
            self._release()

    def state_dict(self) -> dict[str, Any]:
        self._flush()
        return {
            "rows": self._full * self._rows_per_file + self._row_count(),
            "rows_per_file": self._rows_per_file,
            "columns": dict(self._columns),
            "next_flush": self._next_flush,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["rows_per_file"] != self._rows_per_file:
            raise ConfigurationError(f"its files have {state['rows_per_file']} rows, not {self._rows_per_file}")
        self._committed = int(state["rows"])
        self._columns = dict(state["columns"])
        self._next_flush = float(state["next_flush"])

    def _begin(self) -> None:
        if self._files() and not self._overwrite:
            raise self._problem("exists: '-o parquet.overwrite=true' replaces it,")
        for file in self._files():
            file.unlink()
        self._columns, self._next_flush = dict(_FIXED), float("-inf")
        self._full, self._written, self._rows = 0, None, []

    def _roll_back(self, rows: int) -> None:
        """Keeps the first ``rows`` rows, and takes those of the file that is not full back into memory."""
        self._full, kept = divmod(rows, self._rows_per_file)
        needed = [(self._file(number), self._rows_per_file) for number in range(self._full)]
        if kept:
            needed.append((self._file(self._full), kept))
        if any(_rows_in(file) < count for file, count in needed):
            raise self._problem(
                f"lacks some of the {rows} rows that this consumer has written: put them back to go on, or begin anew "
                "with another '--name';"
            )
        for file in set(self._files()).difference(file for file, _ in needed):
            file.unlink()
        # Columns that came after the position come again with their rows.
        self._fit_full_files()
        if kept:
            self._written = _fitted(_read(self._file(self._full)).slice(0, kept), self._columns)
            _write(self._file(self._full), self._written)

    def _fit_columns(self, metrics: Mapping[str, LogValue]) -> None:
        """Makes the table such that it can hold those."""
        changed = {}
        for name, value in metrics.items():
            kind = _TEXT if isinstance(value, str) else _NUMBER
            if self._columns.get(name) not in (kind, _TEXT):
                changed[name] = kind
        if changed:
            self._columns |= changed
            self._fit_full_files()
            if self._written is not None:
                self._written = _fitted(self._written, self._columns)
            self._next_flush = float("-inf")

    def _fit_full_files(self) -> None:
        for number in range(self._full):
            file = self._file(number)
            table = _read(file)
            if list(_columns_of(table).items()) != list(self._columns.items()):
                _write(file, _fitted(table, self._columns))

    def _row_count(self) -> int:
        return len(self._rows) + (0 if self._written is None else int(self._written.num_rows))

    def _flush(self) -> None:
        if self._rows:
            new = _table(self._rows, self._columns)
            whole = new if self._written is None else _joined(self._written, new)
            _write(self._file(self._full), whole)
            self._written, self._rows = whole, []

    def _file(self, number: int) -> Path:
        assert self._directory is not None  # called while it is open
        return self._directory / f"part-{number:05}.parquet"

    def _files(self) -> list[Path]:
        assert self._directory is not None  # called while it is open
        return list(self._directory.glob("part-*.parquet"))

    def _problem(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"{self._directory} {what} '-o parquet.path=DIR' writes elsewhere")

    def _release(self) -> None:
        self._directory = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _table(rows: Sequence[Mapping[str, LogValue | None]], columns: Mapping[str, str]) -> "pa.Table":
    import pyarrow as pa

    arrays = [
        pa.array([_converted(row.get(name), kind) for row in rows], pa.type_for_alias(kind))
        for name, kind in columns.items()
    ]
    return pa.Table.from_arrays(arrays, names=list(columns))


def _fitted(table: "pa.Table", columns: Mapping[str, str]) -> "pa.Table":
    return _table(table.to_pylist(), columns)


def _joined(first: "pa.Table", second: "pa.Table") -> "pa.Table":
    import pyarrow as pa

    return pa.concat_tables([first, second]).combine_chunks()


def _converted(value: LogValue | None, kind: str) -> LogValue | None:
    if value is None or kind == _WHOLE:
        return value
    if kind == _NUMBER:
        return float(value)
    return value if isinstance(value, str) else repr(float(value))


def _columns_of(table: "pa.Table") -> dict[str, str]:
    return {field.name: str(field.type) for field in table.schema}


def _read(file: Path) -> "pa.Table":
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as opened:
        return opened.read()


def _rows_in(file: Path) -> int:
    from pyarrow import ArrowException
    from pyarrow.parquet import read_metadata

    try:
        return int(read_metadata(file).num_rows)
    except (FileNotFoundError, ArrowException):
        return 0


def _write(file: Path, table: "pa.Table") -> None:
    """Puts the file there as a whole or not at all."""
    from pyarrow.parquet import write_table

    # Readers of the directory pass over names that begin with a dot.
    temporary = file.with_name(f".{file.name}.new")
    try:
        with open(open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), "wb") as opened:
            write_table(table, opened)
            opened.flush()
            os.fsync(opened.fileno())
    except BaseException:
        # On a full disk, half a file takes room that is needed.
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, file)
    sync(file.parent)
