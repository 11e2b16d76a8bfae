"""The rows of runs' tables, in a temporary database: found, sorted and counted there, and read in windows."""

import math
import sqlite3
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from offloop.bus.errors import ConfigurationError, ProtocolError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.tables import RowsAdded
from offloop.bus.strict_json import json_text
from offloop.bus.types.event import ANY_TABLE
from offloop.bus.types.table import FIXED
from offloop.consumers.api.images import as_png
from offloop.consumers.api.optional import np
from offloop.consumers.dashboard.view.own_events import OwnEvents
from offloop.consumers.dashboard.view.run_view import RunView

MAX_BYTES = 4 << 30  # of the database; later rows are left out
MOST_SHOWN = 500_000  # rows of one search: a browser cannot scroll further
MAX_TABLES = 100
MAX_COLUMNS = 400  # of one table
_CACHE_BYTES = 16 << 20
_PAGE_BYTES = 4096
_KEPT_SEARCHES = 8
_SHORT = 160  # characters of a text in a window
_BARS = 24
_MOST_TEXTS = 20
_MOST_TESTS = 20
_LONGEST_PATTERN = 1000
_MOST_RUNS = 1 << 31  # numbers that SQLite takes
_HASH_BYTES = 16
NUMBER, TEXT, IMAGE = 1, 2, 4
"""Kinds of cells, as bits."""
_FIXED = ("run", *FIXED)
_FORMATS = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"RIFF": "image/webp", b"GIF8": "image/gif"}


class Filter(msgspec.Struct, frozen=True):
    """Limits the values of a column: to a range, to texts that contain one, or to the value of a row."""

    column: str
    low: float | None = None
    high: float | None = None
    contains: str | None = None
    row: int | None = None


class Search(msgspec.Struct, frozen=True):
    """Rows of a table up to ``until``, in an order; columns are given by their keys."""

    table: str
    find: str = ""  # words; each is in one of the texts of a row
    filters: tuple[Filter, ...] = ()
    sort: str = ""  # by default the newest step first
    descending: bool = False
    until: int = 0


class _Table:
    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.sql = f"t{number}"
        self.keys: dict[str, str] = {}  # column to its name in the database, which is its key
        self.kinds: dict[str, int] = {"run": NUMBER, **dict.fromkeys(FIXED, NUMBER)}
        self.longest = dict.fromkeys(self.kinds, 0)  # characters of a text
        self.rows = 0  # also the id of the newest
        self.steps: tuple[int, int] | None = None


class TableStore:
    """The tables of some runs, read while a page shows them, for any thread.

    Nothing of a run becomes SQL text: tables and columns have numbers there. The file has no name and vanishes with
    the object. ``runs`` may grow."""

    def __init__(self, runs: Sequence[RunView], max_bytes: int = MAX_BYTES) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self._readers: dict[int, OwnEvents] = {}
        self._tables: dict[str, _Table] = {}
        self._found: OrderedDict[Search, array[int]] = OrderedDict()
        self._left_out = 0
        # An empty name: on disk, beyond the cache.
        self._sql = sqlite3.connect("", check_same_thread=False)
        for setting in (
            f"cache_size=-{_CACHE_BYTES >> 10}",
            f"page_size={_PAGE_BYTES}",
            f"max_page_count={max_bytes // _PAGE_BYTES}",
            "journal_mode=MEMORY",
            "synchronous=OFF",
        ):
            self._sql.execute(f"PRAGMA {setting}")
        self._sql.execute("CREATE TABLE images (run, hash, content, PRIMARY KEY (run, hash))")

    def look(self) -> None:
        """Read the tables for some seconds more, and request them of live runs."""
        for number, run in enumerate(tuple(self._runs)):
            if number not in self._readers:
                self._readers[number] = OwnEvents(run, ANY_TABLE, partial(self.take, number))
            self._readers[number].look()

    def take(self, run: int, state: Snapshot) -> None:
        """Add the rows of an event of the run with that number. A malformed event is skipped."""
        try:
            added = RowsAdded.of(state)
        except ProtocolError:
            return
        with self._lock:
            self._left_out += sum(added.left_out.values())
            try:
                with self._sql:
                    self._add(run, added)
            except (sqlite3.Error, OverflowError):
                # The disk, or the limit, is full.
                self._left_out += len(added.rows)

    def _add(self, run: int, added: RowsAdded) -> None:
        table = self._table(added.table)
        keys = [self._key(table, column) for column in added.columns]
        places = [place for place, key in enumerate(keys) if key is not None]
        known = [key for key in keys if key is not None]
        step = max(min(added.step, (1 << 63) - 1), -(1 << 63))
        fixed = (run, step, added.time, added.rank, added.attempt)
        rows = [(*fixed, *(_stored(row[place]) for place in places)) for row in added.rows]
        marks = ", ".join("?" * (len(fixed) + len(known)))
        into = f"INSERT INTO {table.sql} ({', '.join((*_FIXED, *known))}) VALUES ({marks})"
        self._sql.executemany(into, rows)
        for name, content in added.images.items():
            content_hash = _hash_of({"image": name})
            if content_hash is not None and _is_image(content):
                packed = msgspec.msgpack.encode(content)
                self._sql.execute("INSERT OR IGNORE INTO images VALUES (?, ?, ?)", (run, content_hash, packed))
        for place, key in enumerate(known, len(fixed)):
            for stored in rows:
                table.kinds[key] |= _kind(stored[place])
            longest = max((len(stored[place]) for stored in rows if isinstance(stored[place], str)), default=0)
            table.longest[key] = max(table.longest[key], longest)
        table.rows += len(rows)
        low, high = table.steps or (step, step)
        table.steps = min(low, step), max(high, step)

    def _table(self, name: str) -> _Table:
        table = self._tables.get(name)
        if table is None:
            if len(self._tables) >= MAX_TABLES:
                raise OverflowError
            table = _Table(name, len(self._tables))
            self._sql.execute(f"CREATE TABLE {table.sql} (id INTEGER PRIMARY KEY, {', '.join(_FIXED)})")
            self._tables[name] = table
        return table

    def _key(self, table: _Table, column: str) -> str | None:
        key = table.keys.get(column)
        if key is None and len(table.keys) < MAX_COLUMNS:
            key = f"c{len(table.keys)}"
            self._sql.execute(f"ALTER TABLE {table.sql} ADD COLUMN {key}")
            table.keys[column], table.kinds[key], table.longest[key] = key, 0, 0
        return key

    def describe(self) -> dict[str, Any]:
        """Return the tables, and what is missing; of a column its key, name, kinds of cells, and longest text."""
        with self._lock:
            tables = [
                {
                    "name": table.name,
                    "rows": table.rows,
                    "steps": table.steps,
                    "columns": [
                        [key, name, table.kinds[key], table.longest[key]]
                        for name, key in ((*zip(_FIXED, _FIXED, strict=True), *table.keys.items()))
                    ],
                }
                for table in self._tables.values()
            ]
            readers = tuple(self._readers.values())
            return {
                "tables": tables,
                "leftOut": self._left_out,
                "isBehind": any(reader.is_behind for reader in readers),
                "problem": next((reader.problem for reader in readers if reader.problem), ""),
            }

    def window(self, search: Search, first: int, count: int, columns: Sequence[str]) -> tuple[int, list[list[Any]]]:
        """Return the number of found rows, and some of them: the id and the cells of ``columns``, with short texts.

        Raises ConfigurationError for an unknown table or column."""
        with self._lock:
            table = self._known(search.table)
            found = self._find(table, search)
            ids = found[max(first, 0) : max(first, 0) + max(count, 0)]
            short = (
                f"CASE typeof({key}) WHEN 'text' THEN substr({key}, 1, {_SHORT}) ELSE {key} END"
                for key in self._checked(table, columns)
            )
            rows = self._rows(table, ids, ", ".join(("id", *short)))
            by_id = {row[0]: [row[0], *map(_shown, row[1:])] for row in rows}
            return len(found), [by_id[one] for one in ids if one in by_id]

    def row(self, table_name: str, row: int) -> list[Any]:
        """Return all cells of a row, whole, in the order of :meth:`describe`."""
        with self._lock:
            table = self._known(table_name)
            keys = ", ".join((*_FIXED, *table.keys.values()))
            return next((list(map(_shown, found)) for found in self._rows(table, [row], keys)), [])

    def beside(self, table_name: str, row: int, column: str, run: int) -> int | None:
        """Return a row of another run with the same value in a column: the one of the closest step."""
        with self._lock:
            table = self._known(table_name)
            (key,) = self._checked(table, [column])
            same = f"SELECT {key}, step FROM {table.sql} WHERE id = ?"
            found = self._sql.execute(
                f"SELECT other.id FROM {table.sql} AS other, ({same}) AS this WHERE other.run = ? "
                f"AND other.{key} IS this.{key} ORDER BY abs(other.step - this.step), other.id LIMIT 1",
                (row, run),
            ).fetchone()
            return None if found is None else int(found[0])

    def distribution(self, search: Search, column: str) -> dict[str, Any]:
        """Return the values of a column in the found rows: a histogram of numbers, and the most frequent texts."""
        with self._lock:
            table = self._known(search.table)
            (key,) = self._checked(table, [column])
            where, values = self._where(table, search)
            is_number = f"typeof({key}) IN ('integer', 'real') AND abs({key}) < 1e999"
            rows = f"FROM {table.sql} WHERE {where}"
            count, low, high, mean = self._sql.execute(
                f"SELECT count(*), min({key}), max({key}), avg({key}) {rows} AND {is_number}", values
            ).fetchone()
            found: dict[str, Any] = {"numbers": count, "bars": [], "texts": []}
            if count:
                # As floats: a difference of large integers would overflow.
                low, high = float(low), float(high)
                width = high - low
                place = f"CAST(min({_BARS - 1}, ({key} - ?) * {_BARS}.0 / ?) AS INTEGER)"
                bars = [0] * _BARS
                for bar, number in self._sql.execute(
                    f"SELECT {place}, count(*) {rows} AND {is_number} GROUP BY 1",
                    (low, width if 0 < width < math.inf else 1.0, *values),
                ):
                    bars[max(min(bar, _BARS - 1), 0)] += number
                found |= {"low": low, "high": high, "mean": mean, "bars": bars}
            texts = f"{rows} AND typeof({key}) = 'text'"
            found["distinct"] = self._sql.execute(f"SELECT count(DISTINCT {key}) {texts}", values).fetchone()[0]
            found["texts"] = [
                [row, text, number]
                for row, text, number in self._sql.execute(
                    f"SELECT min(id), substr({key}, 1, {_SHORT}), count(*) AS number {texts} "
                    f"GROUP BY {key} ORDER BY number DESC, 1 LIMIT {_MOST_TEXTS}",
                    values,
                )
            ]
            return found

    def image(self, run: int, content_hash: str) -> tuple[bytes, str] | None:
        """Return the file of an image, and its media type. Pixels become PNG."""
        key = _hash_of({"image": content_hash})
        if key is None or run >= _MOST_RUNS:
            return None
        with self._lock:
            found = self._sql.execute("SELECT content FROM images WHERE run = ? AND hash = ?", (run, key)).fetchone()
        if found is None:
            return None
        *shape, data = msgspec.msgpack.decode(found[0])
        if shape:
            data = as_png(np.frombuffer(data, np.uint8).reshape(shape))
        return data, _media_type(data)

    def _known(self, name: str) -> _Table:
        if name not in self._tables:
            raise ConfigurationError(f"there is no table {name[:100]!r}")
        return self._tables[name]

    def _checked(self, table: _Table, columns: Iterable[str]) -> list[str]:
        chosen = list(columns)
        if unknown := [key for key in chosen if key not in table.kinds]:
            raise ConfigurationError(f"table {table.name!r} has no column {unknown[0][:100]!r}")
        return chosen

    def _rows(self, table: _Table, ids: Sequence[int], columns: str) -> list[Any]:
        marks = ", ".join("?" * len(ids))
        return self._sql.execute(f"SELECT {columns} FROM {table.sql} WHERE id IN ({marks})", tuple(ids)).fetchall()

    def _find(self, table: _Table, search: Search) -> "array[int]":
        if search in self._found:
            self._found.move_to_end(search)
            return self._found[search]
        where, values = self._where(table, search)
        way = "DESC" if search.descending else "ASC"
        order = f"{self._checked(table, [search.sort])[0]} {way}" if search.sort else "step DESC"
        cursor = self._sql.execute(
            f"SELECT id FROM {table.sql} WHERE {where} ORDER BY {order}, id LIMIT {MOST_SHOWN}", values
        )
        found = array("q", (row[0] for row in cursor))
        self._found[search] = found
        if len(self._found) > _KEPT_SEARCHES:
            self._found.popitem(last=False)
        return found

    def _where(self, table: _Table, search: Search) -> tuple[str, list[Any]]:
        parts: list[str] = ["id <= ?"]
        values: list[Any] = [search.until]
        for one in search.filters[:_MOST_TESTS]:
            (key,) = self._checked(table, [one.column])
            if one.low is not None or one.high is not None:
                parts.append(f"typeof({key}) IN ('integer', 'real') AND {key} BETWEEN ? AND ?")
                values += [-math.inf if one.low is None else one.low, math.inf if one.high is None else one.high]
            if one.contains is not None:
                parts.append(f"CAST({key} AS TEXT) LIKE ? ESCAPE '\\'")
                values.append(_pattern(one.contains))
            if one.row is not None:
                parts.append(f"{key} IS (SELECT {key} FROM {table.sql} WHERE id = ?)")
                values.append(one.row)
        texts = [key for key, kinds in table.kinds.items() if kinds & TEXT]
        for word in search.find.split()[:_MOST_TESTS]:
            parts.append(" OR ".join(f"{key} LIKE ? ESCAPE '\\'" for key in texts) or "0")
            values += [_pattern(word)] * len(texts)
        return " AND ".join(f"({part})" for part in parts), values


def _pattern(text: str) -> str:
    text = text[:_LONGEST_PATTERN]
    for special in "\\%_":
        text = text.replace(special, f"\\{special}")
    return f"%{text}%"


def _stored(cell: Any) -> Any:
    kind = type(cell)
    if kind is str or cell is None:
        return cell
    if kind is float:
        return cell if math.isfinite(cell) else json_text(cell).strip('"')
    if kind is int:
        return cell if -(1 << 63) <= cell < 1 << 63 else float(cell)
    images = [_hash_of(one) for one in (cell if kind is list else [cell])]
    if images and None not in images:
        return b"".join(image for image in images if image is not None)
    return json_text(cell)


def _kind(stored: Any) -> int:
    if stored is None:
        return 0
    return TEXT if isinstance(stored, str) else IMAGE if isinstance(stored, bytes) else NUMBER


def _shown(stored: Any) -> Any:
    """Return a number or a text; images as a list of their hashes."""
    if not isinstance(stored, bytes):
        return stored
    return [stored[place : place + _HASH_BYTES].hex() for place in range(0, len(stored), _HASH_BYTES)]


def _hash_of(cell: Any) -> bytes | None:
    text = cell.get("image") if isinstance(cell, dict) and len(cell) == 1 else None
    try:
        found = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        return None
    return found if len(found) == _HASH_BYTES else None


def _media_type(data: bytes) -> str:
    return next((kind for front, kind in _FORMATS.items() if data.startswith(front)), "")


def _is_image(content: Sequence[Any]) -> bool:
    match content:
        case [bytes(data)]:
            return bool(_media_type(data))
        case [int(height), int(width), 1 | 3 | 4 as channels, bytes(data)]:
            return height > 0 and width > 0 and height * width * channels == len(data)
    return False
