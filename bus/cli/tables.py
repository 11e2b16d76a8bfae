"""Tables for people."""

from offloop.bus.printing import one_line, say, table

_LONGEST = 60

Rows = list[tuple[str, ...]]
"""Rows of a table, each with its cells."""


def say_table(rows: Rows) -> None:
    """Prints a table, each cell as one line."""
    for line in table([tuple(map(one_line, row)) for row in rows]):
        say(line)


def short_text(text: str) -> str:
    """A text as one line, cut to the width of a cell."""
    text = one_line(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
