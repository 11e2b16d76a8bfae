"""Tables for people: their rows, and how values stand in them."""

import math
from typing import Any

from offloop.bus.printing import one_line, say, table
from offloop.bus.types.hyperparameters import value_text

_LONGEST = 60

Rows = list[tuple[str, ...]]
"""Rows of a table, each with its cells."""


def say_table(rows: Rows) -> None:
    """Prints a table, each cell as one line."""
    for line in table([tuple(map(one_line, row)) for row in rows]):
        say(line)


def cell_text(column: str, value: Any) -> str:
    """A value as it stands in the column of a table."""
    from offloop.bus.cli.describe import duration, size_text, when

    if value is None:
        return ""
    if column in ("started", "ended"):
        return when(value)
    if column in ("duration", "size"):
        return duration(value) if column == "duration" else size_text(value)
    if isinstance(value, bool) and column in ("pinned", "archived"):
        return "yes" if value else ""
    if isinstance(value, tuple):
        return short_text(", ".join(map(str, value)))
    if isinstance(value, float):
        return number_text(value)
    return short_text(value_text(value))


def number_text(value: float) -> str:
    """A number in six digits."""
    return f"{value:.6g}" if math.isfinite(value) else str(value)


def short_text(text: str) -> str:
    """A text as one line, cut to the width of a cell."""
    text = one_line(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
