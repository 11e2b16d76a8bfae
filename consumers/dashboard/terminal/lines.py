"""Lines of text for a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from offloop.bus.printing import one_line

if TYPE_CHECKING:
    from rich.text import Text


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


def key_help(keys: Sequence[tuple[str, str]]) -> "list[Text]":
    """A line for each key, with what it does."""
    lines = []
    for key, meaning in keys:
        line = text_line()
        line.append(f" {key:<11}" if key else "", "bold")
        lines.append(line.append(meaning))
    return lines
