"""Runs as one HTML file to share, and charts as pictures."""

import base64
import contextlib
import hashlib
import html
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from offloop.bus.errors import ConfigurationError, OffloopError
from offloop.bus.files import atomic_output
from offloop.bus.index.checkpoints import checkpoint_rows
from offloop.bus.index.columns import facts_of
from offloop.bus.index.entry import RunEntry
from offloop.bus.index.index import read_results
from offloop.bus.printing import escape
from offloop.bus.protocol.tables import RowsAdded
from offloop.bus.recording.derived import derived_recordings
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.summary import Point
from offloop.bus.recording.tables import read_rows, require_table
from offloop.bus.runs.console import last_traceback
from offloop.bus.runs.directory import RunInfo
from offloop.bus.tools.chart import COLORS, Line, draw
from offloop.bus.types.hyperparameters import chosen_first, is_of_the_training, value_text
from offloop.bus.types.metrics import MetricNames, direction_of, goals_in, groups_of, shown_step
from offloop.bus.types.table import FIXED
from offloop.bus.types.units import Scale, number_text, scale_of, when

MAX_CHARTS = 100
MAX_LINES = 300  # of all charts together
MAX_ROWS = 100  # of a table
MAX_TABLES = 10
MAX_CHECKPOINTS = 100
MAX_CELL = 1000  # characters
MAX_ERROR = 10_000
MAX_TABLE = 500_000  # characters


class ReportedRun:
    """The contents of a report about a run. Raises RunDirectoryError if it cannot be read."""

    def __init__(self, run: RunInfo) -> None:
        self.run = run
        entry, self._summaries = read_results(run)
        self.entry: RunEntry = entry
        error = entry.error
        self.traceback: str | None = None if error is None else last_traceback(run.path, run.last.number, error)

    def rows(self, table: str | None) -> Iterator[RowsAdded]:
        """Yield the rows of a table, or of all, with those beside the recordings."""
        recordings: list[Recording] = []
        for attempt in self.run.attempts if self.entry.tables else ():
            with contextlib.suppress(OffloopError):  # the entry names an unreadable one
                recordings.append(Recording(attempt.recording))
        return read_rows(recordings + derived_recordings(self.run.path), table)

    def points(self, metric: str) -> list[Point]:
        """Return the points of a metric, of each step those of the last attempt."""
        found: list[Point] = []
        for known in (summary.metrics.get(metric) for summary in self._summaries):
            later = [] if known is None else [(shown_step(metric, step), value) for step, value in known.points()]
            # A resumed training repeats some steps.
            found = [point for point in found if not later or point[0] < later[0][0]] + later
        return found


class _Metrics:
    """The metrics of all runs, and those that are shown."""

    def __init__(self, runs: Sequence[ReportedRun], requested: Sequence[str] | None) -> None:
        if len(runs) > len(COLORS):
            raise ConfigurationError(f"{len(runs)} runs are too many for one file: name up to {len(COLORS)}")
        self._runs = runs
        known = tuple(dict.fromkeys(chain.from_iterable(run.entry.metrics for run in runs)))
        self.names = MetricNames(known)
        self.goals = goals_in(run.entry.hyperparameters for run in runs)
        self._units = {name: value for run in runs for name, value in run.entry.hyperparameters.items()}
        if requested is None:
            chosen = list(chain.from_iterable(groups_of(known).values()))
        else:
            chosen = [self.names.find(name) for name in dict.fromkeys(requested)]
        self.shown = chosen[: min(MAX_CHARTS, MAX_LINES // len(runs))]
        self.left_out = len(known) - len(self.shown)

    def scale(self, metric: str) -> Scale:
        return scale_of(metric, self._units)

    def chart(self, metric: str, title: str | None = None) -> str:
        of_runs = ((run.entry.run, run.points(metric)) for run in self._runs)
        lines = (Line(name, points, color) for color, (name, points) in enumerate(of_runs))
        return draw([line for line in lines if line.points], self.scale(metric), title)


def write_report(
    runs: Sequence[ReportedRun],
    output: Path,
    to: str,
    *,
    metrics: Sequence[str] | None = None,
    table: str | None = None,
    force: bool = False,
) -> int:
    """Write up to eight runs as a file to share; return the number of metrics left out.

    ``html`` needs no server, network or script. Its size is bounded: by the constants of this module, and three points
    for every two pixels. ``svg`` is the chart of the first of the metrics.

    Args:
        output: The file, replaced only with ``force``.
        metrics: Short or full names; by default all, up to the limits.
        table: The only table; by default all.

    Raises ConfigurationError for an unknown metric or table, or too many runs."""
    if table is not None:
        tables = chain.from_iterable(run.entry.tables for run in runs)
        require_table(table, tables, ", ".join(run.entry.run for run in runs))
    shown = _Metrics(runs, metrics)
    first = shown.shown[:1]
    drawn = [shown.chart(name, shown.names.short(name)) for name in first] if to == "svg" else _page(runs, shown, table)
    with atomic_output(output, [one.recording for run in runs for one in run.run.attempts], force) as draft:
        draft.write_text("".join(drawn), encoding="utf-8")
    return 0 if metrics else shown.left_out


def _page(runs: Sequence[ReportedRun], shown: _Metrics, table: str | None) -> Iterator[str]:
    entries = [run.entry for run in runs]
    title = _text(entries[0].run if len(runs) == 1 else f"{len(runs)} runs")
    style, script = (Path(__file__).with_name(f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{title} · offloop</title><style>{style}</style></head><body><h1>{title}</h1><main>"
    yield from (_head(run, color, is_alone=len(runs) == 1) for color, run in enumerate(runs))
    yield from _charts(shown, entries)
    yield from chain.from_iterable(_tables(run, table, is_alone=len(runs) == 1) for run in runs)
    yield from _hyperparameters(entries)
    yield from chain.from_iterable(map(_checkpoints, entries))
    yield f"</main><footer>Made by offloop {version('offloop')}, {when(time.time())}.</footer>"
    yield f"<script>{script}</script></body></html>\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _text(value: Any, most: int = MAX_CELL) -> str:
    text = "" if value is None else number_text(value) if isinstance(value, float) else value_text(value)
    text = text if len(text) <= most else f"{text[:most]}…"
    return html.escape("\n".join(map(escape, text.split("\n"))))


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f'<th scope="col">{one}</th>' for one in heads)
    lines = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _texts(values: Iterable[Any]) -> Iterator[str]:
    return map(_text, values)


def _section(title: str, *parts: str) -> Iterator[str]:
    yield f"<section><h2>{title}</h2>"
    yield from parts
    yield "</section>"


def _dot(color: int) -> str:
    return f'<span class="dot c{color}"></span>'


def _head(run: ReportedRun, color: int, *, is_alone: bool) -> str:
    entry = run.entry
    facts = "".join(f"<span>{name} <b>{_text(value)}</b></span>" for name, value in facts_of(entry) if value)
    failed = run.traceback or entry.error or entry.reason
    return (
        f'<article><p class="facts">{"" if is_alone else f"<strong>{_dot(color)}{_text(entry.run)}</strong>"}'
        f'<span class="status {_text(entry.status)}">{_text(entry.status)}</span>{facts}</p>'
        + (f"<pre>{_text(failed, MAX_ERROR)}</pre>" if failed else "")
        + (f'<p class="note">{_text(entry.note)}</p>' if entry.note else "")
        + "</article>"
    )


def _charts(metrics: _Metrics, entries: Sequence[RunEntry]) -> Iterator[str]:
    figures = []
    for name in metrics.shown:
        caption = f'<b title="{_text(name)}">{_text(metrics.names.short(name))}</b>'
        mode, scale = direction_of(name, metrics.goals), metrics.scale(name)
        for color, one in ((color, entry.metrics.get(name)) for color, entry in enumerate(entries)):
            if one is not None:
                best = (
                    ""
                    if mode is None or one.low_step < 0
                    else f"<small>best {number_text(one.best(mode), scale)}</small>"
                )
                dot = _dot(color) if len(entries) > 1 else ""
                caption += f"<span>{dot}{number_text(one.last, scale)} {best}</span>"
        figures.append(f"<figure><figcaption>{caption}</figcaption>{metrics.chart(name)}</figure>")
    more = f" <small>of {len(metrics.shown):,} metrics; {metrics.left_out:,} are left out</small>"
    if figures:
        yield from _section(f"Charts{more if metrics.left_out else ''}", '<div class="grid">', *figures, "</div>")


def _tables(run: ReportedRun, only: str | None, *, is_alone: bool) -> Iterator[str]:
    kept: dict[str, deque[dict[str, Any]]] = {}
    for part in run.rows(only):
        if part.table in kept or len(kept) < MAX_TABLES:
            kept.setdefault(part.table, deque(maxlen=MAX_ROWS)).extend(part.records())
    for name, found in kept.items():
        columns = dict.fromkeys(chain(("step",), (one for row in found for one in row if one not in FIXED)))
        rows = [[_text(row.get(column)) for column in columns] for row in found]
        sizes = list(accumulate(sum(map(len, row)) for row in reversed(rows)))
        rows = rows[len(rows) - bisect_right(sizes, MAX_TABLE) :]
        total = max(run.entry.tables.get(name, 0), len(rows))
        more = f"the last {len(rows):,} of {total:,} rows" if len(rows) < total else f"rows: {total:,}"
        title = f"{_text(name)} <small>{'' if is_alone else f'{_text(run.entry.run)}, '}{more}</small>"
        yield from _section(title, _table(map(_text, columns), rows))


def _hyperparameters(entries: Sequence[RunEntry]) -> Iterator[str]:
    names = chosen_first({name for entry in entries for name in entry.hyperparameters})
    for title, is_of_training in (("Hyperparameters", True), ("How it was started", False)):
        rows = []
        for name in (name for name in names if is_of_the_training(name) == is_of_training):
            cells = [_text(entry.hyperparameters.get(name)) for entry in entries]
            mark = "<b>{}</b>" if len(set(cells)) > 1 else "{}"
            rows.append([mark.format(_text(name)), *cells])
        if rows:
            heads = ["value"] if len(entries) == 1 else [_text(entry.run) for entry in entries]
            yield from _section(title, _table(["name", *heads], rows))


def _checkpoints(entry: RunEntry) -> Iterator[str]:
    if rows := list(checkpoint_rows(entry.checkpoints[-MAX_CHECKPOINTS:], entry.metrics)):
        title = f"Checkpoints <small>{_text(entry.run)}</small>"
        yield from _section(title, _table(["file", "batch", "size", "metric", "value", ""], map(_texts, rows)))
