"""The callback ``dashboard``: a page in the browser that shows the run as it goes on."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offloop.bus.printing import say
from offloop.bus.protocol.order import Ending
from offloop.bus.runs.directory import RUN_FILE
from offloop.consumers.api.logger import LoggerDestination, RunContext
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.tap import RunTap
from offloop.consumers.dashboard.web.access import Listening

if TYPE_CHECKING:
    from offloop.consumers.dashboard.web.site import Site


class Dashboard(RunTap):
    """Serves a page that shows the run: its metrics as charts, where a step's time goes, ranks, images, events and
    commands, and buttons to command it. From there a link leads to the table of all runs in the folder of that run. The
    address is printed on standard error.

    Args:
        host: the address to listen at. Others than this machine's own take ``tokens`` and a certificate.
        port: by default 8420, or the next one that is free.
        tokens: file with the secrets that links carry, one to command and one to view; made if it does not exist.
        certificate: TLS certificate, as PEM.
        certificate_key: its key.
        open_browser: whether to open the page in a browser of this machine.
        every: after how many batches the phases of a step are measured, and in other units as
            :attr:`~offloop.consumers.Callback.every` has it.

    Raises:
        ConfigurationError: something of that is not allowed, or the packages of the dashboard are not installed.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int | None = None,
        tokens: Path | None = None,
        certificate: Path | None = None,
        certificate_key: Path | None = None,
        open_browser: bool = False,
        every: int = 10,
    ) -> None:
        listening = Listening(host, port, tokens, certificate, certificate_key, open_browser)
        listening.check()
        self._listening = listening
        self._arguments = (host, port, tokens, certificate, certificate_key, open_browser, every)
        self._runs = [RunView("")]
        self._server: Site | None = None
        self._ending: Ending | None = None
        super().__init__(self._runs[0], every)

    def __reduce__(self) -> tuple[type["Dashboard"], tuple[Any, ...]]:
        """It is sent to the process of a trainer's callbacks as it was made."""
        return type(self), self._arguments

    @property
    def url(self) -> str:
        """The page's address; empty before the server has begun."""
        return "" if self._server is None else self._server.url

    def destinations(self) -> Sequence[LoggerDestination]:
        """One that takes what is logged to the page, and one that begins to serve it."""
        return (*super().destinations(), _Start(self))

    def run_ended(self, ending: Ending | None) -> None:
        """Tells the page how the run ended."""
        self._ending = ending
        super().run_ended(ending)

    def post_close(self) -> None:
        """Ends the page when the run goes on and only the watching is over."""
        if self._ending is None and self._server is not None:
            self._server.stop()

    def hold_open(self) -> None:
        """Keeps the page until Ctrl-C."""
        if self._server is None:
            return
        say(f"the dashboard stays at {self.url} until Ctrl-C", err=True)
        try:
            while self._server.wait(0.5):
                pass
        finally:
            self._server.stop()

    def begin(self, run_dir: Path | None = None) -> None:
        """Begins to serve the page; with the directory of the run also what is in the same folder.

        Raises:
            ConfigurationError: it cannot be served there.
        """
        from offloop.consumers.dashboard.web.site import Site
        from offloop.consumers.runner.places import FolderRuns

        # A recording may lie anywhere.
        is_run = run_dir is not None and (run_dir / RUN_FILE).is_file()
        places = [FolderRuns(run_dir.resolve().parent)] if run_dir is not None and is_run else []
        self._server = Site(self._listening, places, self._runs, self.every if isinstance(self.every, int) else 10)
        self._server.start()


class _Start(LoggerDestination):
    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard

    def open(self, context: RunContext) -> None:
        self._dashboard.begin(context.run_dir)
