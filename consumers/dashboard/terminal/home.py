"""The table of all runs in a terminal, and the display of a chosen run."""

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offloop.bus.index.columns import Column
from offloop.bus.index.entry import RunEntry
from offloop.bus.index.table import NEWEST_FIRST, Chosen, RunTable
from offloop.bus.printing import cut_in_the_middle, one_line
from offloop.bus.runs.directory import runs_dir
from offloop.bus.terminal import handle_signals
from offloop.consumers.dashboard.terminal.display import Display
from offloop.consumers.dashboard.terminal.frame import STATES, fitted, key_line, spread, text_line
from offloop.consumers.dashboard.terminal.screen import TerminalScreen, require_terminal, typed
from offloop.consumers.dashboard.view.library import RunLibrary
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.tap import RunFollower
from offloop.consumers.runner.places import FolderRuns

if TYPE_CHECKING:
    from rich.text import Text

NAME = "run"  # the column of names, always the first

_GAP = 2
_SHORTEST_NAME = 12
_NAME_SHARE = 0.4
_LONGEST = 14
_LONGEST_TEXT = 30
_LEAST_WITH_DETAILS = 8
_AROUND = 3  # lines without runs: the title, the heads of columns, the keys
_DAY_SECONDS = 86_400
_DRAW_SECONDS = 0.25
_LEAVE_SECONDS = 5.0
_FAR = 1 << 30
_MOVES = {"up": -1, "down": 1, "home": -_FAR, "end": _FAR}
_PAGES = {"page up": -1, "page down": 1}


@dataclass
class TableShown:
    find: str = ""  # as in choose
    found: str = ""  # the last valid filter
    is_typing: bool = False
    sort: str = NEWEST_FIRST
    archived: bool = False
    run: str | None = None
    place: int = 0  # its place among the found runs
    first: int = 0  # place of the first visible run
    widths: dict[str, int] = field(default_factory=dict)
    """Greatest widths of columns so far, so that they do not move while values change."""

    def choose(self, table: RunTable) -> tuple[Chosen, str | None]:
        """Return the found runs, and the error of the filter; the place follows the chosen run."""
        chosen = table.choose(self.find, self.sort, self.archived)
        error = chosen.error
        if error is None:
            self.found = self.find
        else:
            # The results of the last valid filter stay while the filter is typed.
            chosen = table.choose(self.found, self.sort, self.archived)
        entries = chosen.entries
        if not (self.place < len(entries) and entries[self.place].run == self.run):
            places = (place for place, entry in enumerate(entries) if entry.run == self.run)
            self.place = next(places, max(min(self.place, len(entries) - 1), 0))
        self.run = entries[self.place].run if entries else None
        return chosen, error


def show_all_runs(runs_dir: str | os.PathLike[str] | None = None, every: int | str = 10) -> None:
    """Show the table of all runs of a folder, and chosen runs, until the user quits.

    The only live run is shown at once, and the first one of an empty folder. Raises ConfigurationError without a
    terminal."""
    require_terminal()
    _AllRuns(FolderRuns(runs_dir), every).work()


class _AllRuns:
    def __init__(self, folder: FolderRuns, every: int | str) -> None:
        self._folder = folder
        self._library = RunLibrary(folder)
        self._every = every
        self._screen = TerminalScreen(_ignore)
        self._shown = TableShown()
        self._is_gone = False
        self._seen: object = None

    def work(self) -> None:
        # It reads live runs first.
        self._library.look()
        live = [entry.run for entry in self._library.table.entries.values() if entry.is_going_on]
        run = live[0] if len(live) == 1 else None
        self._waits = not self._library.table.entries and not self._library.waiting
        self._library.start()
        try:
            with handle_signals(signal.default_int_handler, signal.SIGTERM), contextlib.suppress(KeyboardInterrupt):
                self._screen.open()
                self._show_one_after_the_other(run)
        finally:
            self._screen.close()
            self._library.stop()

    def _show_one_after_the_other(self, run: str | None) -> None:
        while True:
            is_first = run is not None
            if run is None:
                is_first = self._waits
                run = self._choose()
                if run is None:
                    return
                is_first &= self._waits
            self._waits = False
            went_back = self._show(run, is_first)
            if self._is_gone or (is_first and not went_back):
                return
            self._shown.run, run = run, None

    def _choose(self) -> str | None:
        """Show the table until a run is chosen; ``None`` if the user quits."""
        self._screen.on_output = _ignore
        self._seen = None
        while True:
            self._draw()
            for key in self._screen.keys(_DRAW_SECONDS):
                self._seen = None
                if key == "gone":
                    self._is_gone = True
                    return None
                if self._shown.is_typing:
                    self._type(key)
                elif key == "q":
                    return None
                elif key == "enter" and self._shown.run is not None:
                    self._waits = False
                    return self._shown.run
                else:
                    self._handle_key(key)
            if self._waits and self._library.table.entries:
                return next(iter(self._library.table.entries))

    def _draw(self) -> None:
        library, (width, height) = self._library, self._screen.size
        # Live runs get longer by the second.
        now = (library.table, library.waiting, library.problem, int(time.time()), width, height)
        if self._seen == now and not self._screen.is_blank:
            return
        if isinstance(self._seen, tuple) and self._seen[-2:] != now[-2:]:
            self._screen.redraw()
            self._shown.widths.clear()
        self._seen = now
        state = library.problem or (f"reading {library.waiting:,} more ..." if library.waiting else None)
        lines = table_frame(library.table, self._shown, str(runs_dir(self._folder.directory)), state, width, height)
        self._screen.draw(lines, width, height)

    def _handle_key(self, key: str) -> None:
        shown = self._shown
        if key == "escape":
            shown.find = shown.found = ""
        elif key == "/":
            shown.is_typing = self._screen.is_typing = True
        elif key == "redraw":
            self._screen.redraw()
        elif key == "a":
            shown.archived = not shown.archived
        elif key == "r":
            self._sort(shown.sort[1:] if shown.sort.startswith("-") else f"-{shown.sort}")
        elif key in ("left", "right"):
            self._sort_beside(1 if key == "right" else -1)
        elif key in _MOVES:
            self._move(_MOVES[key])
        elif key in _PAGES:
            self._move(_PAGES[key] * rows_of(self._screen.size[1]))

    def _move(self, rows: int) -> None:
        shown = self._shown
        chosen, _ = shown.choose(self._library.table)
        if chosen.entries:
            shown.place = max(min(shown.place + rows, len(chosen.entries) - 1), 0)
            shown.run = chosen.entries[shown.place].run

    def _sort_beside(self, step: int) -> None:
        table = self._library.table
        columns = [table.column(NAME), *table.columns()]
        names = [column.name for column in columns]
        name = self._shown.sort.removeprefix("-")
        place = names.index(name) if name in names else names.index(NAME)
        column = columns[(place + step) % len(columns)]
        self._sort(f"-{column.name}" if column.downwards else column.name)

    def _sort(self, order: str) -> None:
        shown = self._shown
        shown.sort, shown.run, shown.place, shown.first = order, None, 0, 0  # the new order is visible at the top

    def _type(self, key: str) -> None:
        self._shown.find = typed(self._shown.find, key)
        self._shown.is_typing = self._screen.is_typing = key not in ("enter", "escape")

    def _show(self, name: str, is_first: bool) -> bool:
        """Show a run until it is left; return True to go back to the table."""
        run = RunView(name)
        follower = RunFollower(run, lambda: self._folder.find(name), self._every)
        follower.start()
        display = Display(run)
        try:
            display.show(self._screen, ("q quit", "Esc all runs") if is_first else ("q back",))
        finally:
            follower.stop()
            follower.join(_LEAVE_SECONDS)
        self._is_gone |= display.is_gone
        return display.went_back


def _ignore(_line: str) -> None:
    """Ignore a printed line: it is printed again when the terminal is restored."""


def rows_of(height: int) -> int:
    return max(height - _AROUND - (height >= _LEAST_WITH_DETAILS), 1)


def table_frame(
    table: RunTable, shown: TableShown, folder: str, state: str | None, width: int, height: int
) -> "list[Text]":
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
    if seconds is None:
        return ""
    then, now = time.localtime(seconds), time.localtime()
    if then[:3] == now[:3]:
        return time.strftime("%H:%M:%S", then)
    return time.strftime("%b %d" if abs(time.time() - seconds) < 300 * _DAY_SECONDS else "%Y-%m-%d", then)


def _nothing(table: RunTable, chosen: Chosen, shown: TableShown) -> str:
    if not table.entries:
        return "There is no run yet. Runs appear here as they begin."
    if chosen.archived and not shown.found:
        return "All runs are archived: a shows them."
    return "No run is found by that: Escape shows all."


def _details(chosen: Chosen, shown: TableShown, width: int) -> "Text":
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
    from rich.cells import cell_len, set_cell_size

    return set_cell_size(text, width - 1) + "…" if cell_len(text) > width else set_cell_size(text, width)
