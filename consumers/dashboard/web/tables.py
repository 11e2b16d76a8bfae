"""The panels of a training's own tables and spans, and the addresses of their data."""

import secrets
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from offloop.bus.errors import ConfigurationError
from offloop.bus.printing import one_line
from offloop.bus.types.event import CUSTOM, TABLE
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.spans import Spans
from offloop.consumers.dashboard.view.tables import Search, TableStore
from offloop.consumers.dashboard.web.comparison import look_of
from offloop.consumers.dashboard.web.content import PATH
from offloop.consumers.dashboard.web.frames import element_of
from offloop.consumers.dashboard.web.panel import Panel, PanelData

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.responses import Response

_MOST_ROWS = 500  # of one answer
_MOST_SPANS = 5000
_AN_HOUR = {"cache-control": "private, max-age=3600"}


class PageTables:
    """The tables and spans of the runs of a page, and of every other page of the same runs."""

    def __init__(self, runs: Sequence[RunView]) -> None:
        self.runs = runs
        self.key = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._store: TableStore | None = None
        self._spans: dict[int, Spans] = {}
        _shared[self.key] = self

    @classmethod
    def of(cls, runs: Sequence[RunView]) -> "PageTables":
        return next((one for one in _shared.values() if one.runs is runs), None) or cls(runs)

    @property
    def address(self) -> str:
        return f"{PATH}/own/{self.key}"

    @property
    def store(self) -> TableStore:
        """The rows, from the first request on."""
        with self._lock:
            if self._store is None:
                self._store = TableStore(self.runs)
            return self._store

    def spans(self, run: int) -> Spans:
        with self._lock:
            if run not in self._spans:
                self._spans[run] = Spans(self.runs[run])
            return self._spans[run]


_shared: "weakref.WeakValueDictionary[str, PageTables]" = weakref.WeakValueDictionary()


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


def add_table_routes(app: "FastAPI") -> None:
    from fastapi import Response

    @app.get(f"{PATH}/own/{{key}}/tables")
    def tables(key: str, ask: str) -> Response:
        shared = _shared.get(key)
        if shared is None:
            return Response(status_code=404)
        try:
            return _json(answer(shared.store, msgspec.json.decode(ask, type=TablesAsk)))
        except (msgspec.DecodeError, RecursionError, OverflowError, ConfigurationError) as error:
            return Response(str(error), status_code=400, media_type="text/plain")

    @app.get(f"{PATH}/own/{{key}}/image")
    def image(key: str, run: int, hash: str) -> Response:
        shared = _shared.get(key)
        found = None if shared is None else shared.store.image(run, hash)
        if found is None:
            return Response(status_code=404)
        return Response(found[0], media_type=found[1], headers=_AN_HOUR)

    @app.get(f"{PATH}/own/{{key}}/spans")
    def spans(key: str, run: int, after: int = 0) -> Response:
        shared = _shared.get(key)
        if shared is None or not 0 <= run < len(shared.runs):
            return Response(status_code=404)
        found = shared.spans(run)
        found.events.look()
        return _json({"spans": found.after(after, _MOST_SPANS), "problem": found.events.problem or ""})


def _json(value: Any) -> "Response":
    from fastapi import Response

    return Response(msgspec.json.encode(value), media_type="application/json", headers={"cache-control": "no-store"})


class OwnPanel(Panel):
    """Tables, or spans: a script that asks for its data while it is on the screen. ``kind`` begins names of events."""

    def __init__(self, title: str, icon: str, kind: str, tables: PageTables) -> None:
        # Opening spans requests them of a live run.
        super().__init__(title, icon, is_open=kind == TABLE)
        self._kind = kind
        self._tables = tables
        with self.box:
            self._element = element_of(title.lower())
        self._element.props["address"] = tables.address

    def update(self, shown: PanelData) -> None:
        self.show(any(map(self._has_own, shown.runs)))
        count = len(shown.labels)
        runs = [[one_line(label), look_of(number, count)[0]] for number, label in enumerate(shown.labels)]
        if runs != self._element.props.get("runs"):
            self._element.props["runs"] = runs
            self._element.update()

    def _has_own(self, run: RunView) -> bool:
        # Of a run elsewhere it is known only once it is read.
        is_elsewhere = run.stream is not None and run.stream.recording is None
        may_come = self._kind == CUSTOM and run.status in ("live", "paused")
        return is_elsewhere or may_come or any(name.startswith(self._kind) for name in run.own)
