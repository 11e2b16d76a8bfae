"""The dashboard in a terminal."""

from collections.abc import Sequence

from offloop.bus.protocol.order import Ending
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.consumers.api.logger import Logger, LoggerDestination, RunContext
from offloop.consumers.dashboard.terminal.display import Display
from offloop.consumers.dashboard.terminal.screen import require_terminal
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.tap import RunTap


class Top(RunTap):
    """Shows a run in the terminal: state, progress, metrics, the phases of its steps, ranks, and the log.

    Keys choose the page, command the training (stop, pause, checkpoint), and quit, which leaves the training alone. At
    the end of the run it stays until ``q``. It takes the whole terminal: printed lines are in its log, and in the
    terminal when that is restored.

    ``every`` is the interval, in batches, at which the phases are measured. Without a terminal, the command ends with
    :class:`offloop.bus.errors.ConfigurationError`."""

    owns_terminal = True

    def __init__(self, every: int = 10) -> None:
        self.every: int = every
        self._display: Display | None = None
        self._stays = False

    def check(self) -> None:
        require_terminal()

    def destinations(self) -> Sequence[LoggerDestination]:
        self._run = RunView("run")
        self._display = Display(self._run)
        return [self._run, _Opening(self._display)]

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        super().run_event(event, state, logger)
        if self._display is not None:
            self._display.started.set()

    def run_ended(self, ending: Ending | None) -> None:
        super().run_ended(ending)
        self._stays = ending is not None

    def post_close(self) -> None:
        if self._display is not None:
            self._display.is_over = True
            if not self._stays or self._display.left.is_set():
                self._close(self._display)

    def hold_open(self) -> None:
        if self._display is not None and self._stays:
            try:
                self._display.left.wait()
            finally:
                self._close(self._display)

    def _close(self, display: Display) -> None:
        display.close()
        if display.failure is not None:
            raise display.failure


class _Opening(LoggerDestination):
    def __init__(self, display: Display) -> None:
        self._display = display

    def check(self) -> None:
        require_terminal()

    def open(self, context: RunContext) -> None:
        self._display.open()
