"""A chart of lines over the steps, as SVG without styles, scripts or links."""

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
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
_FEW = 40  # a shorter line has a dot at each point
_MANY = 200  # longer ones are thinner
_FEWEST = 10  # of fewer values none is an outlier
_CUT_SHARE = 50  # one part in this number at either end may be outliers
_TOP, _RIGHT, _BOTTOM, _LINE = 10, 14, 24, 20
_DOT = 3
_DIGITS = 4


class Line(NamedTuple):
    label: str
    points: Sequence[Point]
    """By step. Values that are not finite leave a hole."""
    color: int


def draw(lines: Sequence[Line], scale: Scale = (), size: tuple[int, int] = (480, 220), title: str | None = None) -> str:
    """Return the SVG of a chart. With a title it is a file of its own, with a legend and an axis label.

    For scripts, the inner plot has its units in an attribute, and each line the steps and values of its points."""
    width, height = size
    found = [point for line in lines for point in line.points]
    finite = [value for _, value in found if math.isfinite(value)]
    low, high = _ends(finite)
    first, last = min((step for step, _ in found), default=0), max((step for step, _ in found), default=0)
    last = last if last > first else first + 1
    names = [(number_text(value, scale, _digits(low, high)), value) for value in _ticks(low, high, height // 45)]
    left = 14 + _LETTER * max((len(text) for text, _ in names), default=0)
    rows = [] if title is None else list(_legend(lines, width - 2 * _LINE))
    top = _TOP + (0 if title is None else 2 * _LINE + _LINE * len(rows))
    bottom = _BOTTOM + (0 if title is None else _LINE)
    plot = Plot(width - left - _RIGHT, height - top - bottom, (first, last), (low, high))
    label = "; ".join(f"{line.label}: {number_text(line.points[-1][1], scale)}" for line in lines if line.points)
    parts = [
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{_text(f"{title}: {label}" if title else label)}" font-family="{_FONT}" font-size="11" '
        f'fill="{_SOFT}">'
    ]
    if title is not None:
        parts[0] = parts[0].replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
        parts.append(f'<rect width="{width}" height="{height}" fill="#ffffff"/>')
        parts.append(f'<text x="{_LINE}" y="{1.5 * _LINE}" font-size="16" font-weight="600" fill="{_INK}">')
        parts.append(f"{_text(title)}</text>")
        for number, row in enumerate(rows):
            y = (2.6 + number) * _LINE
            for x, line in row:
                parts.append(f'<circle cx="{x + 5:.0f}" cy="{y - 4:.0f}" r="5" fill="{COLORS[line.color]}"/>')
                parts.append(f'<text x="{x + 16:.0f}" y="{y:.0f}" fill="{_INK}">{_text(line.label)}</text>')
        parts.append(f'<text x="{left + plot.width / 2:.0f}" y="{height - 8}" text-anchor="middle">step</text>')
    for text, value in names:
        y = top + plot.y(value)
        parts.append(f'<path d="M{left:.1f},{y:.1f}h{plot.width:.1f}" class="rule" stroke="{_GRID}"/>')
        parts.append(f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{_text(text)}</text>')
    for step in _ticks(first, last, int(plot.width // 80), whole=True):
        x = left + plot.x(step)
        anchor = "end" if plot.x(step) > plot.width - _RIGHT else "middle"
        parts.append(f'<text x="{x:.1f}" y="{top + plot.height + 16:.1f}" text-anchor="{anchor}">{step:,.0f}</text>')
    parts.append(
        # A little wider than the axis, for dots at its ends.
        f'<svg class="plot" x="{left - _DOT:.1f}" y="{top:.1f}" width="{plot.width + 2 * _DOT:.1f}" '
        f'height="{plot.height:.1f}" viewBox="{-_DOT} 0 {plot.width + 2 * _DOT:.1f} {plot.height:.1f}" '
        f'data-scale="{escape(json_text(scale))}"><rect width="100%" height="100%" fill="none" pointer-events="all"/>'
    )
    parts += [_path(line, plot, scale) for line in lines if line.points]
    if not finite:
        parts.append(f'<text x="{plot.width / 2:.0f}" y="{plot.height / 2:.0f}" text-anchor="middle">no number</text>')
    elif cut := [value for value in (min(finite), max(finite)) if not low <= value <= high]:
        texts = ", ".join(f"{'up' if value > high else 'down'} to {number_text(value, scale)}" for value in cut)
        parts.append(f'<text x="{plot.width:.0f}" y="10" text-anchor="end">cut off: {_text(texts)}</text>')
    return "".join((*parts, "</svg></svg>"))


class Plot(NamedTuple):
    width: float
    height: float
    steps: tuple[float, float]
    values: tuple[float, float]

    def x(self, step: float) -> float:
        return (step - self.steps[0]) / (self.steps[1] - self.steps[0]) * self.width

    def y(self, value: float) -> float:
        low, high = self.values
        # Divided first: the difference of very large values would be infinite.
        share = (value / 2 - low / 2) / (high / 2 - low / 2)
        return (1 - min(max(share, -1), 2)) * self.height


def _path(line: Line, plot: Plot, scale: Scale) -> str:
    drawn, dots, known, is_begun = [], [], [], False
    points = _thinned(line.points, plot)
    for place, (step, value) in enumerate(points):
        if not math.isfinite(value):
            is_begun = False
            continue
        at = f"{plot.x(step):.1f},{plot.y(value):.1f}"
        drawn.append(f"{'L' if is_begun else 'M'}{at}")
        known.append(f"{step:.0f} {value:.6g}")
        is_alone = not is_begun and not (place + 1 < len(points) and math.isfinite(points[place + 1][1]))
        if len(points) < _FEW or is_alone:
            dots.append(f"M{at}h0")
        is_begun = True
    values = [value for _, value in line.points]
    last, least, most = (number_text(value, scale) for value in (values[-1], min(values), max(values)))
    title = f"{line.label}: last {last}, from {least} to {most}"
    look = f'fill="none" stroke="{COLORS[line.color]}" stroke-linecap="round" stroke-linejoin="round"'
    return (
        f'<g class="line c{line.color}" data-name="{_text(line.label)}" data-points="{",".join(known)}" {look}>'
        f"<title>{_text(title)}</title>"
        f'<path d="{"".join(drawn)}" stroke-width="{1.6 if len(points) < _MANY else 1.1}"/>'
        + (f'<path d="{"".join(dots)}" stroke-width="4.5"/>' if dots else "")
        + "</g>"
    )


def _thinned(points: Sequence[Point], plot: Plot) -> list[Point]:
    """Keep the first, last, least and greatest point, and one that is not finite, of every two pixels."""
    together: dict[int, list[Point]] = {}
    for point in points:
        together.setdefault(int(plot.x(point[0]) // _PIXELS_TOGETHER), []).append(point)
    kept: list[Point] = []
    for part in together.values():
        finite = [point for point in part if math.isfinite(point[1])]
        chosen = {part[0], part[-1], *(point for point in part if point not in finite[:1] and point[1] != point[1])}
        if finite:
            chosen |= {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])}
        kept += sorted(chosen, key=lambda point: point[0])
    return kept


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the axis of values, with margins, and without a few outliers far beyond the others."""
    if not values:
        return 0.0, 1.0
    ordered = sorted(values)
    cut = len(ordered) // _CUT_SHARE if len(ordered) >= _FEWEST else 0
    usual_low, usual_high = ordered[cut], ordered[-1 - cut]
    far = 2 * (usual_high - usual_low) or math.inf
    low = min(value for value in ordered[: cut + 1] if value >= usual_low - far)
    high = max(value for value in ordered[len(ordered) - 1 - cut :] if value <= usual_high + far)
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return (low - margin, high + margin) if math.isfinite(margin) else (low, high)


def _ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    step = (high / 2 - low / 2) / max(most, 1) * 2
    if not 0 < step < math.inf:
        return []
    power = 10.0 ** math.floor(math.log10(step))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    first = math.ceil(low / step - 1e-9)
    return [(first + place) * step for place in range(most + 2) if (first + place) * step <= high + step * 1e-9]


def _digits(low: float, high: float) -> int:
    """Return the digits that tell ticks between two values apart."""
    apart = high / 2 - low / 2
    size = max(abs(low), abs(high))
    return max(_DIGITS, math.ceil(math.log10(size / apart)) + 2) if apart > 0 and size else _DIGITS


def _legend(lines: Iterable[Line], width: float) -> Iterator[list[tuple[float, Line]]]:
    row: list[tuple[float, Line]] = []
    x = float(_LINE)
    for line in lines:
        wide = 30 + _LETTER * len(line.label)
        if row and x + wide > width:
            yield row
            row, x = [], float(_LINE)
        row.append((x, line))
        x += wide
    yield row


def _text(text: str) -> str:
    return escape(one_line(text))
