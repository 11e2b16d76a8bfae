"""The thread that draws a run in the terminal and obeys keys."""

import os
import signal
import threading
import time
from typing import ClassVar, get_args

from offloop.bus.errors import OffloopError
from offloop.bus.subscriber.commands import sent_by
from offloop.consumers.dashboard.terminal.frame import HELP, Shown, frame, log_length, log_rows, metric_groups
from offloop.consumers.dashboard.terminal.screen import TerminalScreen
from offloop.consumers.dashboard.view.rank_map import usual_quantity
from offloop.consumers.dashboard.view.series import Axis
from offloop.consumers.dashboard.view.tap import MonitoredRun

_DRAW_SECONDS = 0.25
_MESSAGE_SECONDS = 8.0
_PAGE = 10
_START_SECONDS = 2.0
_FAR = 1 << 30
_MOVES = {
    "up": (-1, 0),
    "down": (1, 0),
    "page up": (0, -1),
    "page down": (0, 1),
    "home": (-_FAR, 0),
    "end": (_FAR, 0),
}
_QUESTIONS = {
    "stop": "stop the training of {}? y stops it, any other key does not",
    "pause": "pause the training of {}? y pauses it, any other key does not",
}
_SMOOTHING_STEP = 0.1
_MOST_SMOOTHING = 0.99


class Display:
    """Draws a view from :meth:`open` to :meth:`close`, four times a second at most.

    ``q`` sets :attr:`left`; until :attr:`is_over` it also has the process leave the run, as Ctrl-C does. There is one
    display at a time: one that is opened closes the one before, of a replay that is repeated.
    """

    _opened: "ClassVar[Display | None]" = None

    def __init__(self, run: MonitoredRun) -> None:
        self.left = threading.Event()
        """Whether somebody has asked to leave."""
        self.started = threading.Event()
        """Whether the run is being read, so that it can be left."""
        self.is_over = False
        """Whether there is nothing to leave but what is shown."""
        self.failure: Exception | None = None
        """What ended the drawing, where that was a defect."""
        self.went_back = False
        """Whether it was left for the table that the run was chosen in."""
        self.is_gone = False
        """Whether the terminal is."""
        self._run = run
        self._view = run.view
        self._screen = TerminalScreen(self._note_output)
        self._shown = Shown(colors=not os.environ.get("NO_COLOR"))
        self._seen: object = None
        self._changed = True
        self._message_until = 0.0
        self._asks_for: str | None = None
        self._leaves_at_once = False
        self._is_from_table = False
        self._problem: str | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="offloop-top", daemon=True)

    def open(self) -> None:
        """Takes the terminal and begins to draw."""
        before, Display._opened = Display._opened, self
        if before is not None:
            before.close()
            # It was over when that was asked for, and the next replay was about to begin.
            self._leaves_at_once = before.left.is_set()
        self._screen.open()
        self._thread.start()

    def close(self) -> None:
        """Gives the terminal back."""
        self._closing.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._screen.close()

    def show(self, screen: TerminalScreen, leaving: tuple[str, ...]) -> None:
        """Draws in the calling thread, on a screen that is open and stays so, until somebody leaves. The keys that lead
        away do what ``leaving`` says; the table of all runs is one of these places."""
        self._screen, self._shown.leaving = screen, leaving
        screen.on_output = self._note_output
        self.is_over = self._is_from_table = True
        self.started.set()
        self._draw_until_closed()

    def _note_output(self, line: str) -> None:
        self._view.note("output", line)

    def _draw_until_closed(self) -> None:
        while not self._closing.is_set():
            self._draw()
            for key in self._screen.keys(_DRAW_SECONDS):
                self._handle_key(key)
                self._changed = True

    def _work(self) -> None:
        try:
            if self._leaves_at_once:
                self._leave()
            self._draw_until_closed()
            if self.left.is_set():
                self._screen.close()
        except Exception as error:  # noqa: BLE001  shown where the callback is closed; the terminal comes first
            self.failure = error
            self._screen.close()
            self._leave()

    def _draw(self) -> None:
        if self._shown.message is not None and self._asks_for is None and time.monotonic() > self._message_until:
            self._shown.message, self._changed = None, True
        if self._run.problem != self._problem:
            self._problem = self._run.problem
            self._view.note("end", self._problem or "")
            self._say(self._problem or "")
        self._shown.commands = self._run.command is not None
        self._shown.is_replay = not self._shown.commands
        width, height = self._screen.size
        # The state is asked for first: it may be a command that changed something.
        # A host that falls silent changes nothing but the time since.
        is_silent = self._view.rank_count > 1 and self._view.rank_map().silent
        tick = int(time.monotonic()) if is_silent else None
        now = (self._view.status, self._view.version, width, height, tick)
        if self._changed or self._screen.is_blank or now != self._seen:
            if self._seen is not None and self._seen[2:4] != now[2:4]:  # type: ignore[index]
                self._screen.redraw()
            self._seen, self._changed = now, False
            self._screen.draw(frame(self._view, self._shown, width, height), width, height)

    def _handle_key(self, key: str) -> None:
        shown = self._shown
        if key == "gone":
            self.is_gone = True
            self._closing.set()
            self._leave()
            return
        if self._asks_for is not None:
            command, self._asks_for, shown.message = self._asks_for, None, None
            if key in ("y", "Y"):
                self._command(command)
            return
        if shown.is_typing:
            self._type(key)
            return
        if key == "q":
            self._leave()
        elif key == "?":
            shown.page, shown.scroll = "run" if shown.page == "help" else "help", 0
        elif key == "e":
            shown.page, shown.scroll = "run" if shown.page == "log" else "log", 0
        elif key == "r":
            shown.page = "run" if shown.page == "ranks" else "ranks"
        elif key == "enter" and shown.page == "run":
            self._keep_chart()
        elif key == "escape" and self._is_from_table and shown.page == "run" and not shown.find:
            self.went_back = True
            self._leave()
        elif key in ("escape", "enter"):
            if shown.page == "run":
                shown.find = ""
            shown.page, shown.message = "run", None
        elif key == "/":
            shown.page = "run"
            shown.is_typing = self._screen.is_typing = True
        elif key in ("s", "a"):
            step = _SMOOTHING_STEP if key == "s" else -_SMOOTHING_STEP
            shown.smoothing = min(max(round(shown.smoothing + step, 1), 0.0), _MOST_SMOOTHING)
        elif key == "redraw":
            self._screen.redraw()
        elif key == "x":
            axes = get_args(Axis)
            shown.axis = axes[(axes.index(shown.axis) + 1) % len(axes)]
        elif key == "l":
            shown.logarithmic = not shown.logarithmic
        elif key in ("S", "p", "c"):
            self._ask(key)
        elif key in _MOVES:
            self._move(_MOVES[key])

    def _type(self, key: str) -> None:
        """Takes a key while the name of a metric is typed."""
        shown = self._shown
        if key == "backspace":
            shown.find = shown.find[:-1]
        elif key in ("enter", "escape"):
            shown.find = "" if key == "escape" else shown.find
            shown.is_typing = self._screen.is_typing = False
        elif len(key) == 1 and key.isprintable():
            shown.find += key

    def _metrics(self) -> list[str]:
        return [name for group in metric_groups(self._view, self._shown).values() for name in group]

    def _keep_chart(self) -> None:
        shown, names = self._shown, self._metrics()
        if not names:
            return
        chosen = shown.metric if shown.metric in names else names[0]
        if chosen in shown.kept:
            shown.kept = tuple(name for name in shown.kept if name != chosen)
        else:
            shown.kept = (*shown.kept, chosen)

    def _move(self, move: tuple[int, int]) -> None:
        """Moves by so many lines and pages: in the log, else through the metrics."""
        shown, (lines, pages) = self._shown, move
        if shown.page == "log":
            width, height = self._screen.size
            rows, length = log_rows(height), log_length(self._view.log(), width)
            shown.scroll = _within(shown.scroll - lines - pages * rows, length - rows)
            return
        if shown.page == "help":
            shown.scroll = _within(shown.scroll + lines + pages * _PAGE, len(HELP))
            return
        if shown.page == "ranks":
            known = self._view.rank_map().quantities
            if known:
                place = known.index(shown.quantity) if shown.quantity in known else known.index(usual_quantity(known))
                shown.quantity = known[_within(place + lines + pages * _PAGE, len(known) - 1)]
            return
        names = self._metrics()
        if names:
            place = names.index(shown.metric) if shown.metric in names else 0
            shown.metric = names[_within(place + lines + pages * _PAGE, len(names) - 1)]

    def _ask(self, key: str) -> None:
        if not self._shown.commands:
            self._say("this is a recording: it takes no commands")
            return
        paused = self._view.status == "paused"
        command = {"S": "stop", "c": "checkpoint", "p": "resume" if paused else "pause"}[key]
        if command in _QUESTIONS:
            self._asks_for = command
            self._shown.message = _QUESTIONS[command].format(self._view.run_name)
        else:
            self._command(command)

    def _command(self, name: str) -> None:
        command = self._run.command
        if command is None:
            return

        def send() -> None:
            try:
                outcome = command(name, reason=sent_by("top"))
            except OffloopError as error:
                self._view.note("command", f"'{name}' was not sent: {error}")
                self._say(f"'{name}' was not sent: {error}")
            else:
                self._view.take_outcome(outcome)
                self._say(str(outcome))

        self._say(f"'{name}' is on its way ...")
        threading.Thread(target=send, name="offloop-command", daemon=True).start()

    def _say(self, message: str) -> None:
        self._message_until = time.monotonic() + _MESSAGE_SECONDS
        self._shown.message, self._changed = message, True

    def _leave(self) -> None:
        if self.left.is_set():
            return
        self.left.set()
        if self.is_over:
            # Another callback may have something to show for longer.
            self._closing.set()
        # Before that the signal would end the command, and not just its reading.
        self.started.wait(_START_SECONDS)
        main = threading.main_thread().ident
        if not self.is_over and main is not None:
            # As Ctrl-C does: whoever runs the callbacks finishes the event at hand and closes everything.
            signal.pthread_kill(main, signal.SIGINT)


def _within(place: int, last: int) -> int:
    return max(min(place, last), 0)
