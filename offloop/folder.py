"""The runs of a folder in Python: ``offloop.runs("runs").where("lr > 0.01").best("MulticlassAccuracy").metrics()``."""

import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, overload

from offloop.bus.errors import ConfigurationError, RunDirectoryError, RunNotFoundError
from offloop.bus.index.annotations import annotate
from offloop.bus.index.checkpoints import Checkpoint
from offloop.bus.index.entry import MetricValues, Mode, RunEntry
from offloop.bus.index.index import RunIndex
from offloop.bus.index.table import RunTable
from offloop.bus.printing import escape
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.derived import derived_recordings
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.tables import read_rows, require_table
from offloop.bus.runs.directory import RunInfo, check_named, in_words, is_locked, read_run
from offloop.bus.types.event import Event
from offloop.bus.types.metrics import MetricNames, is_named
from offloop.bus.types.table import FIXED
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.series import Floats
from offloop.tables import Library, as_table, by_step, library, load

_log = logging.getLogger("offloop")

Value = TypeVar("Value")
_Points: TypeAlias = tuple[Floats, Floats]  # steps and values

_NAMED = 5
_OF_EVERY_RUN = ("run", "status", "started", "duration", "tags")


def runs(folder: str | os.PathLike[str] | None = None, *, archived: bool = False) -> "Runs":
    """Return the runs of a folder, pinned ones first, then the newest.

    ``folder`` is by default ``$OFFLOOP_RUNS_DIR``, else ``runs``. Archived runs come only with ``archived``. Raises
    RunDirectoryError if the folder cannot be read, or a named one does not exist."""
    check_named(folder)
    opened = _Folder(folder)
    return Runs(opened, lambda: opened.table.choose("", archived=archived).entries)


class _Folder:
    """The index of a folder, shared by all objects for its runs."""

    def __init__(self, where: str | os.PathLike[str] | None) -> None:
        self._index = RunIndex(where)
        self.root: Path = self._index.root
        # Users of notebooks close nothing.
        weakref.finalize(self, self._index.close)
        self.refresh()

    def refresh(self) -> None:
        self._index.refresh()
        self.table: RunTable = RunTable(dict(sorted(self._index.entries.items())))

    def replace(self, entry: RunEntry) -> None:
        self.table = RunTable({**self.table.entries, entry.run: entry}, self.table)


class Runs(Sequence["Run"]):
    """Runs of a folder, in an order, see :func:`offloop.runs`.

    ``runs[0]`` is the first run, ``runs[:5]`` are the first five, ``runs["digits-2"]`` is the run of that name.
    Hyperparameters and metrics have full and short names (``config/lr`` or ``lr``); ``config/lr`` takes precedence over
    others that end in ``lr``. Methods raise ConfigurationError for a column, metric or expression that no run of the
    folder has, and for a missing library."""

    def __init__(self, folder: _Folder, choose: Callable[[], list[RunEntry]]) -> None:
        self._folder = folder
        self._choose = choose
        self._runs = [Run(folder, entry) for entry in choose()]

    def __len__(self) -> int:
        return len(self._runs)

    @overload
    def __getitem__(self, place: int | str) -> "Run": ...
    @overload
    def __getitem__(self, place: slice) -> "Runs": ...
    def __getitem__(self, place: int | str | slice) -> "Run | Runs":
        if isinstance(place, slice):
            return Runs(self._folder, lambda: self._choose()[place])
        if not isinstance(place, str):
            return self._runs[place]
        for run in self._runs:
            if place in (run.name, run.id):
                return run
        known = [run.name for run in self._runs]
        more = " and more" if len(known) > _NAMED else ""
        raise RunNotFoundError(
            f"no run {place!r} among these of {in_words(self._folder.root)}: "
            f"there {'are ' + ', '.join(known[:_NAMED]) + more if known else 'is none'}",
            run=place,
        )

    def __contains__(self, run: object) -> bool:
        return any(run in (one, one.name) for one in self._runs)

    def where(self, expression: str) -> "Runs":
        """Return the runs for which an expression such as ``lr > 0.01 and status == finished`` is true.

        See :func:`offloop.bus.index.filters.parse_filter`."""
        return Runs(self._folder, lambda: self._folder.table.where(self._choose(), expression))

    def sort(self, name: str) -> "Runs":
        """Return the runs sorted by a column, with a minus before its name the greatest first, without a value last."""
        return Runs(self._folder, lambda: self._folder.table.sort(self._choose(), name))

    def best(self, metric: str, mode: Mode | None = None) -> "Run":
        """Return the run with the best value of a metric at any step.

        ``mode`` (``min`` or ``max``) is needed if neither the metric's name nor the runs say which values are better.
        Raises RunNotFoundError if none of these runs has a finite value."""
        found = self._folder.table.best(self._entries, metric, mode)
        if found is None:
            raise RunNotFoundError(f"none of these {len(self):,} runs has a finite value of {metric!r}")
        return self[found.run]

    def refresh(self) -> "Runs":
        """Read the folder again, choose and sort again, and return this object."""
        self._folder.refresh()
        self._runs = [Run(self._folder, entry) for entry in self._choose()]
        return self

    def frame(self, columns: Sequence[str] | None = None, to: Library | None = None) -> Any:
        """Return a table with a row for each run.

        Args:
            columns: names of columns, such as ``["run", "lr", "MulticlassAccuracy.best"]``. By default name, status,
                times and tags, every hyperparameter, and the last value of every metric.
            to: ``pandas``, ``polars``, or ``dict`` for lists by name. By default the first that is installed."""
        entries = self._entries
        if columns is None:
            rows = [
                entry.hyperparameters
                | {name: values.last for name, values in entry.metrics.items()}
                | {name: getattr(entry, name) for name in _OF_EVERY_RUN}
                for entry in entries
            ]
            names = dict.fromkeys((*_OF_EVERY_RUN, *(name for row in rows for name in row)))
            return as_table({name: [_cell(name, row.get(name)) for row in rows] for name in names}, library(to))
        found = {name: self._folder.table.column(name) for name in columns}
        table = {name: [_cell(one.name, one.value(entry)) for entry in entries] for name, one in found.items()}
        return as_table(table, library(to))

    @property
    def _entries(self) -> list[RunEntry]:
        return [run._entry for run in self._runs]

    def __repr__(self) -> str:
        names = ", ".join(run.name for run in self._runs[:_NAMED])
        more = ", ..." if len(self) > _NAMED else ""
        count = f"{len(self):,} run{'' if len(self) == 1 else 's'}"
        return escape(f"<{count} of {in_words(self._folder.root)}{f': {names}{more}' if names else ''}>")


class Run:
    """One run of a folder, as :class:`Runs` found it.

    :meth:`metrics` and :meth:`events` read its recordings as they are now; everything else is as of the last
    :meth:`Runs.refresh`. Methods raise ConfigurationError
    for an unknown name or a missing library, RecordingError for an unreadable recording, RunNotFoundError for an
    unknown attempt."""

    def __init__(self, folder: _Folder, entry: RunEntry) -> None:
        self._folder = folder
        self._known = entry

    @property
    def name(self) -> str:
        """Name of its directory."""
        return self._known.run

    @property
    def id(self) -> str | None:
        """Random id, see :attr:`offloop.bus.RunInfo.id`."""
        return self._entry.id

    @property
    def path(self) -> Path:
        """Its directory."""
        return self._folder.root / self.name

    @property
    def status(self) -> str:
        """``live``, ``paused``, ``finished``, ``failed``, ``stopped``, ``lost`` or ``unreadable``."""
        return self._entry.status

    @property
    def error(self) -> str | None:
        """Error of a failed run."""
        return self._entry.error

    @property
    def problem(self) -> str | None:
        """Unreadable part, such as a damaged recording, and why."""
        return self._entry.problem

    @property
    def started(self) -> datetime | None:
        """Start of its newest attempt; ``None`` if unreadable."""
        return _moment(self._entry.started)

    @property
    def ended(self) -> datetime | None:
        """End of its newest attempt."""
        return _moment(self._entry.ended)

    @property
    def config(self) -> Mapping[str, Any]:
        """Hyperparameters by name; the end of a name is enough: ``run.config["lr"]``."""
        return _ByName(self._entry.hyperparameters, f"run {self.name} has no hyperparameter")

    @property
    def summary(self) -> Mapping[str, MetricValues]:
        """Last, least and greatest value of each metric with their steps: ``run.summary["loss"].low``."""
        return _ByName(self._entry.metrics, f"run {self.name} has no metric")

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Its checkpoints, the earliest first."""
        return self._entry.checkpoints

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags in the order in which they were added."""
        return self._entry.tags

    @property
    def note(self) -> str:
        """The user's note."""
        return self._entry.note

    def annotate(
        self,
        *,
        add: Collection[str] = (),
        remove: Collection[str] = (),
        note: str | None = None,
        pinned: bool | None = None,
        archived: bool | None = None,
    ) -> None:
        """Add and remove tags, replace the note, pin or archive the run. The rest stays unchanged.

        Raises ConfigurationError for a tag or note that is not allowed; RunDirectoryError if it cannot be written."""
        with contextlib.suppress(RunDirectoryError):  # an unreadable run can be tagged and archived
            self._read()
        add, remove = ([tags] if isinstance(tags, str) else tags for tags in (add, remove))
        said = annotate(self.path, add=add, remove=remove, note=note, pinned=pinned, archived=archived)
        self._folder.replace(self._entry.annotated(said))

    def metrics(
        self, names: str | Collection[str] | None = None, *, attempt: int | None = None, to: Library | None = None
    ) -> Any:
        """Return all values of metrics: a row for each step, a column for each metric.

        These are losses, metrics, learning rates and throughput, as logged by the callbacks ``metrics``, ``lr`` and
        ``speed``, and the values that the training logged itself. A step counts batches from 0; an evaluation is in the
        row of the last batch before it. The last value for a step counts, and the later attempt.

        Args:
            names: one metric or several, by full or short names. By default all.
            attempt: one attempt; -1 is the newest. By default all together.
            to: ``pandas`` (with the steps as index), ``polars``, or ``dict`` for lists by name. By default the first
                that is installed."""
        chosen = library(to)
        return by_step(self._history(names, attempt), chosen)

    def tables(self) -> dict[str, int]:
        """Return the tables that the training logged, with the number of rows of each."""
        return dict(self._entry.tables)

    def table(self, name: str, *, attempt: int | None = None, to: Library | None = None) -> Any:
        """Return all rows of a table in recorded order, such as ``run.table("completions")``.

        Columns are ``step``, ``time`` (seconds since 1970), ``rank`` and ``attempt``, then those of the table. An image
        is its hash.

        ``attempt`` and ``to`` are as for :meth:`metrics`. Raises ConfigurationError if the run has no such table."""
        chosen = library(to)
        parts = list(read_rows(self._recordings(attempt), name))
        if not parts:
            require_table(name, self.tables(), self.name)
        columns = dict.fromkeys((*FIXED, *(column for part in parts for column in part.columns)))
        rows = [row for part in parts for row in part.records()]
        return as_table({column: [_table_cell(row.get(column)) for row in rows] for column in columns}, chosen)

    def image(self, name: str) -> Any:
        """Return an image of a table by its hash: the bytes of its file, or an array (height, width, channels).

        Raises ConfigurationError if the run does not have it."""
        for part in read_rows(self._recordings(None)):
            if name in part.images:
                *shape, data = part.images[name]
                return load("numpy", "an image of pixels").frombuffer(data, "uint8").reshape(shape) if shape else data
        raise ConfigurationError(f"run {self.name} has no image {name!r}: 'table()' has the hashes of its images")

    def events(self, *events: Event | str, attempt: int | None = None) -> Iterator[Snapshot]:
        """Yield the snapshots of these events, by default all, of every rank in recorded order.

        ``attempt`` chooses one attempt, -1 the newest."""
        chosen = [Event(event) for event in events] or None
        recordings = self._recordings(attempt)
        return (snapshot for recording in recordings for snapshot in recording.snapshots(chosen))

    @property
    def _entry(self) -> RunEntry:
        # A deleted run keeps its last state, also when another one has its name.
        found = self._folder.table.entries.get(self.name, self._known)
        if self._is_same(found.id):
            self._known = found
        return self._known

    def _is_same(self, run_id: str | None) -> bool:
        return run_id == self._known.id or None in (run_id, self._known.id)

    def _read(self) -> RunInfo:
        """Read its directory. Raises RunNotFoundError if it was deleted, and another run has its name."""
        info = read_run(self.path)
        if not self._is_same(info.id):
            raise RunNotFoundError(
                f"run {self.name!r} was deleted, and another one has its name: call offloop.runs() again", run=self.name
            )
        return info

    def _recordings(self, attempt: int | None) -> list[Recording]:
        known = [one.number for one in self._read().attempts]
        if attempt is not None:
            known = [known[attempt] if -len(known) <= attempt < 0 else attempt]
        return [Recording(self.path, number) for number in known] + derived_recordings(self.path, known)

    def _history(self, names: str | Collection[str] | None, attempt: int | None) -> dict[str, _Points]:
        numpy = load("numpy", "reading all values")
        found: dict[str, _Points] = {}
        known: dict[str, None] = {}
        requested = [names] if isinstance(names, str) else names
        for recording in self._recordings(attempt):
            view = _read_metrics(recording, requested)
            known |= dict.fromkeys(view.names())
            for name in view.drawn:
                steps, values = view.series(name).points(width=sys.maxsize)[:2]
                if not len(steps):
                    continue
                before = found.get(name, (steps[:0], values[:0]))
                kept = before[0] < steps[0]
                found[name] = (
                    numpy.concatenate([before[0][kept], steps]),
                    numpy.concatenate([before[1][kept], values]),
                )
            if recording.damage and not is_locked(self.path):
                _log.warning("%s: %s", recording.path, recording.damage)
        if requested is None:
            return {name: found[name] for name in sorted(found)}
        by_name = MetricNames(known)
        whole = [by_name.find(name, f"run {self.name} has no metric") for name in requested]
        return {name: found[name] for name in whole}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.path.absolute() == other.path.absolute()

    def __hash__(self) -> int:
        return hash(self.path.absolute())

    def __repr__(self) -> str:
        return escape(f"<Run {self.name} of {in_words(self._folder.root)}: {self.status}>")


class _ByName(Mapping[str, Value]):
    """Values by full or short name, as :class:`offloop.bus.index.columns.Columns` finds them."""

    def __init__(self, values: Mapping[str, Value], missing: str) -> None:
        self._values = values
        self._missing = missing

    def find(self, name: str) -> str:
        found = self._matches(name)
        return found[0] if len(found) == 1 else MetricNames(self._values).find(name, self._missing)

    def _matches(self, name: str) -> list[str]:
        for full in (name, f"config/{name}"):
            if full in self._values:
                return [full]
        return MetricNames(self._values).matches(name)

    def __getitem__(self, name: str) -> Value:
        return self._values[self.find(name)]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and len(self._matches(name)) == 1

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if self._matches(name) else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(dict(self._values))


def _read_metrics(recording: Recording, names: Collection[str] | None) -> RunView:
    def wants(metric: str) -> bool:
        return names is None or metric in names or any(is_named(metric, name) for name in names)

    view = RunView(recording.run_name, recording.attempt, sys.maxsize, wants)
    for snapshot in recording:
        view.see(snapshot)
    return view


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def _table_cell(value: Any) -> Any:
    return value["image"] if isinstance(value, dict) and value.keys() == {"image"} else value


def _cell(column: str, value: Any) -> Any:
    if column in ("started", "ended"):
        return _moment(value)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
