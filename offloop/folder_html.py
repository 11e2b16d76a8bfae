"""Runs as HTML for notebooks, in their colours, with all texts of a run escaped."""

import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from offloop.bus.index.entry import RunEntry
from offloop.bus.index.table import RunTable
from offloop.bus.printing import escape
from offloop.bus.recording.summary import Point
from offloop.bus.types.hyperparameters import chosen_first, value_text
from offloop.bus.types.metrics import LOSS, MetricNames, is_of_evaluation
from offloop.bus.types.units import duration, number_text, when

_ROWS = 50
_LETTERS = 120
_WIDTH, _HEIGHT, _MARGIN = 480, 90, 4


def show_runs(table: RunTable, entries: Sequence[RunEntry], folder: str) -> str:
    shown = entries[:_ROWS]
    columns = table.columns(["run", *table.usual_among(shown)])
    cells = {column.head: [column.text(entry) for entry in shown] for column in columns}
    filled = {head: texts for head, texts in cells.items() if any(texts)}
    more = f"; the first {_ROWS} are shown" if len(entries) > _ROWS else ""
    title = f"{counted(len(entries), 'run')} of {_text(folder)}{more}"
    return f"<div><div>{title}</div>{_table([*filled], zip(*filled.values(), strict=True)) if shown else ''}</div>"


def show_run(entry: RunEntry, series: Mapping[str, Sequence[Point]]) -> str:
    facts = [
        entry.status,
        *filter(None, (entry.error, entry.reason, entry.problem)),
        *([f"started {when(entry.started)}"] if entry.started is not None else []),
        *([f"took {duration(entry.duration)}"] if entry.duration is not None else []),
        *([f"{entry.attempts} attempts"] if entry.attempts > 1 else []),
        *(f"#{tag}" for tag in entry.tags),
    ]
    names = MetricNames(entry.metrics)
    metrics = [
        [names.short(name), *map(number_text, (values.last, values.low, values.high))]
        for name, values in entry.metrics.items()
    ]
    hyperparameters = [[name, value_text(entry.hyperparameters[name])] for name in chosen_first(entry.hyperparameters)]
    parts = [
        f"<div><b>{_text(entry.run)}</b> {' &middot; '.join(map(_text, facts))}</div>",
        *([f"<div>{_text(entry.note)}</div>"] if entry.note else []),
        *(
            f"<div><small>{_text(names.short(name))}</small><br>{_curve(names.short(name), points)}</div>"
            for name, points in series.items()
        ),
        *_folded(counted(len(metrics), "metric"), ["metric", "last", "min", "max"], metrics, is_open=True),
        *_folded(counted(len(hyperparameters), "hyperparameter"), ["hyperparameter", "value"], hyperparameters),
    ]
    return f"<div>{''.join(parts)}</div>"


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def main_metric(entry: RunEntry) -> str | None:

    def order(name: str) -> tuple[bool, ...]:
        return name != LOSS, not is_of_evaluation(name), "loss" not in name, name.startswith("lr-")

    return min(entry.metrics, key=order, default=None)


def _folded(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], is_open: bool = False) -> Iterator[str]:
    if rows:
        yield f"<details{' open' if is_open else ''}><summary>{_text(title)}</summary>{_table(header, rows)}</details>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th style="text-align:left">{_text(name)}</th>' for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        '<div style="overflow-x:auto"><table style="white-space:nowrap">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _curve(name: str, points: Sequence[Point]) -> str:
    """Return a line through points, interrupted at non-finite values."""
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    if not finite:
        return ""
    first, last = points[0][0], points[-1][0]
    low, high = (chosen(value for _, value in finite) for chosen in (min, max))

    def place(step: float, value: float) -> str:
        x = _share(step, first, last) * (_WIDTH - 2 * _MARGIN) + _MARGIN
        y = (1 - _share(value, low, high)) * (_HEIGHT - 2 * _MARGIN) + _MARGIN
        return f"{x:.1f},{y:.1f}"

    lines = []
    for is_finite, group in groupby(points, lambda point: math.isfinite(point[1])):
        if is_finite:
            places = [place(*point) for point in group]
            # A line of one point is visible only by its round ends.
            lines.append(f'<polyline points="{" ".join(places * 2 if len(places) == 1 else places)}"/>')
    label = _text(f"{name}: {number_text(finite[0][1])} to {number_text(finite[-1][1])}")
    return (
        f'<svg role="img" aria-label="{label}" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'style="max-width:100%" fill="none" stroke="#3b82f6" stroke-width="1.5" stroke-linecap="round" '
        f'stroke-linejoin="round"><title>{label}</title>{"".join(lines)}</svg>'
    )


def _share(value: float, low: float, high: float) -> float:
    # Halves, because the distance of two floats may exceed the largest float.
    return (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5


def _text(text: str) -> str:
    """Escape any text for any place in HTML, without characters that turn or hide the text around it."""
    shown = escape(text if len(text) <= _LETTERS else f"{text[: _LETTERS - 3]}...")
    return html.escape(shown)
