"""The table of all runs in a terminal, and the way to the display of one of them and back."""

import contextlib
import os
import signal
import time

from offloop.bus.runs.directory import runs_dir
from offloop.bus.terminal import handle_signals
from offloop.consumers.dashboard.terminal.display import Display
from offloop.consumers.dashboard.terminal.screen import TerminalScreen, require_terminal, typed
from offloop.consumers.dashboard.terminal.table import NAME, TableShown, rows_of, table_frame
from offloop.consumers.dashboard.view.library import RunLibrary
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.tap import RunFollower
from offloop.consumers.runner.places import FolderRuns

_DRAW_SECONDS = 0.25
_LEAVE_SECONDS = 5.0
_FAR = 1 << 30
_MOVES = {"up": -1, "down": 1, "home": -_FAR, "end": _FAR}
_PAGES = {"page up": -1, "page down": 1}


def show_all_runs(runs_dir: str | os.PathLike[str] | None = None, every: int | str = 10) -> None:
    """Shows the table of all runs of a folder, and the runs that are chosen in it, until the user quits.

    The only live run is shown at once, and the first one of an empty folder. ``every`` is as in
    :class:`offloop.consumers.dashboard.terminal.top.Top`.

    Raises:
        ConfigurationError: there is no terminal.
    """
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
        # The runs that are live are the first that it reads.
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
        """Shows the table until a run is chosen; ``None`` if the user quits."""
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
        # Runs that are live last longer by the second.
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
        # What is at the top is what was asked for.
        shown.sort, shown.run, shown.place, shown.first = order, None, 0, 0

    def _type(self, key: str) -> None:
        self._shown.find = typed(self._shown.find, key)
        self._shown.is_typing = self._screen.is_typing = key not in ("enter", "escape")

    def _show(self, name: str, is_first: bool) -> bool:
        """Shows a run until it is left; whether that was for the table."""
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
    """What is printed meanwhile is printed again when the terminal is given back."""
