"""Runs made from the logs of other tools."""

import os
import re
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from offloop.bus.errors import CheckpointError, ConfigurationError, RunDirectoryError
from offloop.bus.files import atomic_replace
from offloop.bus.index.annotations import MAX_NOTE, MAX_TAGS, annotate, check_tag
from offloop.bus.protocol.frames import END, MAX_FRAME, MAX_TIME, Topic, check_run_name, event_encoder, pack_map
from offloop.bus.protocol.order import Ending
from offloop.bus.protocol.run_state import Reached
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.redaction import redact
from offloop.bus.runs.directory import IMPORTED_FROM, in_words, runs_dir
from offloop.bus.runs.writing import RunDirectory
from offloop.bus.strict_json import plain
from offloop.bus.tools.logs import Log, LogRow
from offloop.bus.tools.stores import open_source
from offloop.bus.types.event import Event
from offloop.bus.types.hyperparameters import FIELD, hyperparameters_in
from offloop.bus.types.metrics import logged_name
from offloop.bus.types.source import IMPORTED
from offloop.bus.types.timestamp import TrainingTime

_Place = tuple[str, ...]
"""Destination of a value: ``loss``, ``epoch``, ``train`` with a metric, ``eval`` with label and metric, ``logged`` with
its own name."""

_LOSSES = (
    *("loss", "train/loss", "train_loss", "train_loss_step", "train/loss_step"),
    *("loss/train/total", "loss/train", "training/loss", "training_loss"),
)  # names of the training loss; the first of these in a log counts

_METRICS = re.compile(r"metrics/(?P<label>[^/]+)/(?P<name>.+)")
_LABELS = "val|valid|validation|eval|evaluation|test"
_EVALUATED = re.compile(rf"(?i:(?P<label>{_LABELS})[/_](?P<name>.+)|(?P<name_first>.+)/(?P<label_last>{_LABELS}))")
_EPOCHS = ("epoch", "train/epoch", "time/epoch")
_EVENTS = frozenset((Event.INIT, Event.FIT_START, Event.BATCH_END, Event.EVAL_END, Event.EVAL_AFTER_ALL, Event.FIT_END))
_LARGEST_COUNT = 1 << 53
_UNNAMED = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 100


@dataclass(frozen=True)
class Imported:
    """Result of importing a log."""

    run: str | None
    """Name of the run; ``None`` for a log without numbers among several."""
    log: str
    """Description of the log."""
    steps: int
    """Steps with values."""
    values: int
    """Imported numbers."""
    replaced: int
    """Numbers replaced by a later one of the same name and step."""
    notes: tuple[str, ...]
    """Unsupported content that was left out, one per line."""
    damage: tuple[str, ...]
    """Unreadable content, one per line."""
    is_skipped: bool = False
    """True if the run existed already."""


def import_logs(
    source: str,
    path: Path,
    where: str | os.PathLike[str] | None = None,
    name: str | None = None,
    step_column: str | None = None,
    report: Callable[[Imported], object] = lambda done: None,
) -> list[Imported]:
    """Make a finished run from a log; of a folder of TensorBoard logs, or a database, one for each run.

    Args:
        source: One of :data:`offloop.bus.tools.logs.SOURCES` or :data:`~offloop.bus.tools.logs.STORES`.
        path: The log.
        where: The runs directory.
        name: Name of the run; by default that of the run in the log, or of its folder or file. Several runs append
            theirs.
        step_column: Column of steps in CSV and JSON lines.
        report: Called with each run as it is done.

    Of several runs, those that exist are skipped. Raises ConfigurationError if it is not such a log, has no numbers, or
    nothing new; RunDirectoryError if a run cannot be written; OSError if the log cannot be read."""
    if not path.exists():
        raise ConfigurationError(f"no file or folder {path}: name the log to import")
    find, read = open_source(source, step_column)
    logs = find(path)
    root = runs_dir(where)
    names: dict[str, Log] = {}
    for log in logs:
        names[_run_name(log, name, len(logs) > 1, names)] = log
    done = []
    for one, log in names.items():
        if not os.path.lexists(root / one):
            done.append(_import(source, log, root, one, read(log)))
        elif len(logs) > 1:
            done.append(Imported(one, str(log), 0, 0, 0, (), (), is_skipped=True))
        else:
            raise ConfigurationError(_exists(one, root))
        report(done[-1])
    if all(one.run is None for one in done):
        raise ConfigurationError(f"{done[0].log} has no numbers: nothing is imported")
    if all(one.run is None or one.is_skipped for one in done):
        raise ConfigurationError(f"nothing new in {path}: {_exists(next(iter(names)), root)}")
    return done


def _exists(run: str, root: Path) -> str:
    return f"run {run!r} exists in {in_words(root)}: choose another name with '--run-name'"


def _run_name(log: Log, given: str | None, is_one_of_several: bool, taken: Container[str]) -> str:
    if given is not None and not is_one_of_several:
        return check_run_name(given)
    own = _UNNAMED.sub("-", log.name).strip("-._")
    name = f"{given}-{own}" if given is not None else own[:_LONGEST_NAME]
    if not name:
        raise ConfigurationError(f"{log} has no name that a run may have: choose one with '--run-name'")
    number, first = 1, name
    while name in taken:
        if not log.key:
            raise ConfigurationError(f"{log} would be another run {name!r}: import each by its own path")
        # The order of the logs is that of their starts, so the next import finds the same names.
        number += 1
        end = f"-{number}"
        name = first[: _LONGEST_NAME - len(end)] + end
    return check_run_name(name)


_Latest = dict[str, tuple[float, float | None]]


def _import(source: str, log: Log, root: Path, name: str, rows: Iterable[LogRow]) -> Imported:
    counts = 0, 0, 0
    try:
        steps, replaced = _gather(rows)
        if steps:
            counts = len(steps), sum(map(len, steps.values())), replaced
            with atomic_replace(root / name, is_new=True) as draft:
                directory = RunDirectory(draft.parent, name)
                try:
                    _write(directory, steps, log, source)
                    _annotate(draft, log)
                finally:
                    directory.release()
    except UnicodeError as error:
        raise ConfigurationError(f"{log} is not text in UTF-8 ({error})") from None
    except RecursionError:
        raise ConfigurationError(f"{log} has values that are nested too deep") from None
    except CheckpointError as error:
        raise RunDirectoryError(str(error)) from None
    notes, damage = (tuple(found.lines()) for found in (log.notes, log.damage))
    return Imported(name if steps else None, str(log), *counts, notes, damage)


def _gather(rows: Iterable[LogRow]) -> tuple[dict[int, _Latest], int]:
    """Return the last values and their times by step, in order, and how many values were replaced by later ones."""
    steps: dict[int, _Latest] = {}
    replaced = 0
    for step, time, values in rows:
        if values is None:
            steps = {before: latest for before, latest in steps.items() if before < step}
        elif values:
            known = time if time is not None and 0 <= time < MAX_TIME / 10**9 else None
            latest = steps.setdefault(step, {})
            replaced += sum(name in latest and latest[name][0] != value for name, value in values.items())
            latest |= {name: (value, known) for name, value in values.items()}
    return dict(sorted(steps.items())), replaced


def _places(names: Iterable[str]) -> dict[str, _Place]:
    places: dict[str, _Place] = {}
    taken: set[_Place] = set()
    order = {name: number for number, name in enumerate(_LOSSES)}
    for name in sorted(names, key=lambda name: order.get(name.casefold(), 0)):
        place = _place(name)
        if place in taken:
            place = ("logged", name)
        taken.add(place)
        places[name] = place
    return places


def _place(name: str) -> _Place:
    folded = name.casefold()
    if folded in _LOSSES:
        return ("loss",)
    if folded in _EPOCHS:
        return ("epoch",)
    if found := _METRICS.fullmatch(name):
        return ("train", found["name"]) if found["label"] == "train" else ("eval", found["label"], found["name"])
    if found := _EVALUATED.fullmatch(name):
        return "eval", found["label"] or found["label_last"], found["name"] or found["name_first"]
    return "logged", logged_name(name)


def _write(directory: RunDirectory, steps: Mapping[int, _Latest], log: Log, source: str) -> None:
    """Write recording and ``run.json``."""
    places = _places(dict.fromkeys(name for latest in steps.values() for name in latest))
    times = [time for latest in steps.values() for _, time in latest.values() if time is not None]
    if log.started is not None:
        times.append(log.started)
    # A log without times has the time of its files.
    began = _nanoseconds(min(times)) if times else max(path.stat().st_mtime_ns for path in log.files)
    ending = Ending(log.status)
    description = {
        "framework": {"name": f"{IMPORTED} ({source})", "version": None},
        "unavailable": {"events": [event.value for event in Event if event not in _EVENTS], "fields": {}},
    }
    number, recording = directory.next_attempt()
    with closing(RecordingWriter(recording, directory.name, number, directory.run_id)) as writer:
        stream = _Stream(writer, directory.name, number, began, places)
        stream.send(Event.INIT, description)
        stream.send(Event.FIT_START, _facts(log, places))
        for step, latest in steps.items():
            stream.step(step, latest)
        if log.status in ("finished", "stopped"):
            stream.send(Event.FIT_END, {})
        if log.status != "lost":
            stream.end(ending)
    key = {"key": log.key} if log.key else {}
    info = {**description, IMPORTED_FROM: {"source": source, "path": str(log.path.absolute()), **key}}
    directory.begin_attempt(recording, number, info, 1, began / 10**9)
    at = stream.at
    reached = Reached(at.epoch, at.batch, at.sample, None)
    ended = max(stream.time / 10**9, log.ended or 0)
    directory.end_attempt(ending, reached=reached, ended=ended)


def _annotate(path: Path, log: Log) -> None:
    tags = []
    for tag in log.tags:
        try:
            tags.append(check_tag(tag))
        except ConfigurationError as error:
            log.notes.add(f"a tag is left out: {error}")
    if tags or log.note:
        annotate(path, add=tags[:MAX_TAGS], note=log.note[:MAX_NOTE])


def _nanoseconds(seconds: float) -> int:
    # The product of the floats would be rounded to a quarter of a microsecond.
    whole = int(seconds)
    return whole * 10**9 + round((seconds - whole) * 10**9)


def _facts(log: Log, places: Mapping[str, _Place]) -> dict[str, Any]:
    labels = dict.fromkeys(place[1] for place in places.values() if place[0] == "eval")
    found = hyperparameters_in({FIELD: redact(plain(log.hyperparameters))})
    hyperparameters = {FIELD: {name: _packable(value) for name, value in found.items()}} if found else {}
    return {"evaluators": list(labels), **hyperparameters}


def _packable(value: Any) -> Any:
    try:
        msgpack.packb(value)
    except OverflowError:
        return str(value)
    return value


class _Stream:
    """Writes ``batch_end`` for values of the training, then ``eval_end`` per evaluator and ``eval_after_all``."""

    def __init__(
        self, writer: RecordingWriter, run: str, attempt: int, began: int, places: Mapping[str, _Place]
    ) -> None:
        self._writer = writer
        self._run, self._attempt = run, attempt
        self._began = self.time = began
        self._places = places
        self._seq = 0
        self._topics: dict[str, tuple[bytes, Any]] = {}
        self._contexts: dict[str | None, bytes] = {}
        self.at = TrainingTime(*[0] * 14)

    def step(self, step: int, latest: _Latest) -> None:
        fields: dict[str, Any] = {}
        logged: dict[str, float] = {}
        evaluated: dict[str, dict[str, float]] = {}
        times: dict[str | None, float] = {}
        for name, (value, time) in latest.items():
            kind, *key = self._places[name]
            label = None
            if kind == "epoch":
                if 0 <= value < _LARGEST_COUNT:
                    self.at = self.at._replace(epoch=int(value))
                if value != self.at.epoch:
                    logged[name] = value
            elif kind == "loss":
                fields["loss"] = float(value)
            elif kind == "train":
                fields.setdefault("train_metrics", {})[key[0]] = value
            elif kind == "eval":
                label = key[0]
                evaluated.setdefault(label, {})[key[1]] = value
            else:
                logged[key[0]] = value
            if time is not None:
                times[label] = min(time, times.get(label, time))
        if logged:
            fields["logged"] = [[step, logged]]
        self.at = self.at._replace(batch=step)
        if fields:
            self.send(Event.BATCH_END, fields, times.get(None))
        for label, metrics in evaluated.items():
            self.send(Event.EVAL_END, {"eval_metrics": {label: metrics}}, times.get(label), label)
        if evaluated:
            self.send(Event.EVAL_AFTER_ALL, {})

    def send(self, event: Event, fields: dict[str, Any], time: float | None = None, label: str | None = None) -> None:
        if time is not None:
            self.time = max(self.time, _nanoseconds(time))
        self.at = self.at._replace(total_wct=(self.time - self._began) // 1000)
        self._append(event.value, self.at, fields, label)

    def end(self, ending: Ending) -> None:
        self._append(END, TrainingTime(*[0] * 14), ending.to_fields(), None)

    def _append(self, name: str, at: TrainingTime, fields: dict[str, Any], label: str | None) -> None:
        if name not in self._topics:
            topic = Topic(self._run, name, 0)
            self._topics[name] = topic.encode(), event_encoder(topic, self._attempt)
        if label not in self._contexts:
            context = {"world_size": 1} if label is None else {"world_size": 1, "dataloader_label": label}
            self._contexts[label] = pack_map(context)
        front, encode = self._topics[name]
        self._seq += 1
        frame = encode(self._seq, self._seq, self.time, at, None, fields, self._contexts[label])
        if len(frame) > MAX_FRAME:
            raise ConfigurationError(f"step {at.batch} of the log has more values than an event can hold")
        self._writer.append(front[:-1], self._seq, self._seq, self.time, frame[len(front) :])
