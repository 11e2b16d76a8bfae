"""The table of all runs, as lines of text for any size of a terminal."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offloop.bus.index.columns import Column
from offloop.bus.index.entry import RunEntry
from offloop.bus.index.table import NEWEST_FIRST, Chosen, RunTable
from offloop.bus.printing import cut_in_the_middle, one_line
from offloop.consumers.dashboard.terminal.frame import STATES
from offloop.consumers.dashboard.terminal.lines import fitted, key_line, rule, spread, text_line

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

TABLE_HELP = (
    ("↑ ↓  k j", "choose a run"),
    ("PgUp PgDn", "a page up or down"),
    ("Home End", "the first or the last"),
    ("Enter", "show the run; there, Escape leads back to the table"),
    ("← →", "sort by the column beside: the best or newest first"),
    ("r", "the other way round"),
    ("/", "words to look for, or a filter: lr > 0.01 and status == live"),
    ("Escape", "all runs again"),
    ("a", "with archived runs, and without"),
    ("q", "quit"),
    ("Ctrl-L", "draw everything anew"),
    ("?", "this page, and back"),
)


@dataclass
class TableShown:
    """What of the table is shown."""

    page: str = "table"
    """``table`` or ``help``."""
    find: str = ""
    """As in :meth:`offloop.bus.index.table.RunTable.choose`."""
    found: str = ""
    """The last of them that was no mistake."""
    is_typing: bool = False
    sort: str = NEWEST_FIRST
    archived: bool = False
    run: str | None = None
    """The run that is chosen."""
    place: int = 0
    """Where it stands among those that are found."""
    first: int = 0
    """The place of the first one in sight."""
    widths: dict[str, int] = field(default_factory=dict)
    """How wide columns have been: they grow, and so stand still while values change."""

    def choose(self, table: RunTable) -> tuple[Chosen, str | None]:
        """The runs that are found, and what is wrong with the filter; the place follows the chosen run."""
        chosen = table.choose(self.find, self.sort, self.archived)
        error = chosen.error
        if error is None:
            self.found = self.find
        else:
            # What was found before stays while somebody writes.
            chosen = table.choose(self.found, self.sort, self.archived)
        entries = chosen.entries
        if not (self.place < len(entries) and entries[self.place].run == self.run):
            places = (place for place, entry in enumerate(entries) if entry.run == self.run)
            self.place = next(places, max(min(self.place, len(entries) - 1), 0))
        self.run = entries[self.place].run if entries else None
        return chosen, error


def sortable(table: RunTable) -> list[Column]:
    """The columns that the table may be sorted by, in their order."""
    return [table.column(NAME), *table.columns()]


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
    if shown.page == "help":
        lines += _help(width)[: height - 2]
    else:
        shown.first = max(min(shown.first, shown.place, len(chosen.entries) - room), shown.place - room + 1, 0)
        lines += _table(table, chosen, shown, room, width)
    lines += [text_line()] * (height - 1 - len(lines))
    if shown.page == "table" and height >= _LEAST_WITH_DETAILS:
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
    columns = table.columns()
    texts = {column.name: [_cell(entry, column, chosen) for entry in entries] for column in columns}
    for column in columns:
        wide = max(cell_len(text) for text in texts[column.name])
        head = cell_len(_head(column, shown))
        most = _LONGEST_TEXT if column.kind in ("tags", "note") else _LONGEST
        # A column of numbers is not to be so wide as the name of a metric may be.
        least = head if head <= most and column.metric is None else min(head, most)
        shown.widths[column.name] = max(min(wide, most), least, shown.widths.get(column.name, 0))
    longest = max(len("name "), *(cell_len(one_line(entry.run)) for entry in entries)) + 1
    name_width = max(min(longest, max(int(width * _NAME_SHARE), _SHORTEST_NAME)), shown.widths.get(NAME, 0))
    name_width = max(min(name_width, width - _GAP), 1)
    shown.widths[NAME] = name_width
    fitting = _fitting(columns, shown, width - name_width - _GAP)
    lines = [_heads(fitting, shown, name_width)]
    for place, entry in enumerate(entries):
        is_chosen = shown.first + place == shown.place
        line = text_line()
        line.append("▸ " if is_chosen else "• " if entry.pinned else "  ", "bold cyan")
        line.append(
            _cut(cut_in_the_middle(one_line(entry.run), name_width), name_width),
            "bold" if is_chosen else "dim" if entry.archived else "",
        )
        for column in fitting:
            text, cell_width = texts[column.name][place], shown.widths[column.name]
            is_number = column.kind == "number" and len(text) <= cell_width
            line.append(" " * _GAP)
            line.append(f"{text:>{cell_width}}" if is_number else _cut(text, cell_width), _style(entry, column, chosen))
        lines.append(line)
    return lines


def _fitting(columns: Sequence[Column], shown: TableShown, room: int) -> list[Column]:
    """The columns that there is room for: first the one that is sorted by, the state, and what runs are measured by."""
    by = shown.sort.removeprefix("-")

    def rank(column: Column) -> int:
        kinds = {"status": 1, "number": 3, "text": 4, "progress": 5, "time": 6, "tags": 8, "note": 9}
        if column.name == by and shown.sort != NEWEST_FIRST:
            return 0
        if column.metric is not None:
            return 2
        return 7 if column.name == "duration" else kinds[column.kind]

    found = set()
    for column in sorted(columns, key=rank):
        needed = shown.widths[column.name] + _GAP
        if needed <= room:
            found.add(column.name)
            room -= needed
    return [column for column in columns if column.name in found]


def _heads(columns: Sequence[Column], shown: TableShown, name_width: int) -> "Text":
    def style(name: str) -> str:
        return "bold cyan" if shown.sort.removeprefix("-") == name else "bold"

    line = text_line("  ")
    line.append(_cut(f"name{_arrow(NAME, shown)}", name_width), style(NAME))
    for column in columns:
        cell_width = shown.widths[column.name]
        arrow = _arrow(column.name, shown)
        prefix = f"{column.which} " if column.which and cell_width >= _SHORTEST_NAME else ""
        room = cell_width - len(prefix) - len(arrow)
        head = one_line(column.title)
        if len(head) > room:
            head = fitted(head, room)
        head = f"{prefix}{head.rstrip()}{arrow}"
        line.append(" " * _GAP)
        line.append(f"{head:>{cell_width}}" if column.kind == "number" else _cut(head, cell_width), style(column.name))
    return line


def _head(column: Column, shown: TableShown) -> str:
    prefix = f"{column.which} " if column.which else ""
    return f"{prefix}{one_line(column.title)}{_arrow(column.name, shown) or ' '}"


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
    """What is said of the chosen run that columns have no room for."""
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
    return key_line(("q quit", "? help", "↑↓ run", "Enter show", "/ find", "←→ sort", "r reverse", "a archived"), width)


def _help(width: int) -> "list[Text]":
    lines = [rule("keys", width)]
    for keys, meaning in TABLE_HELP:
        line = text_line()
        line.append(f" {keys:<11}", "bold")
        line.append(meaning)
        lines.append(line)
    return [*lines, text_line(), text_line("* the best of the runs that are found", "dim")]


def _cut(text: str, width: int) -> str:
    """A text in so many columns of the terminal."""
    from rich.cells import cell_len, set_cell_size

    return set_cell_size(text, width - 1) + "…" if cell_len(text) > width else set_cell_size(text, width)
