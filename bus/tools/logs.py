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
from typing import Any, NamedTuple

from offloop.bus.errors import ConfigurationError, require
from offloop.bus.files import open_file
from offloop.bus.printing import Damage
from offloop.bus.protocol.frames import MAX_TIME
from offloop.bus.strict_json import flatten, json_text

TENSORBOARD = "tensorboard"

_STEPS = ("step", "global_step", "trainer/global_step", "_step", "batch", "iteration", "iter")
_TIMES = ("_timestamp", "timestamp", "wall_time", "wall time", "time")
_LARGEST_STEP = (1 << 53) - 1
_SMALLEST_INT, _LARGEST_INT = -(1 << 63), (1 << 64) - 1
_LISTED = 20
_LONGEST_RECORD = 64 << 20
"""Bytes in a record of an event file."""
_MOST_HPARAMS = 100_000
"""Values in a hparams.yaml: aliases of aliases would fill the memory."""
# An earlier number cannot be a date of a training: it counts seconds since something else.
_EARLIEST = 1_000_000_000
_TEXT_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_OF_A_TRAINER = ("max_steps", "num_train_epochs", "train_batch_size", "logging_steps", "eval_steps", "save_steps")


class LogRow(NamedTuple):
    """What a log has at one place."""

    step: int
    time: float | None
    """Seconds since 1970; ``None`` where the log does not have it."""
    values: Mapping[str, float] | None
    """Numbers by name. ``None``: a training that was restarted at ``step`` replaces all rows before from there on."""


@dataclass
class Log:
    """The log of one run, in files of another tool."""

    name: str
    """What its run could be called; any text."""
    path: Path
    """The file or folder."""
    files: tuple[Path, ...]
    """In the order in which they are read."""
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    """Known when all rows were read."""
    notes: Damage = field(default_factory=Damage)
    """What is not among the rows because it is of no use here, each in a line."""
    damage: Damage = field(default_factory=Damage)
    """What could not be read, each in a line."""


def find_logs(source: str, path: Path) -> list[Log]:
    """The logs at ``path``, a file or a folder: several only for TensorBoard.

    Raises:
        ConfigurationError: there is none.
    """
    if not path.exists():
        raise ConfigurationError(f"there is no file or folder {path}: name the log that is to be imported")
    if source == TENSORBOARD:
        return _find_event_files(path)
    default, _ = SOURCES[source]
    file = path / default if path.is_dir() else path
    if not file.is_file():
        raise ConfigurationError(f"there is no {default} in {path}: name the file that is to be imported")
    parent = file.absolute().resolve().parent
    return [Log(parent.name if file.name == default else file.stem, file, (file,))]


def read_log(source: str, log: Log, step_column: str | None = None) -> Iterator[LogRow]:
    """The rows of a log, in the order of its files.

    Raises:
        ConfigurationError: it is not a log of that kind, or a package for it is not installed.
        OSError: a file cannot be read.
    """
    _, read = SOURCES[source]
    return read(log, step_column)


# -- TensorBoard ------------------------------------------------------------------------------------------------------

_PARTS = frozenset(("train", "training", "val", "valid", "validation", "eval", "evaluation", "test"))
_OF_ADD_HPARAMS = re.compile(r"\d{9,}\.\d+")
_RECORD = struct.Struct("<QI")
_CHECKED_BYTES = 4096
_START = 1


def _find_event_files(path: Path) -> list[Log]:
    if path.is_file():
        return [Log(path.absolute().resolve().parent.name, path, (path,))]
    files = sorted(file for file in path.rglob("*tfevents*") if file.is_file())
    folders = {file.parent for file in files}
    of_run: dict[Path, list[Path]] = {}
    for file in files:
        of_run.setdefault(_run_folder(file.parent, path, folders), []).append(file)
    if not of_run:
        raise ConfigurationError(f"there is no event file of TensorBoard (*tfevents*) in {path}")
    return [
        Log(
            "-".join(folder.relative_to(path).parts) or path.absolute().resolve().name,
            folder,
            # Those of the folder itself first: a restart that they state is of them alone.
            tuple(sorted(found, key=lambda file: (len(file.parts), file))),
        )
        for folder, found in of_run.items()
    ]


def _run_folder(folder: Path, top: Path, with_files: set[Path]) -> Path:
    """The folder of the run that the event files in ``folder`` belong to. ``SummaryWriter.add_scalars`` and
    ``add_hparams`` make folders within that of the run, Keras the folders ``train`` and ``validation``."""
    while folder != top and (folder.name.casefold() in _PARTS or with_files.intersection(_between(folder, top))):
        folder = folder.parent
    return folder


def _between(folder: Path, top: Path) -> list[Path]:
    return [parent for parent in folder.parents if parent.is_relative_to(top)]


def _read_event_files(log: Log, _step_column: str | None) -> Iterator[LogRow]:
    require("'--from tensorboard'", "tensorboard", "tensorboard")
    # Not through TensorBoard's own reader, which loads TensorFlow where that is installed.
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
            # What add_hparams writes is of the end of the training, but of step 0.
            yield LogRow(event.step, None if of_add_hparams else event.wall_time, values)
    # In the event files all numbers are floats.
    _take_hparams_file(log, folder)


def _records(path: Path, damage: Damage) -> Iterator[tuple[int, bytes]]:
    """The records of an event file with their offsets."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    with open(open_file(path, follow=True), "rb") as file:
        size, offset = os.fstat(file.fileno()).st_size, 0
        while front := file.read(_RECORD.size):
            length, checksum = _RECORD.unpack(front) if len(front) == _RECORD.size else (size, None)
            if checksum is not None and masked_crc32c(front[:8]) != checksum:
                damage.add(f"{path}, byte {offset}: it is damaged, what follows is left out")
                return
            if length > size - offset - _RECORD.size - 4:
                damage.add(f"{path}, byte {offset}: it ends within a record, which is left out")
                return
            if length > _LONGEST_RECORD:
                damage.add(f"{path}, byte {offset}: a record of {length:,} bytes is left out")
                offset = file.seek(length + 4, os.SEEK_CUR)
                continue
            data, (expected,) = file.read(length), struct.unpack("<I", file.read(4))
            # Scalars are small; images would take seconds.
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


# -- files of text ----------------------------------------------------------------------------------------------------


class _Rows:
    """Makes rows of the records of a log."""

    def __init__(self, log: Log, step_column: str | None = None) -> None:
        self._log = log
        self._step_column = step_column
        self._column: str | None = None
        self._others: set[str] = set()
        self._known: dict[str, None] = {}
        self._without_step = 0

    def make(self, record: dict[str, Any], where: str) -> LogRow | None:
        """The row of a record; ``None`` for one without a step."""
        if self._column is None:
            self._known.update(dict.fromkeys(record))
            self._column = self._choose(record)
        step = None if self._column is None else record.get(self._column)
        if step is None:
            self._without_step += 1
            return None
        if type(step) not in (int, float) or not 0 <= step <= _LARGEST_STEP or step != int(step):
            raise ConfigurationError(
                f"{self._log.path}, {where}: {self._column!r} is {step!r}, not a whole number from 0 on: "
                "name the column of steps with '--step-column'"
            )
        values: dict[str, float] = {}
        time = None
        for name, value in record.items():
            if value is None or name == self._column:
                continue
            number = value if type(value) is float else _as_number(value)
            if number is None:
                self._leave_out(name, where)
            elif time is None and name.casefold() in _TIMES and _EARLIEST <= number < MAX_TIME / 10**9:
                time = float(number)
            else:
                values[name] = number
        return LogRow(int(step), time, values)

    def _choose(self, record: dict[str, Any]) -> str | None:
        if self._step_column is not None:
            return self._step_column if self._step_column in record else None
        by_name = {name.casefold(): name for name in reversed(record)}
        return next((by_name[name] for name in _STEPS if name in by_name), None)

    def _leave_out(self, name: str, where: str) -> None:
        if name not in self._others:
            self._others.add(name)
            self._log.notes.add(f"{name!r} is left out where it is not a number, as in {where}")

    def end(self) -> None:
        """After the last record.

        Raises:
            ConfigurationError: none of them had a step.
        """
        if self._column is None and self._without_step:
            names = list(self._known)
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            missing = f"column {self._step_column!r}" if self._step_column else f"column of steps ({', '.join(_STEPS)})"
            raise ConfigurationError(
                f"{self._log.path} has no {missing}: it has {', '.join(map(repr, names[:_LISTED]))}{more}; "
                "name one with '--step-column'"
            )
        if self._without_step:
            self._log.notes.add(f"rows without a step are left out: {self._without_step:,}")


def _as_number(value: Any) -> float | None:
    if isinstance(value, str):
        return _TEXT_NUMBERS.get(value)
    if type(value) is int and _SMALLEST_INT <= value <= _LARGEST_INT:
        return value
    try:
        return float(value)
    except (TypeError, OverflowError):
        return None


def _read_csv(log: Log, step_column: str | None) -> Iterator[LogRow]:
    path, rows = log.path, _Rows(log, step_column)
    _take_hparams_file(log, path.parent)
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
                # A column without a name counts the rows, as in what pandas writes.
                record = {name: _of_cell(cell) for name, cell in zip(header, cells, strict=False) if name}
                if any(value is not None for value in record.values()) and (row := rows.make(record, where)):
                    yield row
        except csv.Error as error:
            raise ConfigurationError(f"{path}, line {lines.line_num}: it is not CSV ({error})") from None
    rows.end()


def _of_cell(text: str) -> float | str | None:
    if not text:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _read_jsonl(log: Log, step_column: str | None) -> Iterator[LogRow]:
    path, rows = log.path, _Rows(log, step_column)
    with open(open_file(path, follow=True), encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            where = f"line {number}"
            if line.isspace():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                if not line.endswith("\n"):
                    log.damage.add(f"{path}, {where}: it is not whole, and is left out")
                    break
                raise ConfigurationError(f"{path}, {where}: it is not JSON ({error})") from None
            if not isinstance(record, dict):
                raise ConfigurationError(f"{path}, {where}: it is not a JSON object")
            if isinstance(found := record.get("hyperparameters"), dict):
                log.hyperparameters |= found
            elif row := rows.make(flatten(record), where):
                yield row
    rows.end()


def _read_trainer_state(log: Log, _step_column: str | None) -> Iterator[LogRow]:
    path, rows = log.path, _Rows(log, "step")
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
        if row := rows.make(flatten(entry), f"entry {number} of 'log_history'"):
            yield row
    rows.end()


def _take_hparams_file(log: Log, folder: Path) -> None:
    """The hyperparameters that Lightning writes beside a log."""
    path = folder / "hparams.yaml"
    if not path.is_file():
        return
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        log.notes.add(f"{path} is left out: its hyperparameters can be read after pip install pyyaml")
        return
    try:
        with open(open_file(path, follow=True), encoding="utf-8") as file:
            loader = yaml.SafeLoader(file.read())
        node = loader.get_single_node()
        if _count_nodes(node, {}) > _MOST_HPARAMS:
            raise ValueError(f"it has more than {_MOST_HPARAMS:,} values")
        found = None if node is None else loader.construct_document(node)
        # An integer may have more digits than Python writes.
        json_text(found)
    # PyYAML lets out what Python raises where a value is not of the kind that its tag says.
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, RecursionError, ValueError) as error:
        log.notes.add(f"{path} is left out, it cannot be read: {' '.join(str(error).split())}")
        return
    if isinstance(found, dict):
        log.hyperparameters |= {str(name): value for name, value in found.items()}


def _count_nodes(node: Any, known: dict[Any, int]) -> int:
    """Values in a node of YAML with its aliases resolved, counted up to one more than the limit."""
    if node not in known:
        # A node may be within itself.
        known[node] = _MOST_HPARAMS + 1
        parts = node.value if isinstance(getattr(node, "value", None), list) else ()
        # A map has pairs.
        nodes = (one for part in parts for one in (part if isinstance(part, tuple) else (part,)))
        known[node] = min(1 + sum(_count_nodes(one, known) for one in nodes), _MOST_HPARAMS + 1)
    return known[node]


SOURCES: Mapping[str, tuple[str, Callable[[Log, str | None], Iterator[LogRow]]]] = {
    TENSORBOARD: ("", _read_event_files),
    "csv": ("metrics.csv", _read_csv),
    "jsonl": ("metrics.jsonl", _read_jsonl),
    "hf-trainer-state": ("trainer_state.json", _read_trainer_state),
}
"""Of each kind of log the name of its file in a folder, and what reads it."""
