"""Recordings in formats of other tools: CSV, lines of JSON, Parquet, a timeline."""

import base64
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offloop.bus.errors import ConfigurationError, ProtocolError, close_matches, require
from offloop.bus.files import atomic_output
from offloop.bus.lazy import LazyModule
from offloop.bus.protocol.frames import COMMAND, END
from offloop.bus.protocol.tables import RowsAdded
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.source import Recorded, RecordSource, is_known, is_mark, snapshot_of
from offloop.bus.recording.tables import read_rows, require_table
from offloop.bus.strict_json import flatten, json_text
from offloop.bus.tools.convert import Written, nothing_chosen
from offloop.bus.tools.rows import FORMATS, as_row, clock
from offloop.bus.tools.trace import TraceWriter
from offloop.bus.types.event import TABLE, Event

if TYPE_CHECKING:
    import pyarrow as pa
else:
    pa = LazyModule("pyarrow")


def exported_path(recording: Path, to: str, table: str | None = None) -> Path:
    return recording.with_name(recording.stem + (f"-{table}" if table else "") + FORMATS[to])


def export(
    path: Path,
    output: Path,
    to: str,
    *,
    events: Collection[Event] | None = None,
    ranks: Collection[int] | None = None,
    table: str | None = None,
    force: bool = False,
) -> Written:
    """Write the events of a recording to ``output``, in recorded order, or the rows of one of its tables.

    ``parquet`` and ``csv`` have a row for each event and a column for each field, ``jsonl`` an object for each event;
    ``trace`` is a timeline for Perfetto, see :class:`offloop.bus.tools.trace.TraceWriter`. Commands and the ending are
    the rows ``$command`` and ``$end``, unless ``events`` chooses events; rows of tables only if it does. Damaged parts
    are skipped and named. Memory
    does not grow with the recording, except for the list of missing events. Of a growing recording, the events recorded
    at the beginning are exported.

    Args:
        path: The recording.
        output: The file to write, replaced only with ``force``.
        to: One of :data:`~offloop.bus.tools.rows.FORMATS`.
        events, ranks: Events and ranks to export; all by default.
        table: The name of a table: each of its rows becomes a row. Not for ``trace``.

    Raises ConfigurationError for an unknown format or rank, if no event is chosen, if ``output`` exists, or without
    PyArrow; RecordingError if ``path`` is not a recording; RunDirectoryError if ``output`` cannot be written."""
    if to not in FORMATS:
        raise ConfigurationError(
            f"{to!r} is not an export format: {close_matches(to, list(FORMATS))}use {', '.join(FORMATS)}"
        )
    source = RecordSource(path, ranks)
    chosen = _Chosen(source, events if table is None else [Event(f"{TABLE}{table}")])
    with atomic_output(output, [path], force) as draft:
        if to == "trace":
            _write_trace(chosen, draft)
        else:
            write = {"parquet": write_parquet, "csv": write_csv, "jsonl": write_jsonl}[to]
            write(_Rows(chosen, table is not None), draft)
        for rank in sorted(set(ranks or ()) - source.ranks):
            there = ", ".join(map(str, sorted(source.ranks))) or "none"
            raise ConfigurationError(f"{path} has no rank {rank}: choose from {there} with '--ranks'")
        if table is not None and not chosen.events:
            require_table(table, {part.table for part in read_rows([Recording(path)])}, str(path))
        if not chosen.events:
            raise nothing_chosen(path, source.damage)
    return Written(
        path=output,
        events=chosen.events,
        marks=0 if to == "trace" else chosen.marks,
        ending=source.ending,
        damage=tuple(source.damage),
        gaps=tuple(source.gaps),
        left_out=tuple(source.left_out),
        lost=source.lost,
    )


class _Chosen:
    """The exported records: the same in each iteration, even if the recording grows."""

    def __init__(self, source: RecordSource, events: Collection[Event] | None) -> None:
        self.source = source
        self._names = None if events is None else frozenset(event.value for event in events)
        self._limit: int | None = None
        self.events = 0
        self.marks = 0

    def _is_default(self, record: Recorded) -> bool:
        name = record.topic.name
        return name in (COMMAND, END) if is_mark(record) else not name.startswith(TABLE)

    def __iter__(self) -> Iterator[Recorded]:
        count = self.events = self.marks = 0
        for record in self.source:
            # To its end in any case, as missing events are known only then.
            name, names = record.topic.name, self._names
            is_chosen = name in names if names is not None else self._is_default(record)
            if is_chosen and (self._limit is None or count < self._limit):
                count += 1
                self.events += not is_mark(record)
                self.marks += is_mark(record)
                yield record
        self._limit = count


class _Rows:
    """The rows of a file, the same in each iteration: one for each event, or those that events add to a table."""

    def __init__(self, chosen: _Chosen, of_table: bool) -> None:
        self._chosen = chosen
        self._of_table = of_table

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for record in self._chosen:
            if not self._of_table:
                yield as_row(record)
                continue
            with suppress(ProtocolError):
                for row in RowsAdded.of(snapshot_of(record)).records():
                    yield {**row, "utc": record.event.time}


def _write_trace(chosen: _Chosen, path: Path) -> None:
    source = chosen.source
    shown = 0
    with path.open("w", encoding="utf-8") as file:
        writer = TraceWriter(file)
        for record in chosen:
            if is_known(record):
                writer.see(snapshot_of(record))
            for outcome in source.outcomes[shown:] if record.topic.name == COMMAND else ():
                writer.command(outcome, record.event.time)
                shown += 1
        writer.close(source.ending)


_BARE = re.compile(r'[^",\r\n]+')

_LONG = 1 << 63
_EXACT = 1 << 53  # up to it a float represents every integer
_ROWS_IN_A_GROUP = 10_000
_CELLS_IN_A_GROUP = 1_000_000
_BYTES_IN_A_GROUP = 16 * 1024 * 1024


def write_csv(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Write a table with a header.

    Missing values and ``None`` are empty, an empty text is ``""``; lists and booleans are JSON, bytes base64; NaN and
    infinities are ``nan``, ``inf`` and ``-inf``. ``rows`` is read twice: for the columns, in order of their first
    occurrence, and for their cells."""
    columns = list(dict.fromkeys(chain.from_iterable(map(flatten, rows))))
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(csv_line(columns))
        for row in map(flatten, rows):
            row["utc"] = clock(row["utc"])
            file.write(csv_line(row.get(name) for name in columns))


def _cell(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if type(value) in (int, float):
        return repr(value)
    return base64.b64encode(value).decode() if isinstance(value, bytes) else json_text(value)


def csv_line(values: Iterable[Any]) -> str:
    # The library's writer does not quote a carriage return, where its reader ends the line, and cannot distinguish
    # empty text from None.
    return ",".join("" if cell is None else _quoted(cell) for cell in map(_cell, values)) + "\n"


def _quoted(text: str) -> str:
    return text if _BARE.fullmatch(text) else '"' + text.replace('"', '""') + '"'


def write_jsonl(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Write one JSON object per row and line, with nested maps and lists, see :func:`json_text`."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            row["utc"] = clock(row["utc"])
            file.write(f"{json_text(row)}\n")


def write_parquet(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Write a table with typed columns: integers, floats, texts, bytes, booleans, lists of these.

    Missing values are null. A column with several types, or lists of maps, has texts: JSON, except for values that are
    texts. ``utc`` is a timestamp in nanoseconds. ``rows`` is read twice: for the columns, and for groups of rows."""
    require("'--to parquet'", "parquet", "pyarrow.parquet")
    from pyarrow.parquet import ParquetWriter

    columns: dict[str, _Column] = {}
    for row in rows:
        for name, value in flatten(row).items():
            columns.setdefault(name, _Column()).see(value)
    types = {name: column.arrow_type() or pa.string() for name, column in columns.items()}
    if types:
        types["utc"] = pa.timestamp("ns", tz="UTC")
    schema = pa.schema(list(types.items()))
    with path.open("wb") as file, ParquetWriter(file, schema, compression="zstd") as writer:
        for group in _groups(rows, max(1, min(_ROWS_IN_A_GROUP, _CELLS_IN_A_GROUP // max(1, len(types))))):
            writer.write_table(_table(group, schema))


class _Column:
    def __init__(self) -> None:
        self._kinds: set[str] = set()
        self._items: _Column | None = None

    def see(self, value: Any) -> None:
        if value is None:
            return
        kind = type(value).__name__
        if kind == "int" and abs(value) > _EXACT:
            kind = "long" if -_LONG <= value < _LONG else "large"
        elif kind == "list":
            self._items = self._items or _Column()
            for item in value:
                self._items.see(item)
        self._kinds.add(kind)

    def arrow_type(self) -> "pa.DataType | None":
        if not self._kinds:
            return pa.null()
        if self._kinds == {"int", "float"}:
            return pa.float64()
        if self._kinds <= {"int", "long"}:
            return pa.int64()
        if len(self._kinds) > 1:
            return None
        (kind,) = self._kinds
        if kind == "list":
            items = self._items and self._items.arrow_type()
            return None if items is None else pa.list_(items)
        plain = {"float": pa.float64(), "bool": pa.bool_(), "str": pa.string(), "bytes": pa.binary()}
        return plain.get(kind)


def _groups(rows: Iterable[dict[str, Any]], count: int) -> Iterator[list[dict[str, Any]]]:
    group: list[dict[str, Any]] = []
    size = 0
    for row in map(flatten, rows):
        group.append(row)
        size += sum(len(value) for value in row.values() if isinstance(value, str | bytes | list))
        if len(group) == count or size >= _BYTES_IN_A_GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def _table(rows: list[dict[str, Any]], schema: "pa.Schema") -> "pa.Table":
    arrays = []
    for column in schema:
        values = [row.get(column.name) for row in rows]
        if pa.types.is_string(column.type):
            values = [value if value is None or isinstance(value, str) else json_text(value) for value in values]
        arrays.append(pa.array(values, column.type))
    return pa.Table.from_arrays(arrays, schema=schema)
