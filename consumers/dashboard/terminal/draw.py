"""Curves and bars made of characters."""

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

    from offloop.consumers.dashboard.view.series import Points


_LEVELS = "▁▂▃▄▅▆▇█"
_ODD = "!"
# The dots of a Braille character, from the top, in its left and its right half.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE = 0x2800
_WIDEST_SMOOTHING = 0.25
_FEWEST_SMOOTHED = 10
_RATE = re.compile(r"(^|/)(lr|learning_rate)(?![a-zA-Z])")


def number(value: float | None) -> str:
    """A value in at most nine characters."""
    if value is None:
        return "-"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e7 else f"{value:.4g}"


def sparkline(points: "Points", width: int) -> "Text":
    """A curve in one line. Each character shows, of the points in its part of the axis, the one that is the farthest
    from the mean of all; where one of them is NaN or infinite it is a red ``!``."""
    from rich.text import Text

    line = Text()
    if not len(points.xs) or width < 1:
        return line
    ys = points.ys.tolist()
    finite = [value for value in ys if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    middle = sum(value / len(finite) for value in finite)
    columns = _columns(points.xs.tolist(), ys, width)
    for values in columns:
        if not values:
            line.append(" ")
        elif not all(map(math.isfinite, values)):
            line.append(_ODD, "bold red")
        else:
            shown = max(values, key=lambda value: abs(value - middle))
            line.append(_LEVELS[_level(shown, low, high, len(_LEVELS))])
    return line


def smoothed(points: "Points", amount: float) -> "Points":
    """The exponential moving average of a curve by distance on the axis, as on the web page: the distance after which a
    value weighs 1/e is up to a quarter of the axis. What is NaN or infinite stays, and has no part in it."""
    import numpy as np

    xs, ys = points.xs.tolist(), points.ys.tolist()
    if not xs or not amount:
        return points
    reach = ((xs[-1] - xs[0]) or 1.0) * max(_WIDEST_SMOOTHING * amount * amount, 2 * amount / max(len(xs) - 1, 1))
    mean = weights = 0.0
    before = xs[0]
    averages = []
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(y):
            weights = weights * math.exp((before - x) / reach) + 1
            before = x
            # By the difference: the average of what is constant is the very same number.
            mean += (y - mean) / weights
            averages.append(mean)
        else:
            averages.append(y)
    return points._replace(ys=np.array(averages))


def is_smoothed(name: str, points: "Points", amount: float) -> bool:
    """Whether a curve is drawn smoothed, as on the web page: not one of few points, nor a learning rate."""
    return amount > 0 and len(points.xs) >= _FEWEST_SMOOTHED and _RATE.search(name) is None


def has_logarithm(points: "Points") -> bool:
    """Whether a logarithmic scale can show all of the values."""
    return all(value > 0 for value in points.ys.tolist() if math.isfinite(value))


def chart(points: "Points", width: int, height: int, logarithmic: bool = False) -> "list[Text]":
    """A curve in several lines, drawn in dots, with what is at the top and at the bottom written at the left. A column
    in which a value is NaN or infinite has a red ``!`` at its bottom."""
    from rich.text import Text

    finite = [value for value in points.ys.tolist() if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    labels = [""] * height
    if finite and low < high:
        labels[-1], labels[0] = number(low), number(high)
    elif finite:
        labels[height // 2] = number(low)
    margin = max(map(len, labels)) + 1
    columns = max(width - margin - 1, 1)
    dots = [[0] * columns for _ in range(height)]
    if logarithmic and finite:
        ys = [math.log10(value) if math.isfinite(value) else value for value in points.ys.tolist()]
        odd = _plot(points.xs.tolist(), ys, dots, math.log10(low), math.log10(high))
    else:
        odd = _plot(points.xs.tolist(), points.ys.tolist(), dots, low, high)
    lines = []
    for row, label in enumerate(labels):
        line = Text()
        line.append(f"{label:>{margin - 1}} {'┤' if label else '│'}", "dim")
        line.append("".join(chr(_BRAILLE + one) if one else " " for one in dots[row]), "cyan")
        lines.append(line)
    for column in odd:
        lines[-1].plain = _with_odd(lines[-1].plain, margin + 1 + column)
        lines[-1].stylize("bold red", margin + 1 + column, margin + 2 + column)
    return lines


def stacked_bar(shares: Sequence[tuple[str, float, str]], width: int) -> "Text":
    """Parts of a whole side by side: for each its letter, its share and its style."""
    from rich.text import Text

    line = Text()
    done, drawn = 0.0, 0
    for letter, share, style in shares:
        done += share
        end = min(round(done * width), width)
        line.append(letter * (end - drawn), style)
        drawn = max(end, drawn)
    return line


def _with_odd(text: str, place: int) -> str:
    return text[:place] + _ODD + text[place + 1 :]


def _columns(xs: list[float], ys: list[float], width: int) -> list[list[float]]:
    """The values in each of the columns of a line; where there are fewer points than columns, one in each."""
    if len(xs) <= width:
        return [[value] for value in ys]
    columns: list[list[float]] = [[] for _ in range(width)]
    span = xs[-1] - xs[0]
    for x, y in zip(xs, ys, strict=True):
        columns[min(int((x - xs[0]) / span * width), width - 1) if span > 0 else 0].append(y)
    return columns


def _level(value: float, low: float, high: float, levels: int) -> int:
    # Divided first: the difference of two large numbers may be infinite. That of the smallest ones is 0 then.
    span = high / 2 - low / 2
    if span <= 0:
        return levels // 2
    return min(int((value / 2 - low / 2) / span * levels), levels - 1)


def _plot(xs: list[float], ys: list[float], dots: list[list[int]], low: float, high: float) -> set[int]:
    """Draws lines between the points that are finite; returns the columns of those that are not."""
    width, height = 2 * len(dots[0]), 4 * len(dots)
    span = xs[-1] - xs[0] if xs else 0.0
    odd: set[int] = set()
    before: tuple[int, int] | None = None
    for x, y in zip(xs, ys, strict=True):
        column = min(int((x - xs[0]) / span * width), width - 1) if span > 0 else 0
        if not math.isfinite(y):
            odd.add(column // 2)
            before = None
            continue
        here = column, height - 1 - _level(y, low, high, height)
        for left, top in _line(before or here, here):
            dots[top // 4][left // 2] |= _DOTS[left % 2][top % 4]
        before = here
    return odd


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (
            start[0] + round((end[0] - start[0]) * step / steps),
            start[1] + round((end[1] - start[1]) * step / steps),
        )
        for step in range(steps + 1)
    ]
