"""Logs of other tools, row by row: TensorBoard's event files, CSV, JSON lines, the state of a Hugging Face trainer."""

import csv
import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from offloop.bus.errors import ConfigurationError, require
from offloop.bus.files import open_file
from offloop.bus.printing import Damage, shorten
from offloop.bus.protocol.frames import MAX_TIME
from offloop.bus.strict_json import flatten

STORES = ("tensorboard", "wandb", "mlflow", "trackio")  # of several runs, see bus.tools.stores

_STEPS = ("step", "global_step", "trainer/global_step", "_step", "batch", "iteration", "iter")
_TIMES = ("_timestamp", "timestamp", "wall_time", "wall time", "time")
_LARGEST_STEP = (1 << 53) - 1
_SMALLEST_INT, _LARGEST_INT = -(1 << 63), (1 << 64) - 1
_LISTED = 20
_LONGEST_RECORD = 64 << 20  # maximum bytes of a record of an event file
# A smaller number counts seconds from another moment than 1970.
_EARLIEST = 1_000_000_000
_TEXT_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_TYPED = "/_type"
_OF_A_TRAINER = ("max_steps", "num_train_epochs", "train_batch_size", "logging_steps", "eval_steps", "save_steps")


class LogRow(NamedTuple):
    step: int
    time: float | None  # seconds since 1970; None if unknown
    values: Mapping[str, float] | None
    """Numbers by name. ``None``: a training restarted at ``step`` and replaces all earlier rows from there on."""


@dataclass
class Log:
    """The log of one run, in files of another tool. Everything behind ``key`` is complete once all rows were read."""

    name: str  # suggested name of the run; any text
    path: Path
    files: tuple[Path, ...]
    started: float | None = None  # seconds since 1970
    key: str = ""  # id of the run in a file of several
    ended: float | None = None
    status: str = "finished"
    tags: list[str] = field(default_factory=list)
    note: str = ""
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    notes: Damage = field(default_factory=Damage)  # unsupported content, one per line
    damage: Damage = field(default_factory=Damage)  # unreadable content, one per line

    def __str__(self) -> str:
        return f"run {self.name!r} of {self.path}" if self.key else str(self.path)


def find_file(path: Path, usual: str) -> Path:
    """Return a file, or the one with its usual name in a folder. Raises ConfigurationError if there is none."""
    file = path / usual if path.is_dir() else path
    if not file.is_file():
        raise ConfigurationError(f"no {usual} in {path}: name the file to import")
    return file


def find_text_log(source: str, path: Path) -> list[Log]:
    usual, _ = SOURCES[source]
    file = find_file(path, usual)
    parent = file.absolute().resolve().parent
    return [Log(parent.name if file.name == usual else file.stem, file, (file,))]


def read_text_log(source: str, step_column: str | None, log: Log) -> Iterator[LogRow]:
    """Yield the rows of a log. Raises ConfigurationError if it is malformed; OSError."""
    _, read = SOURCES[source]
    return rows_of(log, read(log), "step" if source == "hf-trainer-state" else step_column)


_PARTS = frozenset(("train", "training", "val", "valid", "validation", "eval", "evaluation", "test"))
_OF_ADD_HPARAMS = re.compile(r"\d{9,}\.\d+")
_RECORD = struct.Struct("<QI")
_CHECKED_BYTES = 4096
_START = 1


def find_event_files(path: Path) -> list[Log]:
    if path.is_file():
        return [Log(path.absolute().resolve().parent.name, path, (path,))]
    files = sorted(file for file in path.rglob("*tfevents*") if file.is_file())
    folders = {file.parent for file in files}
    of_run: dict[Path, list[Path]] = {}
    for file in files:
        of_run.setdefault(_run_folder(file.parent, path, folders), []).append(file)
    if not of_run:
        raise ConfigurationError(f"no event file of TensorBoard (*tfevents*) in {path}")
    return [
        Log(
            "-".join(folder.relative_to(path).parts) or path.absolute().resolve().name,
            folder,
            # Files of the folder itself first: a restart that they record affects them alone.
            tuple(sorted(found, key=lambda file: (len(file.parts), file))),
        )
        for folder, found in of_run.items()
    ]


def _run_folder(folder: Path, top: Path, with_files: set[Path]) -> Path:
    """Return the run's folder: ``add_scalars``, ``add_hparams`` and Keras make folders within it."""
    while folder != top and (
        folder.name.casefold() in _PARTS
        or with_files.intersection(parent for parent in folder.parents if parent.is_relative_to(top))
    ):
        folder = folder.parent
    return folder


def read_event_files(log: Log) -> Iterator[LogRow]:
    require("'--from tensorboard'", "tensorboard", "tensorboard")
    # TensorBoard's own reader loads TensorFlow where that is installed.
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    folder = log.path if log.path.is_dir() else log.path.parent
    for path in log.files:
        inner = path.parent.relative_to(folder)
        of_add_hparams = _OF_ADD_HPARAMS.fullmatch(inner.name) is not None
        prefix = "".join(f"{part}/" for part in (inner.parent if of_add_hparams else inner).parts)
        for offset, record in _records(path, log.damage):
            try:
                event = Event.FromString(record)
                if event.session_log.status == _START and not prefix:
                    yield LogRow(event.step, None, None)
                values: dict[str, float] = {}
                for value in event.summary.value:
                    number = _scalar(value)
                    if number is not None:
                        values[prefix + value.tag] = number
                    elif value.metadata.plugin_data.plugin_name == "hparams":
                        content = HParamsPluginData.FromString(value.metadata.plugin_data.content)
                        for name, one in content.session_start_info.hparams.items():
                            kind = one.WhichOneof("kind")
                            log.hyperparameters[name] = getattr(one, kind) if kind else None
            except DecodeError:
                log.damage.add(f"{path}, byte {offset}: a damaged record is left out")
                continue
            if not values:
                continue
            if not 0 <= event.step <= _LARGEST_STEP:
                log.damage.add(f"{path}, byte {offset}: values of step {event.step} are left out")
                continue
            # add_hparams writes values of the end of the training, at step 0.
            yield LogRow(event.step, None if of_add_hparams else event.wall_time, values)


def _records(path: Path, damage: Damage) -> Iterator[tuple[int, bytes]]:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    with open(open_file(path, follow=True), "rb") as file:
        size, offset = os.fstat(file.fileno()).st_size, 0
        while front := file.read(_RECORD.size):
            length, checksum = _RECORD.unpack(front) if len(front) == _RECORD.size else (size, None)
            if checksum is not None and masked_crc32c(front[:8]) != checksum:
                damage.add(f"{path}, byte {offset}: it is damaged, the rest is left out")
                return
            if length > size - offset - _RECORD.size - 4:
                damage.add(f"{path}, byte {offset}: it ends within a record, which is left out")
                return
            if length > _LONGEST_RECORD:
                damage.add(f"{path}, byte {offset}: a record of {length:,} bytes is left out")
                offset = file.seek(length + 4, os.SEEK_CUR)
                continue
            data, (expected,) = file.read(length), struct.unpack("<I", file.read(4))
            # Only small records, such as scalars, are checked: images would take seconds.
            if length <= _CHECKED_BYTES and masked_crc32c(data) != expected:
                damage.add(f"{path}, byte {offset}: a damaged record is left out")
            else:
                yield offset, data
            offset += _RECORD.size + length + 4


def _scalar(value: Any) -> float | None:
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind != "tensor" or value.tensor.tensor_shape.dim:
        return None
    from tensorboard.util.tensor_util import make_ndarray

    number = make_ndarray(value.tensor).item()
    return float(number) if type(number) in (int, float) else None


Records: TypeAlias = Iterator[tuple[str, dict[str, Any]]]  # each record of a log after a description of its place


def rows_of(log: Log, records: Records, step_column: str | None) -> Iterator[LogRow]:
    """Yield the rows of a log. Raises ConfigurationError if no record has a step, or a step is not a whole number."""
    column: str | None = None
    known: dict[str, None] = {}
    left_out: set[str] = set()
    without_step = 0
    for where, record in records:
        if column is None:
            known |= dict.fromkeys(record)
            column = _step_column(record, step_column)
        step = None if column is None else record.get(column)
        if step is None:
            without_step += 1
            continue
        if type(step) not in (int, float) or not 0 <= step <= _LARGEST_STEP or step != int(step):
            raise ConfigurationError(
                f"{log.path}, {where}: {column!r} is {step!r}, not a whole number from 0 on: "
                "name the column of steps with '--step-column'"
            )
        values: dict[str, float] = {}
        time = None
        # Pictures, histograms and the like are maps with a type.
        if typed := [name.removesuffix(_TYPED) for name in record if name.endswith(_TYPED)]:
            media = {name: None for name in record if name.startswith(tuple(f"{one}/" for one in typed))}
            record = record | media | dict.fromkeys(typed, "")
        for name, value in record.items():
            if value is None or name == column:
                continue
            number = value if type(value) is float else _as_number(value)
            if number is None:
                if name not in left_out:
                    left_out.add(name)
                    log.notes.add(f"{name!r} is left out where it is not a number, as in {where}")
            elif time is None and name.casefold() in _TIMES and _EARLIEST <= number < MAX_TIME / 10**9:
                time = float(number)
            else:
                values[name] = number
        yield LogRow(int(step), time, values)
    if column is None and without_step:
        names = shorten(map(repr, known), "names", _LISTED)
        missing = f"column {step_column!r}" if step_column else f"column of steps ({', '.join(_STEPS)})"
        raise ConfigurationError(
            f"{log.path} has no {missing}: it has {', '.join(names)}; name one with '--step-column'"
        )
    if without_step:
        log.notes.add(f"rows without a step are left out: {without_step:,}")


def _step_column(record: dict[str, Any], requested: str | None) -> str | None:
    if requested is not None:
        return requested if requested in record else None
    by_name = {name.casefold(): name for name in reversed(record)}
    return next((by_name[name] for name in _STEPS if name in by_name), None)


def is_step(name: str) -> bool:
    return name.rpartition("/")[2].casefold() in _STEPS


def _as_number(value: Any) -> float | None:
    if isinstance(value, str):
        return _TEXT_NUMBERS.get(value)
    if type(value) is int and _SMALLEST_INT <= value <= _LARGEST_INT:
        return value
    try:
        return float(value)
    except (TypeError, OverflowError):
        return None


def _read_csv(log: Log) -> Records:
    path = log.path
    with open(open_file(path, follow=True), encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file)
        try:
            header = next(lines, [])
            if twice := [name for name, count in Counter(header).items() if name and count > 1]:
                raise ConfigurationError(f"{path} has more than one column {min(twice)!r}: give each its own name")
            for cells in lines:
                where = f"line {lines.line_num}"
                if len(cells) > len(header):
                    raise ConfigurationError(f"{path}, {where}: it has {len(cells)} cells, the header {len(header)}")
                # A column without a name counts the rows, as pandas writes it.
                record = {name: of_cell(cell) for name, cell in zip(header, cells, strict=False) if name}
                if any(value is not None for value in record.values()):
                    yield where, record
        except csv.Error as error:
            raise ConfigurationError(f"{path}, line {lines.line_num}: it is not CSV ({error})") from None


def of_cell(text: str) -> float | str | None:
    if not text:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _read_jsonl(log: Log) -> Records:
    path = log.path
    with open(open_file(path, follow=True), encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            where = f"line {number}"
            if line.isspace():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                if not line.endswith("\n"):
                    log.damage.add(f"{path}, {where}: it is incomplete and left out")
                    break
                raise ConfigurationError(f"{path}, {where}: it is not JSON ({error})") from None
            if not isinstance(record, dict):
                raise ConfigurationError(f"{path}, {where}: it is not a JSON object")
            if isinstance(found := record.get("hyperparameters"), dict):
                log.hyperparameters |= found
            else:
                yield where, flatten(record)


def _read_trainer_state(log: Log) -> Records:
    path = log.path
    with open(open_file(path, follow=True), encoding="utf-8") as file:
        try:
            state = json.load(file)
        except UnicodeError:
            raise
        except ValueError as error:
            raise ConfigurationError(f"{path} is not JSON ({error}): name a trainer_state.json") from None
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise ConfigurationError(f"{path} has no list 'log_history' of objects: name a trainer_state.json")
    log.hyperparameters |= {name: state[name] for name in _OF_A_TRAINER if state.get(name) is not None}
    for number, entry in enumerate(history, 1):
        yield f"entry {number} of 'log_history'", flatten(entry)


SOURCES: Mapping[str, tuple[str, Callable[[Log], Records]]] = {
    "csv": ("metrics.csv", _read_csv),
    "jsonl": ("metrics.jsonl", _read_jsonl),
    "hf-trainer-state": ("trainer_state.json", _read_trainer_state),
}  # text format to its file name in a folder, and its reader
