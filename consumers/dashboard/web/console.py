"""The panel with the console output of runs, and the address of its text."""

from typing import TYPE_CHECKING

import msgspec

from offloop.bus.printing import escape, one_line
from offloop.bus.runs.console import Place, console_path, read_console
from offloop.consumers.dashboard.web.content import PATH, address_of, run_of
from offloop.consumers.dashboard.web.frames import element_of
from offloop.consumers.dashboard.web.panel import Panel, PanelData

if TYPE_CHECKING:
    from fastapi import FastAPI

_MOST_BYTES = 256 * 1024  # of one answer


def add_console_routes(app: "FastAPI") -> None:
    from fastapi import Response

    @app.get(f"{PATH}/{{key}}/console")
    def console(key: str, rank: int, after: str = "", before: str = "") -> Response:
        run = run_of(key)
        try:
            part = None
            if run is not None and run.run_dir is not None:
                path = console_path(run.run_dir, run.attempt, rank)
                part = read_console(path, _place(after), _place(before), _MOST_BYTES)
        except (OSError, ValueError):
            part = None
        if part is None:
            return Response(status_code=404)
        texts = {name: escape_lines(getattr(part, name)) for name in ("settled", "rest")}
        # Texts: a script has no numbers of that size.
        places = {name: "{}-{}".format(*getattr(part, name)) for name in ("begin", "end")}
        found = {**texts, **places, "isNext": part.is_next, "isFirst": part.is_first}
        headers = {"cache-control": "no-store"}
        return Response(msgspec.json.encode(found), media_type="application/json", headers=headers)


def _place(text: str) -> Place | None:
    piece, _, offset = text.partition("-")
    return Place(int(piece), int(offset)) if text else None


def escape_lines(text: str) -> str:
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
