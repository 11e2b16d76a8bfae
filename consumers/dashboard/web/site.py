"""The server of the web dashboard, in a thread with a separate event loop, and its pages."""

import errno
import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from offloop.bus.errors import ConfigurationError
from offloop.bus.printing import one_line, say
from offloop.consumers.api.optional import fastapi, ui
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.web.access import FIRST_PORT, Listening, Opening, Role, Tokens
from offloop.consumers.dashboard.web.comparison import Comparison
from offloop.consumers.dashboard.web.console import add_console_routes
from offloop.consumers.dashboard.web.content import add_routes
from offloop.consumers.dashboard.web.follow import ChosenRuns
from offloop.consumers.dashboard.web.home import MOST_COMPARED, HomePage
from offloop.consumers.dashboard.web.page import Page
from offloop.consumers.dashboard.web.places import AllRuns
from offloop.consumers.dashboard.web.tables import add_table_routes
from offloop.consumers.runner.places import Place

if TYPE_CHECKING:
    import uvicorn

ALL_RUNS = "/all"  # the path of the table of all runs

CHOSEN_RUNS = "/runs"  # the path of the page of the runs in its address: ?run=A&run=B

_LONGEST = 200
_PORTS_TRIED = 100
_PATIENCE_SECONDS = 30.0
_RECONNECT_SECONDS = 10.0
_ICON = (
    "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'><rect width='32' height='32' rx='7' fill='#0b5cad'/>"
    "<path d='M5 9c5 0 5 14 10 14s5-8 12-8' fill='none' stroke='#fff' stroke-width='3' stroke-linecap='round'/></svg>"
)


class Site:
    """Serves the table of all runs of a place, the page of chosen ones, and ``/``: ``runs``, or else the table.

    Pages without viewers cost nothing. A process has one site at a time. Raises ConfigurationError for invalid options
    or missing packages."""

    _running = threading.Lock()

    def __init__(
        self, listening: Listening, place: Place | None = None, runs: Sequence[RunView] | None = None, every: int = 10
    ) -> None:
        listening.check()
        self._listening = listening
        self._tokens = None if listening.tokens is None else Tokens.load(listening.tokens)
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._stopping = False
        self.url: str = ""  # the page's address, once it has begun
        self._pages: dict[str, Callable[[Opening], None]] = {}
        self._home = ""
        self._stops: list[Callable[[], None]] = []
        if place is not None:
            all_runs, chosen = AllRuns(place), ChosenRuns(place, every)
            self._home, self._stops = ALL_RUNS, [chosen.stop, all_runs.stop]
            self._pages["/"] = self._pages[ALL_RUNS] = lambda opening: HomePage(all_runs, opening).build()
            self._pages[CHOSEN_RUNS] = lambda opening: self._build_chosen(chosen, place, opening)
        if runs is not None:
            self._pages["/"] = lambda opening: Page(runs, opening, self._home).build()

    def start(self) -> None:
        """Begin to serve, and report the address on standard error.

        Raises ConfigurationError when the port is in use, the host is not one of this machine, or this process has a
        dashboard already."""
        if not self._running.acquire(blocking=False):
            raise ConfigurationError("this process serves a dashboard already: watch several runs with 'offloop ui'")
        try:
            listener = _listen(self._listening)
        except BaseException:
            self._running.release()
            raise
        port = listener.getsockname()[1]
        self.url = self._listening.url(port)
        self._thread = threading.Thread(target=self._serve, args=(listener, port), name="offloop-web", daemon=True)
        self._thread.start()
        note = "" if self._tokens is None else f" (add ?token=... with a token from {self._listening.tokens})"
        say(f"dashboard: {self.url}{note}", err=True)
        if self._listening.open_browser:
            token = "" if self._tokens is None else f"?token={self._tokens.command}"
            webbrowser.open(self.url + token)

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds``; return True while it serves. Raises the error that ended it."""
        if self._thread is not None:
            self._thread.join(seconds)
        if self._failure is not None:
            raise self._failure
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        self._stopping = True
        if self._server is not None:
            self._server.should_exit = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE_SECONDS)
        for stop in self._stops:
            stop()

    def _serve(self, listener: socket.socket, port: int) -> None:
        try:
            from offloop.consumers.dashboard.web.gate import guarded_server

            self._server = guarded_server(self._application(), self._listening, self._tokens, port)
            self._server.should_exit = self._stopping  # it may be stopped before the server exists
            self._server.run(sockets=[listener])
        except Exception as error:  # noqa: BLE001  whatever it is, the waiting thread raises it
            self._failure = error
            say(f"dashboard: it has ended, {type(error).__name__}: {error}", err=True)
        finally:
            listener.close()
            self._running.release()

    def _application(self) -> "fastapi.FastAPI":
        from nicegui import core

        from offloop.consumers.dashboard.web.gate import ROLE, guard_sockets

        # NiceGUI has one application in a process: undo the changes of an earlier dashboard.
        core.app.middleware_stack = None
        core.app.user_middleware.clear()
        core.sio.eio.start_service_task = True
        guard_sockets()

        def add(path: str, build: Callable[[Opening], None]) -> None:
            @ui.page(path, title="offloop")
            def page(request: fastapi.Request) -> None:
                build(self._opening(path, request, request.scope[ROLE]))

        for path, build in self._pages.items():
            add(path, build)
        # The loading bar would be empty: pages get their content by a socket.
        core.app.config.quasar_config["loadingBar"]["skipHijack"] = True
        app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        add_routes(app)
        add_table_routes(app)
        add_console_routes(app)
        ui.run_with(
            app,
            favicon=f"data:image/svg+xml,{_ICON}".replace("#", "%23"),
            dark=None,
            language="en-US",
            tailwind=False,
            reconnect_timeout=_RECONNECT_SECONDS,
            show_welcome_message=False,
            binding_refresh_interval=None,
        )
        return app

    def _opening(self, path: str, request: "fastapi.Request", role: Role) -> Opening:
        asked = request.query_params.multi_items()
        link = ""
        if self._tokens is not None:
            link = f"{str(request.base_url).rstrip('/')}{path}?{urlencode([*asked, ('token', self._tokens.view)])}"
        return Opening(role, link, asked)

    def _build_chosen(self, chosen: ChosenRuns, place: Place, opening: Opening) -> None:
        asked = list(dict.fromkeys(value for name, value in opening.asked if name == "run"))
        baseline = Comparison.from_query(opening.asked).baseline
        names = asked[:MOST_COMPARED]
        if baseline is not None and baseline not in names:
            names = [*names[: MOST_COMPARED - 1], baseline]
        known = [name for name in names if place.has(name)]
        runs, leave = chosen.open(known)
        ui.context.client.on_delete(leave)
        problems = [f"There is no run {one_line(name[:_LONGEST])!r} now." for name in names if name not in known]
        if len(asked) > MOST_COMPARED:
            problems.append(f"The first {MOST_COMPARED} of {len(asked):,} runs are shown.")
        Page(runs, opening, self._home, problems).build()


def _listen(listening: Listening) -> socket.socket:
    family = socket.AF_INET6 if ":" in listening.host else socket.AF_INET
    first = FIRST_PORT if listening.port is None else listening.port
    last = min(first + _PORTS_TRIED - 1, 65_535) if listening.port is None else first
    for port in range(first, last + 1):
        try:
            return socket.create_server((listening.host, port), family=family, backlog=128)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or (port == last and listening.port is not None):
                raise ConfigurationError(_cannot_listen(listening, port, error)) from None
    raise ConfigurationError(f"the ports {first} to {last} of {listening.host} are in use: choose another one")


def _cannot_listen(listening: Listening, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        free = listening.option("port", str(port + 1 if port + 1 < 1 << 16 else FIRST_PORT))
        return (
            f"port {port} of {listening.host} is in use, by another dashboard perhaps: choose another with {free}, or "
            "leave it out to have a free one found"
        )
    why = error.strerror or error
    return (
        f"cannot listen at {listening.host} port {port}: {why}; use an address of this machine, and a port from 1024 on"
    )
