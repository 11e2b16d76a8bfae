"""An entry of the index: the summary of one run."""

import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from offloop.bus.errors import ProtocolError, RunDirectoryError
from offloop.bus.files import walk_files
from offloop.bus.index.annotations import Annotations
from offloop.bus.index.checkpoints import Checkpoint, find_checkpoints
from offloop.bus.protocol.frames import decode_whole_event
from offloop.bus.protocol.run_state import Reached, SecondsSince1970
from offloop.bus.recording.summary import Metric, Rows, Summary
from offloop.bus.recording.summary import MetricValues as MetricValues
from offloop.bus.runs.directory import RUN_FILE, RunInfo
from offloop.bus.runs.listing import ListedRun
from offloop.bus.types.hyperparameters import FIELD, hyperparameters_in
from offloop.bus.types.metrics import Mode as Mode
from offloop.bus.types.metrics import is_of_evaluation, shown_step

GOING_ON = ("live", "paused")  # status of runs that have not ended
STORED = "entry.msgpack"  # file of a run with its entry, see bus.index.store

_MOST_EVALUATED = 256  # metrics of checkpoints
UNREADABLE = "unreadable"  # status of a run with an unreadable directory or run.json, see problem


_OF_LISTED = ("run", "id", "status", "error", "reason", "started", "ended", "attempt")
_MANY = 500  # so many metrics of a run are kept as numbers


def encode(entry: Any) -> bytes:
    return msgspec.msgpack.encode(entry, enc_hook=dict)


class ManyMetrics(Mapping[str, MetricValues]):
    """The values of very many metrics: 56 bytes each, and names that runs share."""

    def __init__(self, metrics: Mapping[str, MetricValues]) -> None:
        self._places = _places_of(tuple(metrics))
        self._rows = Rows(metrics.values())

    def __getitem__(self, name: str) -> MetricValues:
        return self._rows[self._places[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ManyMetrics) and (self._places, self._rows) == (other._places, other._rows)


@functools.lru_cache(maxsize=64)
def _places_of(names: tuple[str, ...]) -> dict[str, int]:
    return {name: place for place, name in enumerate(names)}


class RunEntry(msgspec.Struct):
    """Summary of a run; ``None`` means unknown."""

    run: str  # name of its directory
    id: str | None = None
    status: str = UNREADABLE  # live, paused, finished, failed, stopped, lost or unreadable
    error: str | None = None
    reason: str | None = None
    started: SecondsSince1970 | None = None  # start of the newest attempt, in seconds since 1970
    ended: SecondsSince1970 | None = None
    attempts: int = 0
    epoch: int | None = None
    batch: int | None = None
    sample: int | None = None
    planned: str | None = None  # planned duration, such as 10ep
    size: int = 0  # bytes on disk at the last refresh
    tags: tuple[str, ...] = ()
    note: str = ""
    pinned: bool = False
    archived: bool = False
    hyperparameters: dict[str, Any] = {}  # hyperparameters of the newest attempt
    metrics: Mapping[str, MetricValues] = {}  # by full name, such as loss/train/total
    left_out: int = 0  # metrics beyond the limit of the newest attempt's summary, as far as they are counted
    tables: dict[str, int] = {}  # number of rows of each table, of all attempts
    checkpoints: tuple[Checkpoint, ...] = ()  # the earliest first
    problem: str | None = None  # unreadable part, and why
    attempt: int = 1
    recording: str = ""  # file name of its recording

    @property
    def is_going_on(self) -> bool:
        return self.status in GOING_ON

    @property
    def folder(self) -> str:
        """Prefix of its name in a table of several folders; else empty."""
        return self.run.rpartition("/")[0]

    @property
    def duration(self) -> float | None:
        """Seconds of the newest attempt so far."""
        end = time.time() if self.is_going_on else self.ended
        return None if end is None or self.started is None else max(end - self.started, 0.0)

    def __post_init__(self) -> None:
        if len(self.metrics) > _MANY and not isinstance(self.metrics, ManyMetrics):
            self.metrics = ManyMetrics(self.metrics)

    def annotated(self, annotations: Annotations) -> "RunEntry":
        return msgspec.structs.replace(self, **msgspec.structs.asdict(annotations))


_decode = msgspec.msgpack.Decoder(RunEntry).decode


def make_entry(
    run: RunInfo, summaries: Iterable[Summary], annotations: Annotations, problem: str | None = None
) -> RunEntry:
    """Return the entry of a run; ``summaries`` has the newest last. Raises RunDirectoryError for a damaged run."""
    of_attempts = list(summaries)
    newest = of_attempts[-1] if of_attempts else None
    reached = run.last.reached
    if reached is None and newest is not None:
        with contextlib.suppress(ProtocolError):  # no batch has ended
            reached = Reached.of(decode_whole_event(newest.last))
    hyperparameters = dict(newest.hyperparameters) if newest is not None else {}
    entry = RunEntry(
        run=run.name,
        id=run.id,
        status=run.status,
        error=run.last.error,
        reason=run.last.reason,
        started=run.last.started,
        ended=run.last.ended,
        attempts=len(run.attempts),
        **({} if reached is None else msgspec.structs.asdict(reached)),
        size=size_of(run.path),
        **msgspec.structs.asdict(annotations),
        hyperparameters=hyperparameters,
        metrics=metric_values(of_attempts),
        left_out=0 if newest is None else len(newest.left_out),
        tables=count_rows(of_attempts),
        checkpoints=find_checkpoints(run, evaluated(of_attempts)),
        problem=problem,
        attempt=run.last.number,
        recording=run.recording.name,
    )
    try:
        if not hyperparameters:
            entry.hyperparameters = hyperparameters_in({FIELD: {"config": run.last.info.get("config", {})}})
        # Refuses values that cannot be stored and read again, such as a number of more than 64 bits.
        return _decode(encode(entry))
    except (ValueError, OverflowError, RecursionError) as error:
        raise RunDirectoryError(f"{run.path / RUN_FILE} is damaged: {error}", path=run.path / RUN_FILE) from None


def unreadable_entry(run: str, why: str, annotations: Annotations) -> RunEntry:
    return RunEntry(run, problem=why, attempt=0).annotated(annotations)


def listed_entry(listed: ListedRun) -> RunEntry:
    known = {name: getattr(listed, name) for name in _OF_LISTED}
    reached = {} if listed.reached is None else msgspec.structs.asdict(listed.reached)
    return RunEntry(**known, **reached, attempts=len(listed.attempts) or 1)


def newest_first(entries: Iterable[RunEntry]) -> list[RunEntry]:
    return sorted(entries, key=lambda entry: -math.inf if entry.started is None else entry.started, reverse=True)


def metric_values(summaries: Iterable[Summary]) -> dict[str, MetricValues]:
    """Return each metric over all attempts, with steps of :func:`offloop.bus.types.metrics.shown_step`."""
    found: dict[str, MetricValues] = {}
    known = sorted(summaries, key=attrgetter("attempt"))
    for name in dict.fromkeys(chain.from_iterable(summary.metrics for summary in known)):
        values = _over_attempts([(one.attempt, one.metrics[name]) for one in known if name in one.metrics])
        if values is not None:
            found[name] = values
    for name in filter(is_of_evaluation, found):
        one = found[name]
        one.last_step, one.low_step, one.high_step = (
            shown_step(name, step) for step in (one.last_step, one.low_step, one.high_step)
        )
    return found


def _over_attempts(recorded: Sequence[tuple[int, Metric]]) -> MetricValues | None:
    """Return the values of a metric in all attempts. An earlier one counts up to the first step of the later ones.

    Results that a consumer has added after the end belong to their attempt."""
    found, current, until, first = None, recorded[-1][0], math.inf, math.inf
    for attempt, metric in reversed(recorded):
        if attempt != current:
            current, until = attempt, first
        first = min(first, metric.first_step)
        values = metric.whole(until)
        if values is not None and found is not None:
            values.merge(found)
        found = values or found
    return found


def count_rows(summaries: Iterable[Summary]) -> dict[str, int]:
    """Return the number of rows of each table over all attempts."""
    counts: Counter[str] = Counter()
    for summary in summaries:
        counts.update(summary.rows)
    return dict(counts)


def evaluated(summaries: Iterable[Summary]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for summary in summaries:
        for name in islice(filter(is_of_evaluation, summary.metrics), _MOST_EVALUATED):
            for step, value in summary.metrics[name].points():
                if step == int(step):
                    found.setdefault(int(step), {})[name] = value
    return found


def size_of(run: Path) -> int:
    """Return the bytes of all files except the stored entry."""
    return sum(about.st_size for path, about in walk_files(run) if not path.endswith(f"/{STORED}"))
