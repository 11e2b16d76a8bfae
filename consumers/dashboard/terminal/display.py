"""The thread that draws a run in the terminal and handles keys."""

import signal
import threading
import time

from offloop.bus.errors import OffloopError
from offloop.consumers.dashboard.terminal.frame import Shown, frame
from offloop.consumers.dashboard.terminal.screen import TerminalScreen
from offloop.consumers.dashboard.view.run_view import RunView

_DRAW_SECONDS = 0.25
_MESSAGE_SECONDS = 8.0
_PAGE = 10
_START_SECONDS = 2.0
_FAR = 1 << 30
_MOVES = {"up": -1, "down": 1, "page up": -_PAGE, "page down": _PAGE, "home": -_FAR, "end": _FAR}
_QUESTIONS = {
    "stop": "stop the training of {}? y stops it, any other key does not",
    "pause": "pause the training of {}? y pauses it, any other key does not",
}


class Display:
    """Draws a view from :meth:`open` to :meth:`close`, four times a second at most.

    ``q`` sets :attr:`left`; until :attr:`is_over` it also interrupts the main thread, as Ctrl-C does."""

    def __init__(self, run: RunView) -> None:
        self.left: threading.Event = threading.Event()
        self.started: threading.Event = threading.Event()  # set when the run is being read, so that it can be left
        self.is_over = False  # only the display is left to quit
        self.failure: Exception | None = None  # the error that ended the drawing
        self._view = run
        self._screen = TerminalScreen(lambda line: run.note("output", line))
        self._shown = Shown()
        self._seen: object = None
        self._size = 0, 0
        self._message_until = 0.0
        self._asks_for: str | None = None
        self._problem: str | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="offloop-top", daemon=True)

    def open(self) -> None:
        self._screen.open()
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._screen.close()

    def _work(self) -> None:
        try:
            while not self._closing.is_set():
                self._draw()
                for key in self._screen.keys(_DRAW_SECONDS):
                    self._handle_key(key)
                    self._seen = None
            if self.left.is_set():
                self._screen.close()
        except Exception as error:  # noqa: BLE001  shown where the callback is closed; the terminal comes first
            self.failure = error
            self._screen.close()
            self._leave()

    def _draw(self) -> None:
        shown, view, size = self._shown, self._view, self._screen.size
        if self._asks_for is None and time.monotonic() > self._message_until:
            shown.message = None
        if self._view.trouble != self._problem:
            self._problem = self._view.trouble
            view.note("end", self._problem or "")
            self._say(self._problem or "")
        shown.commands = self._view.command is not None
        # Read the status first: a command may have changed something. A host that falls silent changes only the time.
        now = (view.status, view.version, shown.message, size, int(time.monotonic()))
        if self._screen.is_blank or now != self._seen:
            if size != self._size:
                self._size = size
                self._screen.redraw()
            self._seen = now
            self._screen.draw(frame(view, shown, *size), *size)

    def _handle_key(self, key: str) -> None:
        shown = self._shown
        if key == "gone":
            self._closing.set()
            self._leave()
        elif self._asks_for is not None:
            command, self._asks_for, shown.message = self._asks_for, None, None
            if key in ("y", "Y"):
                self._command(command)
        elif key == "q":
            self._leave()
        elif key == "e":
            shown.page, shown.scroll = "run" if shown.page == "log" else "log", 0
        elif key in ("escape", "enter"):
            shown.page, shown.message = "run", None
        elif key == "redraw":
            self._screen.redraw()
        elif key in ("S", "p", "c"):
            self._ask(key)
        elif key in _MOVES:
            shown.scroll = max(shown.scroll + (-_MOVES[key] if shown.page == "log" else _MOVES[key]), 0)

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
        def send() -> None:
            try:
                outcome = self._view.send(name, sender="top")
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
        self._shown.message = message

    def _leave(self) -> None:
        if self.left.is_set():
            return
        self.left.set()
        if self.is_over:
            # Another callback may keep the command running.
            self._closing.set()
        # Earlier, the signal would end the command, and not just its reading.
        self.started.wait(_START_SECONDS)
        main = threading.main_thread().ident
        if not self.is_over and main is not None:
            # As at Ctrl-C, the runner finishes the current event and closes everything.
            signal.pthread_kill(main, signal.SIGINT)
