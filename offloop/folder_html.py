"""Runs as HTML for notebooks: in their colours, and with everything escaped that comes from a run."""

import html
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from offloop.bus.cli.describe import duration, when
from offloop.bus.index.entry import RunEntry
from offloop.bus.index.query import differences
from offloop.bus.printing import escape
from offloop.bus.recording.summary import Point
from offloop.bus.types.hyperparameters import chosen_first, is_of_the_training, value_text
from offloop.bus.types.metric_names import MetricNames
from offloop.bus.types.metrics import LOSS
from offloop.consumers.loggers.console import format_value

_ROWS = 50
_HYPERPARAMETERS = 6
_METRICS = 4
_LETTERS = 120
_WIDTH, _HEIGHT, _MARGIN = 480, 90, 4


def show_runs(entries: Sequence[RunEntry], folder: str) -> str:
    """A table of runs: the hyperparameters of the training in which they differ, and their main metrics."""
    shown = entries[:_ROWS]
    differing = [one.name for one in differences(shown) if is_of_the_training(one.name)][:_HYPERPARAMETERS]
    known = main_metrics(shown)
    metrics = [name for name in known if not name.startswith("lr-")][:_METRICS]
    has_tags = any(entry.tags for entry in shown)
    rows = [
        [
            *(entry.run, entry.status, when(entry.started), _lasted(entry)),
            *([", ".join(entry.tags)] if has_tags else []),
            *(_hyperparameter(entry.hyperparameters.get(name)) for name in differing),
            *(format_value(entry.metrics[name].last) if name in entry.metrics else "" for name in metrics),
        ]
        for entry in shown
    ]
    header = ["run", "status", "started", "duration", *(["tags"] if has_tags else []), *differing]
    header += map(MetricNames(known).short, metrics)
    more = f"; the first {_ROWS} are shown" if len(entries) > _ROWS else ""
    title = f"{counted(len(entries), 'run')} of {_text(folder)}{more}"
    return f"<div><div>{title}</div>{_table(header, rows) if rows else ''}</div>"


def show_run(entry: RunEntry, series: Mapping[str, Sequence[Point]]) -> str:
    """One run: its state, a curve of each series, its metrics and hyperparameters."""
    facts = [
        entry.status,
        *filter(None, (entry.error, entry.reason, entry.problem)),
        *([f"started {when(entry.started)}"] if entry.started is not None else []),
        *([f"took {_lasted(entry)}"] if entry.duration is not None else []),
        *([f"{entry.attempts} attempts"] if entry.attempts > 1 else []),
        *(f"#{tag}" for tag in entry.tags),
    ]
    names = MetricNames(entry.metrics)
    metrics = [
        [names.short(name), *map(format_value, (values.last, values.low, values.high))]
        for name, values in entry.metrics.items()
    ]
    hyperparameters = [
        [name, _hyperparameter(entry.hyperparameters[name])] for name in chosen_first(entry.hyperparameters)
    ]
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
    """How many there are."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def main_metrics(entries: Iterable[RunEntry]) -> list[str]:
    """The metrics of runs, what people look at first before the rest: the loss, evaluations, other losses."""
    names = dict.fromkeys(name for entry in entries for name in entry.metrics)
    order: tuple[Callable[[str], bool], ...] = (
        lambda name: name == LOSS,
        lambda name: name.startswith("metrics/") and not name.startswith("metrics/train/"),
        lambda name: "loss" in name,
        lambda name: not name.startswith("lr-"),
    )
    return sorted(names, key=lambda name: [not is_such(name) for is_such in order])


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
    """A line through points, interrupted where a value is not finite."""
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
            # A line of one point would not be seen without its round ends.
            lines.append(f'<polyline points="{" ".join(places * 2 if len(places) == 1 else places)}"/>')
    label = _text(f"{name}: {format_value(finite[0][1])} to {format_value(finite[-1][1])}")
    return (
        f'<svg role="img" aria-label="{label}" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'style="max-width:100%" fill="none" stroke="#3b82f6" stroke-width="1.5" stroke-linecap="round" '
        f'stroke-linejoin="round"><title>{label}</title>{"".join(lines)}</svg>'
    )


def _share(value: float, low: float, high: float) -> float:
    # Halves, because the distance of two floats may be too large for one.
    return (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5


def _lasted(entry: RunEntry) -> str:
    return "" if entry.duration is None else duration(entry.duration)


def _hyperparameter(value: Any) -> str:
    return "" if value is None else value_text(value)


def _text(text: str) -> str:
    """What may come from a run, for any place in HTML, without what would turn or hide the text around it."""
    shown = escape(text if len(text) <= _LETTERS else f"{text[: _LETTERS - 3]}...")
    return html.escape(shown)
