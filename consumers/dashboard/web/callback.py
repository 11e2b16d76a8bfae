"""The callback ``dashboard``: a page in the browser that shows a live run."""

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
from offloop.consumers.runner.places import FolderRuns

if TYPE_CHECKING:
    from offloop.consumers.dashboard.web.site import Site


class Dashboard(RunTap):
    """Serves a page that shows the run: charts of metrics, phases of a step, ranks, images, events and commands.

    The page has buttons to command the training, and a link to the table of all runs in the folder of that run. Its
    address is printed on standard error.

    Args:
        host: the address to listen at. Others than this machine's own require ``tokens`` and a certificate.
        port: by default 8420, or the next free one.
        tokens: file with the secrets in links, one to command and one to view; made if it does not exist.
        certificate: TLS certificate, as PEM.
        certificate_key: its key.
        open_browser: open the page in a browser of this machine.
        every: batches between two measurements of the phases of a step, or another unit as in
            :attr:`~offloop.consumers.Callback.every`.

    Raises:
        ConfigurationError: an invalid argument, or a missing package of the dashboard.
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
        """Return the arguments, to make it again in the process of a trainer's callbacks."""
        return type(self), self._arguments

    @property
    def url(self) -> str:
        return "" if self._server is None else self._server.url

    def destinations(self) -> Sequence[LoggerDestination]:
        return (*super().destinations(), _Start(self))

    def run_ended(self, ending: Ending | None) -> None:
        self._ending = ending
        super().run_ended(ending)

    def post_close(self) -> None:
        if self._ending is None and self._server is not None:
            self._server.stop()

    def hold_open(self) -> None:
        if self._server is None:
            return
        say(f"the dashboard stays at {self.url} until Ctrl-C", err=True)
        try:
            while self._server.wait(0.5):
                pass
        finally:
            self._server.stop()

    def begin(self, run_dir: Path | None = None) -> None:
        """Begin to serve the page; with the directory of the run also the runs in the same folder."""
        from offloop.consumers.dashboard.web.site import Site

        is_run = run_dir is not None and (run_dir / RUN_FILE).is_file()  # A recording may lie anywhere
        place = FolderRuns(run_dir.resolve().parent) if run_dir is not None and is_run else None
        self._server = Site(self._listening, place, self._runs, self.every if isinstance(self.every, int) else 10)
        self._server.start()


class _Start(LoggerDestination):
    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard

    def open(self, context: RunContext) -> None:
        self._dashboard.begin(context.run_dir)
