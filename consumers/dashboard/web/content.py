"""Addresses for data that is too large for a page: images, all values of a chart.

The gate of the server admits only those who may see the page; a run is named by a key that only its pages have."""

import csv
import io
import itertools
import math
import re
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from offloop.bus.printing import one_line
from offloop.consumers.api.images import as_png
from offloop.consumers.dashboard.view.history import Part
from offloop.consumers.dashboard.view.phases import PHASES
from offloop.consumers.dashboard.view.run_view import RunView, labels_of
from offloop.consumers.dashboard.web.charts import PHASES_PREFIX

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import QueryParams
    from starlette.responses import Response

PATH = "/run-content"  # prefix of the addresses of this module

_AN_HOUR = {"cache-control": "private, max-age=3600"}
_served: "weakref.WeakValueDictionary[str, RunView]" = weakref.WeakValueDictionary()
COLUMNS = ("run", "batch", "sample", "epoch", "time", "value")

_ROWS_AT_ONCE = 4096
_READING_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_LONGEST_NAME = 100
_DECIMALS = 6


def key_of(run: RunView) -> str:
    """Register a run, and return its key for addresses."""
    _served[run.key] = run
    return run.key


def address_of(run: RunView, what: str) -> str:
    return f"{PATH}/{quote(key_of(run))}/{what}"


def add_routes(app: "FastAPI") -> None:
    from fastapi import Request, Response

    # Not coroutines: each is answered in a thread, so that pages continue.
    @app.get(f"{PATH}/{{key}}/image")
    def image(key: str, name: str, step: int, place: int = 0) -> Response:
        return _image(key, name, step, place)

    @app.get(f"{PATH}/csv")
    def values(request: Request) -> Response:
        return _values(request.query_params)


def _image(key: str, name: str, step: int, place: int) -> "Response":
    from fastapi import Response

    run = _served.get(key)
    found = None if run is None else run.images.at(name, step)
    # The browser would cache another step under the name of this one.
    if found is None or found.step != step or not 0 <= place < len(found.pixels):
        return Response(status_code=404)
    return Response(as_png(found.pixels[place]), media_type="image/png", headers=_AN_HOUR)


def _values(asked: "QueryParams") -> "Response":
    """Return the values of a ``chart``, of phases those of a ``rank``; each ``run`` is a key of :func:`key_of`."""
    from starlette.responses import PlainTextResponse, StreamingResponse

    chart, rank = asked.get("chart", ""), asked.get("rank", "")
    rank_number = int(rank) if rank.isdecimal() else 0
    found = [run for key in asked.getlist("run") if (run := _served.get(key)) is not None]
    runs = [run for run in found if has_chart(run, chart, rank_number)]
    if not runs:
        return PlainTextResponse("there is no such chart, or its page is no longer open", 404)
    patience = time.monotonic() + _READING_SECONDS
    while any(run.is_loading for run in runs):
        if time.monotonic() >= patience:
            return PlainTextResponse("the history of the run is still being read: try again", 503)
        time.sleep(_LOOK_SECONDS)
    disposition = f'attachment; filename="{file_name(labels_of(runs), chart)}.csv"'
    headers = {"content-disposition": disposition, "cache-control": "no-store"}
    lines = csv_lines(runs, chart, rank_number)
    return StreamingResponse(lines, media_type="text/csv; charset=utf-8", headers=headers)


def has_chart(run: RunView, chart: str, rank: int = 0) -> bool:
    return chart in run.names() or (chart == PHASES_PREFIX and rank in run.phase_ranks)


def file_name(labels: Sequence[str], chart: str) -> str:
    runs = labels[0] if len(labels) == 1 else f"{len(labels)}-runs"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{runs}-{chart}").strip("-.")[:_LONGEST_NAME] or "chart"


def csv_lines(runs: Sequence[RunView], chart: str, rank: int = 0) -> Iterator[bytes]:
    """Yield the lines of the file: a metric in :data:`COLUMNS`, phases of the first run with a column each.

    Times are in seconds since the run's start, phases in seconds."""
    if chart == PHASES_PREFIX:
        yield from _phase_lines(runs[0], rank)
        return
    yield _lines([COLUMNS])
    for run, label in zip(runs, map(one_line, labels_of(runs)), strict=True):
        for view, low, high in _parts(run, chart, 0):
            for rows in view.series(chart).chunks(_ROWS_AT_ONCE) if chart in view.names() else ():
                kept = rows[(rows[:, 0] >= low) & (rows[:, 0] < high)]
                # Places are counted, or computed from the time of an event.
                kept[:, :-1] = kept[:, :-1].round(_DECIMALS)
                yield _lines((label, *map(_number, row)) for row in kept.tolist())


def _phase_lines(run: RunView, rank: int) -> Iterator[bytes]:
    (label,) = map(one_line, labels_of([run]))
    yield _lines([("run", "batch", *PHASES)])
    for view, low, high in _parts(run, PHASES_PREFIX, rank):
        phases = view.phases(rank)
        rows = zip(phases.batches.tolist(), *(column.tolist() for column in phases.seconds.values()), strict=True)
        kept = (row for row in rows if low <= row[0] < high)
        while part := list(itertools.islice(kept, _ROWS_AT_ONCE)):
            yield _lines((label, *map(_number, row)) for row in part)


def _parts(run: RunView, chart: str, rank: int) -> Iterable[Part]:
    if run.history is None or not (chart == PHASES_PREFIX or run.history.has(chart)):
        return [Part(run, -math.inf, math.inf)]
    return run.history.parts(rank)


def _number(value: float) -> str:
    return str(int(value)) if value == value // 1 and abs(value) < 1 << 53 else repr(value)


def _lines(rows: "Iterator[Sequence[str]] | Sequence[Sequence[str]]") -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
