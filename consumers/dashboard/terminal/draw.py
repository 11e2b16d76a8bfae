"""Lines of text for a terminal, with curves and bars made of characters."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from offloop.bus.printing import one_line

if TYPE_CHECKING:
    from rich.text import Text

    from offloop.consumers.dashboard.view.series import Points


_LEVELS = "▁▂▃▄▅▆▇█"
_ODD = "!"


def text_line(text: str = "", style: str = "") -> "Text":
    """A text as it is shown: escaped, in one line."""
    from rich.text import Text

    return Text(one_line(text) if text.strip() else text, style)


def rule(title: str, width: int, right: str = "") -> "Text":
    """A line with a title at its left, and more at its right where there is room."""
    title = one_line(title)
    line = text_line()
    line.append("── ", "dim")
    line.append(title, "bold")
    right = right if line.cell_len + len(right) + 9 <= width else ""
    rest = width - line.cell_len - 1 - (len(right) + 2 if right else 0)
    line.append(f" {'─' * max(rest, 0)}", "dim")
    if right:
        line.append(f" {right} ")
    return line


def spread(left: "Text", right: "Text", width: int) -> "Text":
    """One text at the left and, where there is room, one at the right."""
    blank = width - left.cell_len - right.cell_len
    if blank < 1:
        return left
    left.append(" " * blank)
    return left.append_text(right)


def fitted(name: str, width: int) -> str:
    """A name in so many columns of the terminal: its end tells more than its beginning."""
    from rich.cells import cell_len, set_cell_size

    name = one_line(name)
    if cell_len(name) >= width:
        while name and cell_len(name) > width - 2:
            name = name[1:]
        name = f"…{name}"
    return set_cell_size(name, width)


def key_line(keys: Sequence[str], width: int) -> "Text":
    """Keys and what they do, such as ``q quit``: those that there is room for."""
    line = text_line()
    for text in keys:
        if len(line) + len(text) + 2 > width:
            break
        key, _, meaning = text.partition(" ")
        line.append(key, "bold")
        line.append(f" {meaning}  ", "dim")
    return line


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
            line.append(_LEVELS[_level(shown, low, high, len(_LEVELS))])
        else:
            line.append(" ")
    return line


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
