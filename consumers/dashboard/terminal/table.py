"""The table of all runs, as lines of text for any size of a terminal."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offloop.bus.index.columns import Column
from offloop.bus.index.entry import RunEntry
from offloop.bus.index.table import NEWEST_FIRST, Chosen, RunTable
from offloop.bus.printing import cut_in_the_middle, one_line
from offloop.consumers.dashboard.terminal.draw import fitted, key_line, spread, text_line
from offloop.consumers.dashboard.terminal.frame import STATES

if TYPE_CHECKING:
    from rich.text import Text

NAME = "run"
"""The column of names, which always is the first."""

_GAP = 2
_SHORTEST_NAME = 12
_NAME_SHARE = 0.4
_LONGEST = 14
_LONGEST_TEXT = 30
_LEAST_WITH_DETAILS = 8
_AROUND = 3
"""Lines that are no rows: the title, the heads of columns, the keys."""
_DAY_SECONDS = 86_400


@dataclass
class TableShown:
    """State of the table on the screen."""

    find: str = ""
    """As in :meth:`offloop.bus.index.table.RunTable.choose`."""
    found: str = ""
    """The last of them without a mistake."""
    is_typing: bool = False
    sort: str = NEWEST_FIRST
    archived: bool = False
    run: str | None = None
    """The chosen run."""
    place: int = 0
    """Its place among the found runs."""
    first: int = 0
    """Place of the first run in sight."""
    widths: dict[str, int] = field(default_factory=dict)
    """Greatest widths of columns so far, so that they stand still while values change."""

    def choose(self, table: RunTable) -> tuple[Chosen, str | None]:
        """The found runs, and what is wrong with the filter; the place follows the chosen run."""
        chosen = table.choose(self.find, self.sort, self.archived)
        error = chosen.error
        if error is None:
            self.found = self.find
        else:
            # What was found before stays while the filter is typed.
            chosen = table.choose(self.found, self.sort, self.archived)
        entries = chosen.entries
        if not (self.place < len(entries) and entries[self.place].run == self.run):
            places = (place for place, entry in enumerate(entries) if entry.run == self.run)
            self.place = next(places, max(min(self.place, len(entries) - 1), 0))
        self.run = entries[self.place].run if entries else None
        return chosen, error


def rows_of(height: int) -> int:
    """How many runs are in sight."""
    return max(height - _AROUND - (height >= _LEAST_WITH_DETAILS), 1)


def table_frame(
    table: RunTable, shown: TableShown, folder: str, state: str | None, width: int, height: int
) -> "list[Text]":
    """The lines of the whole terminal, none of them wider than it; ``state`` is what else is to be said, such as how
    many runs have yet to be read."""
    chosen, error = shown.choose(table)
    lines = [_title(table, chosen, shown, folder, state, width)]
    room = rows_of(height)
    shown.first = max(min(shown.first, shown.place, len(chosen.entries) - room), shown.place - room + 1, 0)
    lines += _table(table, chosen, shown, room, width)
    lines += [text_line()] * (height - 1 - len(lines))
    if height >= _LEAST_WITH_DETAILS:
        lines[height - 2] = _details(chosen, shown, width)
    lines = [*lines[: height - 1], _footer(shown, error, width)][-height:]
    for line in lines:
        line.truncate(width, overflow="crop")
    return lines


def _title(table: RunTable, chosen: Chosen, shown: TableShown, folder: str, state: str | None, width: int) -> "Text":
    total, found = len(table.entries), len(chosen.entries)
    count = f"{found:,} of {total:,} runs" if found != total else f"{total:,} {'run' if total == 1 else 'runs'}"
    live = sum(entry.is_going_on for entry in chosen.entries)
    parts = [count, *([f"{live:,} live"] if live else [])]
    parts += [f"{chosen.archived:,} archived"] if chosen.archived else []
    parts += [state] if state else []
    line = text_line()
    line.append(fitted(folder, min(len(one_line(folder)) + 1, width // 3)).rstrip(), "bold")
    line.append(f"  {' · '.join(parts)}")
    if shown.found:
        line.append(f"  {one_line(shown.found)}", "yellow")
    name = shown.sort.removeprefix("-")
    order = "newest first" if shown.sort == NEWEST_FIRST else f"by {name}" + (", down" if shown.sort[0] == "-" else "")
    return spread(line, text_line(order, "dim"), width)


def _table(table: RunTable, chosen: Chosen, shown: TableShown, room: int, width: int) -> "list[Text]":
    from rich.cells import cell_len

    entries = chosen.entries[shown.first : shown.first + room]
    if not entries:
        return [text_line(), text_line(_nothing(table, chosen, shown), "dim")]
    columns, widths = table.columns(), shown.widths
    cells = {column.name: [_cell(entry, column, chosen) for entry in entries] for column in columns}
    for column in columns:
        most = _LONGEST_TEXT if column.kind in ("tags", "note") else _LONGEST
        wanted = max(map(cell_len, cells[column.name]))
        head = min(cell_len(column.head) + 1, _LONGEST)
        widths[column.name] = max(min(wanted, most), head, widths.get(column.name, 0))
    longest = max(len("name "), *(cell_len(one_line(entry.run)) for entry in entries)) + 1
    name_width = max(min(longest, max(int(width * _NAME_SHARE), _SHORTEST_NAME)), widths.get(NAME, 0))
    widths[NAME] = name_width = max(min(name_width, width - _GAP), 1)
    fitting = _fitting(columns, shown, width - name_width - _GAP)
    lines = [_heads(fitting, shown)]
    for place, entry in enumerate(entries):
        is_chosen = shown.first + place == shown.place
        line = text_line()
        line.append("▸ " if is_chosen else "• " if entry.pinned else "  ", "bold cyan")
        name = _cut(cut_in_the_middle(one_line(entry.run), name_width), name_width)
        line.append(name, "bold" if is_chosen else "dim" if entry.archived else "")
        for column in fitting:
            text = _aligned(cells[column.name][place], column, widths)
            line.append(" " * _GAP)
            line.append(text, _style(entry, column, chosen))
        lines.append(line)
    return lines


def _fitting(columns: Sequence[Column], shown: TableShown, room: int) -> list[Column]:
    """The columns that there is room for: first the one that is sorted by, the status and metrics."""
    by = shown.sort.removeprefix("-") if shown.sort != NEWEST_FIRST else None
    found = set()
    for column in sorted(columns, key=lambda one: (one.name != by, one.metric is None and one.kind != "status")):
        needed = shown.widths[column.name] + _GAP
        if needed <= room:
            found.add(column.name)
            room -= needed
    return [column for column in columns if column.name in found]


def _heads(columns: Sequence[Column], shown: TableShown) -> "Text":
    line, by = text_line("  "), shown.sort.removeprefix("-")
    line.append(_cut(f"name{_arrow(NAME, shown)}", shown.widths[NAME]), "bold cyan" if by == NAME else "bold")
    for column in columns:
        arrow = _arrow(column.name, shown)
        head, room = one_line(column.head), shown.widths[column.name] - len(arrow)
        head = (head if len(head) <= room else fitted(head, room).rstrip()) + arrow
        line.append(" " * _GAP)
        line.append(_aligned(head, column, shown.widths), "bold cyan" if by == column.name else "bold")
    return line


def _aligned(text: str, column: Column, widths: Mapping[str, int]) -> str:
    width = widths[column.name]
    return f"{text:>{width}}" if column.kind == "number" and len(text) <= width else _cut(text, width)


def _arrow(name: str, shown: TableShown) -> str:
    if shown.sort.removeprefix("-") != name:
        return ""
    return "↓" if shown.sort.startswith("-") else "↑"


def _cell(entry: RunEntry, column: Column, chosen: Chosen) -> str:
    if column.kind == "time":
        return _time(column.value(entry))
    text = column.text(entry)
    if column.kind == "status":
        return f"{STATES.get(entry.status, ('?', ''))[0]} {text}"
    # The star is for terminals without colours.
    return f"{text} {'*' if chosen.best(column) == entry.run else ' '}" if text and column.metric is not None else text


def _style(entry: RunEntry, column: Column, chosen: Chosen) -> str:
    if column.kind == "status":
        return STATES.get(entry.status, ("?", ""))[1]
    if column.metric is not None and chosen.best(column) == entry.run:
        return "bold green"
    return "dim" if entry.archived else ""


def _time(seconds: float | None) -> str:
    """A clock's time of today, else the day."""
    if seconds is None:
        return ""
    then, now = time.localtime(seconds), time.localtime()
    if then[:3] == now[:3]:
        return time.strftime("%H:%M:%S", then)
    return time.strftime("%b %d" if abs(time.time() - seconds) < 300 * _DAY_SECONDS else "%Y-%m-%d", then)


def _nothing(table: RunTable, chosen: Chosen, shown: TableShown) -> str:
    if not table.entries:
        return "There is no run yet. They are shown here as they begin."
    if chosen.archived and not shown.found:
        return "All runs are archived: a shows them."
    return "No run is found by that: Escape shows all."


def _details(chosen: Chosen, shown: TableShown, width: int) -> "Text":
    """Reason, tags and note of the chosen run, for which columns have no room."""
    if not chosen.entries:
        return text_line()
    entry = chosen.entries[shown.place]
    why = entry.error or entry.reason or entry.problem or ""
    parts = [part for part in (why, ", ".join(entry.tags), entry.note) if part]
    line = text_line(" · ".join(parts), "dim")
    line.truncate(width, overflow="ellipsis")
    return line


def _footer(shown: TableShown, error: str | None, width: int) -> "Text":
    if shown.is_typing:
        line = text_line(f"find: {shown.find}▏ " + (error or "Enter keeps it, Escape shows all"), "reverse")
        line.truncate(width, overflow="ellipsis")
        return line
    return key_line(("q quit", "↑↓ run", "Enter show", "/ find", "←→ sort", "r reverse", "a archived"), width)


def _cut(text: str, width: int) -> str:
    """A text in so many columns of the terminal."""
    from rich.cells import cell_len, set_cell_size

    return set_cell_size(text, width - 1) + "…" if cell_len(text) > width else set_cell_size(text, width)
