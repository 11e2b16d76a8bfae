"""Runs in the stores of other trackers: W&B's files, databases of MLflow and Trackio."""

import json
import math
import re
import sqlite3
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from offloop.bus.errors import ConfigurationError, require
from offloop.bus.files import open_file
from offloop.bus.printing import Damage
from offloop.bus.strict_json import flatten
from offloop.bus.tools.logs import (
    STORES,
    Log,
    LogRow,
    Records,
    find_event_files,
    find_file,
    find_text_log,
    is_step,
    of_cell,
    read_event_files,
    read_text_log,
    rows_of,
)

_USABLE = re.compile(r"[A-Za-z0-9]")


def _named(name: str | None, key: str) -> str:
    return next((one for one in (name, key) if one and _USABLE.search(one)), "run")


# A file of W&B is a log of LevelDB: records, or parts of them, in blocks.
_MAGIC = b":W&B"
_FILE_HEAD = 7
_BLOCK = 1 << 15
_PART = struct.Struct("<IHB")  # CRC-32 of the kind and the data, length, kind
_FULL, _FIRST, _MIDDLE, _LAST = range(1, 5)


def _wandb_logs(path: Path) -> list[Log]:
    require("'--from wandb'", "wandb", "wandb")
    files = {file.resolve(): file for file in ([path] if path.is_file() else sorted(path.rglob("run-*.wandb")))}
    if not files:
        raise ConfigurationError(f"no run-*.wandb in {path}: name a folder 'offline-run-...', or the folder 'wandb'")
    logs = []
    for file in files.values():
        log = Log(file.stem, file, (file,))
        for record in _wandb_records(file, Damage()):
            if record.HasField("run"):
                run = record.run
                log.name, log.key = _named(run.display_name, run.run_id), run.run_id
                log.started = run.start_time.ToNanoseconds() / 10**9
                break
        logs.append(log)
    return sorted(logs, key=lambda log: log.started or 0)


def _read_wandb(log: Log) -> Iterator[LogRow]:
    log.status = "lost"
    return rows_of(log, _wandb_history(log), "_step")


def _wandb_history(log: Log) -> Records:
    config = log.hyperparameters["config"] = {}
    axis, reached = "", 0
    for record in _wandb_records(log.path, log.damage):
        where = f"record {record.num}"
        kind = record.WhichOneof("record_type")
        try:
            if kind == "history":
                values = _wandb_values(record.history.item)
                # The time is enough.
                values.pop("_runtime", None)
                row = flatten(values)
                if axis and type(step := row.pop(axis, None)) is int and step >= 0:
                    reached = step
                yield where, row | {"_step": reached if axis else record.history.step.num}
            elif kind == "metric" and record.metric.glob_name == "*" and is_step(record.metric.step_metric):
                # Lightning, Transformers and our own logger count the rows as W&B's steps, and log their own.
                axis = record.metric.step_metric
            elif kind == "run":
                log.tags += [tag for tag in (*record.run.tags, record.run.project) if tag]
                log.note = record.run.notes
                config |= _wandb_values(record.run.config.update)
            elif kind == "config":
                config |= _wandb_values(record.config.update)
            elif kind == "exit":
                log.status = "failed" if record.exit.exit_code else "finished"
                log.ended = None if log.started is None else log.started + record.exit.runtime
        except ValueError as error:
            log.damage.add(f"{log.path}, {where}: it is left out ({error})")
    config.pop("_wandb", None)


def _wandb_values(items: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in items:
        *outer, name = item.nested_key or [item.key]
        place = found
        for key in outer:
            place = place.setdefault(key, {})
        place[name] = json.loads(item.value_json)
    return found


def _wandb_records(path: Path, damage: Damage) -> Iterator[Any]:
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    with open(open_file(path, follow=True), "rb") as file:
        whole, offset, place = b"", 0, _FILE_HEAD
        while block := file.read(_BLOCK):
            if not offset and not block.startswith(_MAGIC):
                raise ConfigurationError(f"{path} is not a file of W&B: name a run-*.wandb")
            while place < (len(block) if len(block) < _BLOCK else _BLOCK - _PART.size + 1):
                checksum, length, kind = _PART.unpack(block[place : place + _PART.size].ljust(_PART.size, b"\0"))
                data = block[place + _PART.size : place + _PART.size + length]
                if len(data) < length or zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
                    damage.add(f"{path}, byte {offset + place}: it is damaged or ends here, the rest is left out")
                    return
                whole = data if kind in (_FULL, _FIRST) else whole + data
                if kind in (_FULL, _LAST):
                    try:
                        yield Record.FromString(whole)
                    except DecodeError:
                        damage.add(f"{path}, byte {offset + place}: a damaged record is left out")
                place += _PART.size + length
            offset, place = offset + len(block), 0


@contextmanager
def _database(path: Path, tool: str) -> Iterator[sqlite3.Connection]:
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.execute("PRAGMA trusted_schema = OFF")
            yield database
    except (sqlite3.Error, TypeError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read as a database of {tool}: {error}") from None


_MLFLOW_RUNS = """
    SELECT run_uuid, runs.name, CAST(start_time AS REAL) / 1000 FROM runs
    WHERE lifecycle_stage = 'active' ORDER BY start_time, run_uuid"""
_MLFLOW_RUN = """
    SELECT status, CAST(end_time AS REAL) / 1000, experiments.name
    FROM runs JOIN experiments USING (experiment_id) WHERE run_uuid = ?"""
_MLFLOW_METRICS = """
    SELECT CAST(step AS INTEGER), CAST(timestamp AS REAL) / 1000, key, CAST(value AS REAL), is_nan FROM metrics
    WHERE run_uuid = ? ORDER BY timestamp, rowid"""
_MLFLOW_STATUSES = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}
_OF_MLFLOW = "mlflow."
_INFINITE = sys.float_info.max  # stands for infinity there


def _mlflow_logs(path: Path) -> list[Log]:
    file = find_file(path, "mlflow.db")
    with _database(file, "MLflow") as database:
        rows = database.execute(_MLFLOW_RUNS).fetchall()
    return [Log(_named(name, key), file, (file,), started, key) for key, name, started in rows]


def _read_mlflow(log: Log) -> Iterator[LogRow]:
    with _database(log.path, "MLflow") as database:
        status, log.ended, experiment = database.execute(_MLFLOW_RUN, [log.key]).fetchone()
        log.status = _MLFLOW_STATUSES.get(status, "lost")
        log.tags.append(experiment)
        params = database.execute("SELECT key, value FROM params WHERE run_uuid = ?", [log.key])
        log.hyperparameters["config"] = {name: of_cell(value) for name, value in params}
        for name, value in database.execute("SELECT key, value FROM tags WHERE run_uuid = ?", [log.key]):
            if name == "mlflow.note.content":
                log.note = value or ""
            elif not name.startswith(_OF_MLFLOW):
                log.tags.append(f"{name}={value}" if value else name)
        for step, time, name, value, is_nan in database.execute(_MLFLOW_METRICS, [log.key]):
            number = math.nan if is_nan else math.copysign(math.inf, value) if abs(value) == _INFINITE else value
            if step < 0:
                log.notes.add(f"{name!r} is left out at step {step}")
            else:
                yield LogRow(step, time, {name: number})


def _trackio_logs(path: Path) -> list[Log]:
    files = sorted(path.glob("*.db")) if path.is_dir() else [find_file(path, "*.db")]
    logs = []
    for file in files:
        with _database(file, "Trackio") as database:
            key = _trackio_key(database)
            query = f"SELECT {key}, run_name, min(timestamp) FROM metrics GROUP BY {key}"
            for identity, name, first in database.execute(query):
                started = datetime.fromisoformat(first).timestamp()
                logs.append(Log(_named(name, identity), file, (file,), started, identity))
    if not logs:
        raise ConfigurationError(f"no run in {path}: name a database of Trackio, or the folder of these")
    return sorted(logs, key=lambda log: log.started or 0)


def _trackio_key(database: sqlite3.Connection) -> str:
    columns = {column for _, column, *_ in database.execute("PRAGMA table_info(metrics)")}
    # Older versions know a run by its name only.
    return "run_id" if "run_id" in columns else "run_name"


def _read_trackio(log: Log) -> Iterator[LogRow]:
    return rows_of(log, _trackio_metrics(log), "step")


def _trackio_metrics(log: Log) -> Records:
    with _database(log.path, "Trackio") as database:
        key = _trackio_key(database)
        log.tags.append(log.path.stem)
        for (config,) in database.execute(f"SELECT config FROM configs WHERE {key} = ?", [log.key]):
            known = dict(json.loads(config))
            own = {name: value for name, value in known.items() if not name.startswith("_")}
            log.hyperparameters["config"] = own
        query = f"SELECT id, CAST(step AS INTEGER), timestamp, metrics FROM metrics WHERE {key} = ? ORDER BY id"
        for number, step, time, metrics in database.execute(query, [log.key]):
            at = {"step": step, "timestamp": datetime.fromisoformat(time).timestamp()}
            yield f"row {number}", flatten(dict(json.loads(metrics))) | at


_Store: TypeAlias = tuple[Callable[[Path], list[Log]], Callable[[Log], Iterator[LogRow]]]
_STORES: tuple[_Store, ...] = (
    *((find_event_files, read_event_files), (_wandb_logs, _read_wandb)),
    *((_mlflow_logs, _read_mlflow), (_trackio_logs, _read_trackio)),
)


def open_source(source: str, step_column: str | None) -> _Store:
    """Return the functions that find the logs in a file or folder, of a store the earliest first, and read one."""
    if source in STORES:
        return _STORES[STORES.index(source)]
    return partial(find_text_log, source), partial(read_text_log, source, step_column)
