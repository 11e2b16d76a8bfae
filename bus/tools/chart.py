"""A chart of lines over the steps, as SVG without styles, scripts or links."""

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

from offloop.bus.printing import one_line
from offloop.bus.recording.summary import Point
from offloop.bus.strict_json import json_text
from offloop.bus.types.units import Scale, number_text

COLORS = ("#1f6feb", "#d1480b", "#0b7a4b", "#8b3fd1", "#a87900", "#0a7590", "#c2255c", "#57606a")
"""Of each line; as those of the dashboard on light ground."""

_INK, _SOFT, _GRID = "#1c2128", "#57606a", "#d8dee4"
_FONT = "system-ui, 'Segoe UI', Roboto, sans-serif"
_LETTER = 6.4  # pixels of a letter
_PIXELS_TOGETHER = 2
_FEW, _MANY = 40, 200  # a line with fewer points has a dot at each; one with more is thinner
_FEWEST = 10  # of fewer values none is an outlier
_CUT_SHARE = 50  # one part in this number at either end may be outliers
_TOP, _RIGHT, _BOTTOM, _LINE = 10, 14, 24, 20
_DOT = 3  # pixels beside the axis, for dots at its ends
_DIGITS = 10  # ticks are round numbers
_LARGEST = 1e300  # larger values are as infinite


class Line(NamedTuple):
    label: str
    points: Sequence[Point]
    """By step. Values that are not finite leave a hole."""
    color: int


def draw(lines: Sequence[Line], scale: Scale = (), title: str | None = None) -> str:
    """Return the SVG of a chart. With a title it is a whole file, 1920 pixels wide, with a legend.

    For scripts, the inner plot has its units in an attribute, and each line the steps and values of its points."""
    zoom, wide, high = (1, 480, 220) if title is None else (2, 960, 540)
    found = [point for line in lines for point in line.points]
    known = [value for _, value in found if abs(value) < _LARGEST]
    low, top_value = _ends(known)
    first, last = min((step for step, _ in found), default=0), max((step for step, _ in found), default=0)
    unit = next((factor for factor, _ in reversed(scale) if factor <= max(abs(low), abs(top_value))), 1.0)
    ticks = [unit * tick for tick in _ticks(low / unit, top_value / unit, high // 45)]
    names = [number_text(value, scale, _DIGITS) for value in ticks]
    left, top, bottom = 14 + _LETTER * max(map(len, names), default=0), _TOP, high - _BOTTOM
    parts = [
        f'<svg viewBox="0 0 {wide} {high}" width="{zoom * wide}" height="{zoom * high}" role="img" font-size="11" '
        f'font-family="{_FONT}" fill="{_SOFT}" aria-label="{_text("; ".join(_title(line, scale) for line in lines))}"'
    ]
    if title is not None:
        parts.append(f' xmlns="http://www.w3.org/2000/svg"><rect width="{wide}" height="{high}" fill="#ffffff"/')
        parts.append(f'><text x="{_LINE}" y="30" font-size="16" font-weight="600" fill="{_INK}">{_text(title)}</text')
        x, y = float(_LINE), 52
        for line in lines:
            width = 30 + _LETTER * len(line.label)
            x, y = (_LINE, y + _LINE) if x + width > wide else (x, y)
            parts.append(f'><circle cx="{x + 5:.0f}" cy="{y - 4}" r="5" fill="{COLORS[line.color]}"/')
            parts.append(f'><text x="{x + 16:.0f}" y="{y}" fill="{_INK}">{_text(line.label)}</text')
            x += width
        top, bottom = y + _LINE, bottom - _LINE
        parts.append(f'><text x="{wide / 2:.0f}" y="{high - 8}" text-anchor="middle">step</text')
    width, height = wide - left - _RIGHT, bottom - top

    def x_of(step: float) -> float:
        return (step - first) / max(last - first, 1) * width

    def y_of(value: float) -> float:
        return (1 - min(max((value - low) / (top_value - low), -1), 2)) * height

    parts.append(">")
    for value, name in zip(ticks, names, strict=True):
        y_text = top + y_of(value)
        parts.append(f'<path d="M{left:.1f},{y_text:.1f}h{width:.1f}" class="rule" stroke="{_GRID}"/>')
        parts.append(f'<text x="{left - 6:.1f}" y="{y_text + 4:.1f}" text-anchor="end">{_text(name)}</text>')
    for step in _ticks(first, last, int(width // 80), whole=True):
        anchor = "end" if x_of(step) > width - _RIGHT else "middle"
        parts.append(f'<text x="{left + x_of(step):.1f}" y="{bottom + 16}" text-anchor="{anchor}">{step:,.0f}</text>')
    parts.append(
        f'<svg class="plot" x="{left - _DOT:.1f}" y="{top}" width="{width + 2 * _DOT:.1f}" height="{height}" '
        f'viewBox="{-_DOT} 0 {width + 2 * _DOT:.1f} {height}" data-scale="{escape(json_text(scale))}">'
        '<rect width="100%" height="100%" fill="none" pointer-events="all"/>'
    )
    parts += [_path(line, x_of, y_of, _title(line, scale)) for line in lines]
    if cut := [value for value in (min(known), max(known)) if not low <= value <= top_value] if known else []:
        texts = (f"{'up' if value > top_value else 'down'} to {number_text(value, scale)}" for value in cut)
        parts.append(f'<text x="{width:.0f}" y="10" text-anchor="end">cut off: {", ".join(texts)}</text>')
    return "".join((*parts, "</svg></svg>"))


def _title(line: Line, scale: Scale) -> str:
    values = [value for _, value in line.points]
    last, least, most = (number_text(value, scale) for value in (values[-1], min(values), max(values)))
    return f"{line.label}: last {last}, from {least} to {most}"


def _path(line: Line, x_of: Callable[[float], float], y_of: Callable[[float], float], title: str) -> str:
    drawn, dots, known, begun = [], [], [], 0
    points = [*_thinned(line.points, x_of), (0, math.nan)]
    for (step, value), (_, after) in pairwise(points):
        begun = begun + 1 if abs(value) < _LARGEST else 0
        if begun:
            at = f"{x_of(step):.1f},{y_of(value):.1f}"
            drawn.append(f"{'L' if begun > 1 else 'M'}{at}")
            known.append(f"{step:.0f} {value:.6g}")
            if len(points) < _FEW or (begun == 1 and not abs(after) < _LARGEST):
                dots.append(f"M{at}h0")
    return (
        f'<g class="line c{line.color}" data-name="{_text(line.label)}" data-points="{",".join(known)}" fill="none" '
        f'stroke="{COLORS[line.color]}" stroke-linecap="round" stroke-linejoin="round"><title>{_text(title)}</title>'
        f'<path d="{"".join(drawn)}" stroke-width="{1.6 if len(points) < _MANY else 1.1}"/>'
        f'<path d="{"".join(dots)}" stroke-width="4.5"/></g>'
    )


def _thinned(points: Sequence[Point], x_of: Callable[[float], float]) -> Iterator[Point]:
    """Keep the least, greatest and last point of every two pixels; a hole only where there is no number."""
    together: dict[int, list[Point]] = {}
    for point in points:
        together.setdefault(int(x_of(point[0]) // _PIXELS_TOGETHER), []).append(point)
    for part in together.values():
        known = [point for point in part if abs(point[1]) < _LARGEST]
        ends = {one(known, key=lambda point: point[1]) for one in (min, max)} if known else set()
        yield from sorted(ends | {(known or part)[-1]})


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the axis of values, with margins, and without a few outliers far beyond the others."""
    if not values:
        return 0.0, 1.0
    ordered = sorted(values)
    cut = len(ordered) // _CUT_SHARE if len(ordered) >= _FEWEST else 0
    far = 2 * (ordered[-1 - cut] - ordered[cut]) or math.inf
    low = min(value for value in ordered if value >= ordered[cut] - far)
    high = max(value for value in ordered if value <= ordered[-1 - cut] + far)
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    step = max((high - low) / most, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(step))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * 0.999)
    step = math.ceil(step) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [place * step for place in range(first, first + most + 2) if place * step <= high + step * 1e-9]


def _text(text: str) -> str:
    return escape(one_line(text))
