"""Runs as one HTML file to share, and charts as pictures."""

import base64
import hashlib
import html
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from offloop.bus.errors import ConfigurationError
from offloop.bus.files import atomic_output
from offloop.bus.index.checkpoints import compared_by
from offloop.bus.index.columns import reached_text
from offloop.bus.index.entry import RunEntry
from offloop.bus.printing import escape
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.summary import Point, Summary
from offloop.bus.recording.tables import read_rows, require_table
from offloop.bus.tools.chart import COLORS, Line, draw
from offloop.bus.types.hyperparameters import chosen_first, is_of_the_training, value_text
from offloop.bus.types.metrics import MetricNames, direction_of, goals_in, groups_of, shown_step
from offloop.bus.types.table import FIXED
from offloop.bus.types.units import BYTES, Scale, lasted, number_text, scale_of, when

MAX_CHARTS = 100
MAX_LINES = 300  # of all charts together
MAX_ROWS = 100  # of a table
MAX_TABLES = 10
MAX_CHECKPOINTS = 100
MAX_CELL = 1000  # characters
MAX_TABLE = 500_000  # characters
_SLIDE = 960, 540


class ReportedRun(NamedTuple):
    entry: RunEntry
    summaries: Sequence[Summary]
    """The newest attempt last."""
    recordings: Sequence[Recording]

    def points(self, metric: str) -> list[Point]:
        found: list[Point] = []
        for known in (summary.metrics.get(metric) for summary in self.summaries):
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

    def chart(self, metric: str, **look: Any) -> str:
        of_runs = ((run.entry.run, run.points(metric)) for run in self._runs)
        lines = [Line(name, points, color) for color, (name, points) in enumerate(of_runs)]
        return draw([line for line in lines if line.points], self.scale(metric), **look)


def write_chart(runs: Sequence[ReportedRun], output: Path, metric: str, *, force: bool = False) -> None:
    """Write the chart of a metric as SVG, 1920 pixels wide. Raises ConfigurationError for an unknown metric."""
    metrics = _Metrics(runs, [metric])
    drawn = metrics.chart(metrics.shown[0], size=_SLIDE, title=metrics.names.short(metrics.shown[0]))
    size = f'width="{2 * _SLIDE[0]}" height="{2 * _SLIDE[1]}"'
    with atomic_output(output, [one.path for run in runs for one in run.recordings], force) as draft:
        draft.write_text(drawn.replace(f'width="{_SLIDE[0]}" height="{_SLIDE[1]}"', size, 1), encoding="utf-8")


def write_report(
    runs: Sequence[ReportedRun],
    output: Path,
    *,
    metrics: Sequence[str] | None = None,
    table: str | None = None,
    force: bool = False,
) -> int:
    """Write runs as one HTML file, which needs no server, network or script; return the number of left out metrics.

    Its size is bounded: by the constants of this module, and a point for every two pixels.

    Args:
        runs: Up to eight.
        output: The file, replaced only with ``force``.
        metrics: Short or full names of the shown metrics; by default all, up to the limits.
        table: The only shown table; by default all.

    Raises ConfigurationError for an unknown metric or table, or too many runs."""
    shown = _Metrics(runs, metrics)
    entries = [run.entry for run in runs]
    title = entries[0].run if len(runs) == 1 else f"{len(runs)} runs"
    body = "".join(
        (
            f"<header><h1>{_text(title)}</h1></header><main>",
            *(_head(entry, color, is_alone=len(runs) == 1) for color, entry in enumerate(entries)),
            *_charts(shown, entries),
            *_results(shown, entries),
            *chain.from_iterable(_tables(run, table, is_alone=len(runs) == 1) for run in runs),
            *_hyperparameters(entries),
            *chain.from_iterable(map(_checkpoints, entries)),
            f"</main><footer>Made by offloop {version('offloop')}, {when(time.time())}.</footer>",
        )
    )
    style, script = (Path(__file__).with_name(f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
    with atomic_output(output, [one.path for run in runs for one in run.recordings], force) as draft:
        draft.write_text(
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark">'
            f"<title>{_text(title)} · offloop</title><style>{style}</style></head>"
            f"<body>{body}<script>{script}</script></body></html>\n",
            encoding="utf-8",
        )
    return shown.left_out if metrics is None else 0


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return number_text(value)
    text = "" if value is None else value_text(value)
    text = text if len(text) <= MAX_CELL else f"{text[:MAX_CELL]}…"
    return html.escape("\n".join(map(escape, text.split("\n"))))


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f'<th scope="col">{one}</th>' for one in heads)
    lines = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _section(title: str, *parts: str) -> Iterator[str]:
    yield f"<section><h2>{title}</h2>"
    yield from parts
    yield "</section>"


def _dot(color: int) -> str:
    return f'<span class="dot c{color}"></span>'


def _head(entry: RunEntry, color: int, *, is_alone: bool) -> str:
    facts = {
        "started": when(entry.started),
        "lasted": "" if entry.started is None else lasted(entry.started, entry.ended, live=entry.is_going_on),
        "reached": reached_text(entry),
        "attempts": str(entry.attempts) if entry.attempts > 1 else "",
        "tags": ", ".join(entry.tags),
        "trouble": entry.problem or "",
    }
    listed = "".join(f"<span>{name} <b>{_text(value)}</b></span>" for name, value in facts.items() if value)
    failed = entry.error or entry.reason
    return (
        f'<article><p class="facts">{"" if is_alone else f"<strong>{_dot(color)}{_text(entry.run)}</strong>"}'
        f'<span class="status {_text(entry.status)}">{_text(entry.status)}</span>{listed}</p>'
        + (f"<pre>{_text(failed)}</pre>" if failed else "")
        + (f'<p class="note">{_text(entry.note)}</p>' if entry.note else "")
        + "</article>"
    )


def _charts(metrics: _Metrics, entries: Sequence[RunEntry]) -> Iterator[str]:
    figures = []
    for name in metrics.shown:
        values = ((color, entry.metrics.get(name)) for color, entry in enumerate(entries))
        last = "".join(
            f"<span>{_dot(color) if len(entries) > 1 else ''}{number_text(one.last, metrics.scale(name))}</span>"
            for color, one in values
            if one is not None
        )
        caption = f'<b title="{_text(name)}">{_text(metrics.names.short(name))}</b>{last}'
        figures.append(f"<figure><figcaption>{caption}</figcaption>{metrics.chart(name)}</figure>")
    more = f" <small>of {len(metrics.shown):,} metrics; {metrics.left_out:,} are left out</small>"
    if figures:
        yield from _section(f"Charts{more if metrics.left_out else ''}", '<div class="grid">', *figures, "</div>")


def _results(metrics: _Metrics, entries: Sequence[RunEntry]) -> Iterator[str]:
    rows = []
    for name in metrics.shown:
        mode, scale = direction_of(name, metrics.goals), metrics.scale(name)
        of_runs = [entry.metrics.get(name) for entry in entries]
        best = [] if mode is None else [one.best(mode) for one in of_runs if one is not None and one.low_step >= 0]
        winner = (min if mode == "min" else max)(best) if len(set(best)) > 1 else None
        cells = [f'<span title="{_text(name)}">{_text(metrics.names.short(name))}</span>']
        for one in of_runs:
            cell = "" if one is None else number_text(one.last, scale)
            if one is not None and mode is not None and one.low_step >= 0:
                star = " ★" if one.best(mode) == winner else ""
                cell += f"<small>best {number_text(one.best(mode), scale)} at {one.best_step(mode):,}{star}</small>"
            cells.append(cell)
        rows.append(cells)
    if rows:
        heads = ["last"] if len(entries) == 1 else [_text(entry.run) for entry in entries]
        yield from _section("Results", _table(["metric", *heads], rows))


def _tables(run: ReportedRun, only: str | None, *, is_alone: bool) -> Iterator[str]:
    counts = run.entry.tables
    if only is not None:
        require_table(only, counts, run.entry.run)
    kept: dict[str, deque[dict[str, Any]]] = {}
    for part in read_rows(run.recordings, only) if counts else ():
        if part.table in kept or len(kept) < MAX_TABLES:
            kept.setdefault(part.table, deque(maxlen=MAX_ROWS)).extend(part.records())
    for name, found in kept.items():
        columns = dict.fromkeys(chain(("step",), (one for row in found for one in row if one not in FIXED)))
        rows: deque[list[str]] = deque()
        size = 0
        for row in reversed(found):
            cells = [_text(row.get(column)) for column in columns]
            size += sum(map(len, cells))
            if size > MAX_TABLE:
                break
            rows.appendleft(cells)
        total = max(counts.get(name, 0), len(rows))
        more = f"the last {len(rows):,} of {total:,} rows" if len(rows) < total else f"{total:,} rows"
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
    rows = []
    for one in entry.checkpoints[-MAX_CHECKPOINTS:]:
        metric, value = compared_by(one)
        marks = [word for word, holds in (("best", one.is_best), ("latest", one.is_latest)) if holds]
        size = number_text(one.size, BYTES) if one.exists else "deleted"
        compared = "" if value is None else f"{metric} {number_text(value)}"
        rows.append(map(_text, (one.path, str(one.batch), size, compared, ", ".join(marks))))
    if rows:
        yield from _section(
            f"Checkpoints <small>{_text(entry.run)}</small>",
            _table(["file", "batch", "size", "metric", ""], rows),
        )
