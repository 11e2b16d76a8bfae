"""The panels of a training's own tables and spans, and the addresses of their data."""

from collections.abc import Sequence
from typing import Any

import msgspec

from offloop.bus.errors import ConfigurationError
from offloop.bus.printing import one_line
from offloop.bus.types.event import CUSTOM, TABLE
from offloop.consumers.api.optional import fastapi
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.spans import Spans
from offloop.consumers.dashboard.view.tables import Search, TableStore
from offloop.consumers.dashboard.web.comparison import look_of
from offloop.consumers.dashboard.web.content import AN_HOUR, PATH, address_of, as_json, run_of
from offloop.consumers.dashboard.web.frames import element_of
from offloop.consumers.dashboard.web.panel import Panel, PanelData

_MOST_ROWS = 500  # of one answer
_MOST_SPANS = 5000


class TablesAsk(msgspec.Struct, frozen=True):
    search: Search | None = None
    first: int = 0
    count: int = 0
    columns: tuple[str, ...] = ()
    distribution: str | None = None
    """A column, of which the found rows are counted."""
    table: str = ""
    row: int | None = None
    beside: tuple[int, str] | None = None
    """A run, and the column in which one of its rows has the same value."""


def answer(store: TableStore, ask: TablesAsk) -> dict[str, Any]:
    """Return the state of the tables, and what is asked of them. Raises ConfigurationError."""
    store.look()
    found: dict[str, Any] = {"state": store.describe()}
    if ask.search is not None and ask.count:
        count = min(ask.count, _MOST_ROWS)
        found["total"], found["rows"] = store.window(ask.search, ask.first, count, ask.columns)
    if ask.search is not None and ask.distribution is not None:
        found["distribution"] = store.distribution(ask.search, ask.distribution)
    if ask.row is not None:
        found["row"] = store.row(ask.table, ask.row)
        other = None if ask.beside is None else store.beside(ask.table, ask.row, ask.beside[1], ask.beside[0])
        found["beside"] = None if other is None else store.row(ask.table, other)
    return found


def add_table_routes(app: "fastapi.FastAPI") -> None:
    """Serve the tables of a page by the key of its first run, and spans by that of theirs."""

    @app.get(f"{PATH}/{{key}}/tables")
    def tables(key: str, ask: str) -> fastapi.Response:
        run = run_of(key)
        if run is None or run.tables is None:
            return fastapi.Response(status_code=404)
        try:
            return as_json(answer(run.tables, msgspec.json.decode(ask, type=TablesAsk)))
        except (msgspec.DecodeError, RecursionError, OverflowError, ConfigurationError) as error:
            return fastapi.Response(str(error), status_code=400, media_type="text/plain")

    @app.get(f"{PATH}/{{key}}/cell")
    def cell(key: str, run: int, image: str) -> fastapi.Response:
        first = run_of(key)
        found = None if first is None or first.tables is None else first.tables.image(run, image)
        if found is None:
            return fastapi.Response(status_code=404)
        return fastapi.Response(found[0], media_type=found[1], headers=AN_HOUR)

    @app.get(f"{PATH}/{{key}}/spans")
    def spans(key: str, after: int = 0) -> fastapi.Response:
        run = run_of(key)
        if run is None or run.spans is None:
            return fastapi.Response(status_code=404)
        run.spans.events.look()
        return as_json({"spans": run.spans.after(after, _MOST_SPANS), "problem": run.spans.events.problem or ""})


class OwnPanel(Panel):
    """Tables, or spans: a script that asks for its data while it is on the screen. ``kind`` begins names of events."""

    def __init__(self, title: str, icon: str, kind: str, runs: Sequence[RunView]) -> None:
        # Opening spans requests them of a live run.
        super().__init__(title, icon, is_open=kind == TABLE)
        self._kind = kind
        self._runs = runs  # the list that grows: pages of the same runs share their tables
        with self.box:
            self._element = element_of(title.lower())

    def update(self, shown: PanelData) -> None:
        self.show(any(map(self._has_own, shown.runs)))
        count = len(shown.labels)
        runs = [
            [
                one_line(label),
                look_of(number, count)[0],
                address_of(run, ""),
                {str(rank): one_line(name) for rank, name in run.actors.copy().items()},
            ]
            for number, (run, label) in enumerate(zip(shown.runs, shown.labels, strict=True))
        ]
        if runs and runs != self._element.props.get("runs"):
            shown.runs[0].tables = shown.runs[0].tables or TableStore(self._runs)
            for run in shown.runs:
                run.spans = run.spans or Spans(run)
            self._element.props["runs"] = runs
            self._element.update()

    def _has_own(self, run: RunView) -> bool:
        # Of a run elsewhere it is known only once it is read.
        is_elsewhere = run.stream is not None and run.stream.recording is None
        may_come = self._kind == CUSTOM and run.status in ("live", "paused")
        return is_elsewhere or may_come or any(name.startswith(self._kind) for name in run.own)
