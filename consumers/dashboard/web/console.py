"""The panel with the console output of runs, and the address of its text."""

from offloop.bus.printing import escape, one_line
from offloop.bus.runs.console import console_path, read_console
from offloop.consumers.api.optional import fastapi
from offloop.consumers.dashboard.web.content import PATH, address_of, as_json, run_of
from offloop.consumers.dashboard.web.frames import element_of
from offloop.consumers.dashboard.web.panel import Panel, PanelData

_MOST_BYTES = 256 * 1024  # of one answer


def add_console_routes(app: "fastapi.FastAPI") -> None:
    @app.get(f"{PATH}/{{key}}/console")
    def console(key: str, rank: int, after: int = 0, before: int | None = None) -> fastapi.Response:
        run = run_of(key)
        if run is None or run.run_dir is None:
            return fastapi.Response(status_code=404)
        try:
            part = read_console(console_path(run.run_dir, run.attempt, rank), after, before, _MOST_BYTES)
        except OSError:
            return fastapi.Response(status_code=404)
        found = part._asdict() | {"settled": escape_lines(part.settled), "rest": escape_lines(part.rest)}
        return as_json(found)


def escape_lines(text: str) -> str:
    """Escape all but line breaks."""
    return "\n".join(escape(line.expandtabs()) for line in text.split("\n"))


class ConsolePanel(Panel):
    def __init__(self) -> None:
        super().__init__("Console", "terminal", is_open=True)
        with self.box:
            self._element = element_of("console")

    def update(self, shown: PanelData) -> None:
        runs = [
            [one_line(label), address_of(run, "console"), run.console_ranks]
            for run, label in zip(shown.runs, shown.labels, strict=True)
            if run.console_ranks
        ]
        self.show(bool(runs))
        if runs != self._element.props.get("runs"):
            self._element.props["runs"] = runs
            self._element.update()
