"""Curves and bars made of characters."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

    from offloop.consumers.dashboard.view.series import Points


LEVELS = "▁▂▃▄▅▆▇█"
_ODD = "!"
# The dots of a Braille character, from the top, in its left and its right half.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE = 0x2800


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
    """A curve in one line: each character shows the point of its part of the axis that is farthest from the mean of
    all; a red ``!`` where one is NaN or infinite."""
    from rich.text import Text

    line = Text()
    finite = list(filter(math.isfinite, points.ys.tolist()))
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    middle = sum(value / len(finite) for value in finite)
    for values in _columns(points.xs.tolist(), points.ys.tolist(), width):
        if not all(map(math.isfinite, values)):
            line.append(_ODD, "bold red")
        elif values:
            shown = max(values, key=lambda value: abs(value - middle))
            line.append(LEVELS[_level(shown, low, high, len(LEVELS))])
        else:
            line.append(" ")
    return line


def has_logarithm(points: "Points") -> bool:
    """Whether a logarithmic scale can show all of the values."""
    return all(value > 0 for value in points.ys.tolist() if math.isfinite(value))


def chart(points: "Points", width: int, height: int, logarithmic: bool = False) -> "list[Text]":
    """A curve in several lines, drawn in dots, with its greatest and least value at the left. A column in which a value
    is NaN or infinite has a red ``!`` at its bottom."""
    from rich.text import Text

    xs, ys = points.xs.tolist(), points.ys.tolist()
    finite = list(filter(math.isfinite, ys))
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    labels = [""] * height
    if low < high:
        labels[-1], labels[0] = number(low), number(high)
    elif finite:
        labels[height // 2] = number(low)
    margin = max(map(len, labels)) + 1
    dots = [[0] * max(width - margin - 1, 1) for _ in range(height)]
    if logarithmic and finite:
        ys = [math.log10(value) if math.isfinite(value) else value for value in ys]
        low, high = math.log10(low), math.log10(high)
    odd = _plot(xs, ys, dots, low, high)
    lines: list[Text] = []
    for label, row in zip(labels, dots, strict=True):
        line = Text()
        line.append(f"{label:>{margin - 1}} {'┤' if label else '│'}", "dim")
        for column, one in enumerate(row):
            if column in odd and len(lines) == height - 1:
                line.append(_ODD, "bold red")
            else:
                line.append(chr(_BRAILLE + one) if one else " ", "cyan")
        lines.append(line)
    return lines


def stacked_bar(shares: Sequence[tuple[str, float, str]], width: int) -> "Text":
    """Parts of a whole side by side: the letter, the share and the style of each."""
    from rich.text import Text

    line = Text()
    done = 0.0
    for letter, share, style in shares:
        done += share
        line.append(letter * (min(round(done * width), width) - len(line)), style)
    return line


def _columns(xs: list[float], ys: list[float], width: int) -> list[list[float]]:
    """The values in each of the columns of a line; where there are fewer points than columns, one in each."""
    if len(xs) <= width:
        return [[value] for value in ys]
    columns: list[list[float]] = [[] for _ in range(width)]
    for x, y in zip(xs, ys, strict=True):
        columns[_level(x, xs[0], xs[-1], width)].append(y)
    return columns


def _level(value: float, low: float, high: float, levels: int) -> int:
    # Divided first: the difference of two large numbers may be infinite. That of the smallest ones is 0 then.
    span = high / 2 - low / 2
    if span <= 0:
        return levels // 2
    return min(int((value / 2 - low / 2) / span * levels), levels - 1)


def _plot(xs: list[float], ys: list[float], dots: list[list[int]], low: float, high: float) -> set[int]:
    """Draw lines between the points that are finite; return the columns of those that are not."""
    width, height = 2 * len(dots[0]), 4 * len(dots)
    odd: set[int] = set()
    before: tuple[int, int] | None = None
    for x, y in zip(xs, ys, strict=True):
        column = _level(x, xs[0], xs[-1], width)
        if not math.isfinite(y):
            odd.add(column // 2)
            before = None
            continue
        here = column, height - 1 - _level(y, low, high, height)
        (left, top), (right, bottom) = before or here, here
        steps = max(abs(right - left), abs(bottom - top), 1)
        for step in range(steps + 1):
            across, down = left + round((right - left) * step / steps), top + round((bottom - top) * step / steps)
            dots[down // 4][across // 2] |= _DOTS[across % 2][down % 4]
        before = here
    return odd
