"""The values of a chart as a file: all that is known of them, at full resolution."""

import asyncio
import csv
import io
import itertools
import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from offloop.bus.printing import one_line
from offloop.consumers.dashboard.view.history import Part
from offloop.consumers.dashboard.view.phases import PHASES
from offloop.consumers.dashboard.view.tap import MonitoredRun, labels_of
from offloop.consumers.dashboard.web.charts import PHASES_PREFIX
from offloop.consumers.dashboard.web.content import PATH, served

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

COLUMNS = ("run", "batch", "sample", "epoch", "time", "value")

_ROWS_AT_ONCE = 4096
_READING_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_LONGEST_NAME = 100
_DECIMALS = 6


def add_export(app: "FastAPI") -> None:
    """Has a server answer with the values of a ``chart``: of phases those of a ``rank``. Each ``run`` is a key of
    :func:`~offloop.consumers.dashboard.web.content.key_of`."""
    from starlette.requests import Request

    async def export(request: Request) -> "Response":
        return await _answer(request)

    app.add_route(f"{PATH}/csv", export, methods=["GET"])


async def _answer(request: "Request") -> "Response":
    from starlette.responses import PlainTextResponse, StreamingResponse

    asked = request.query_params
    chart, rank = asked.get("chart", ""), asked.get("rank", "")
    rank_number = int(rank) if rank.isdecimal() else 0
    found = [run for key in asked.getlist("run") if (run := served(key)) is not None]
    runs = [run for run in found if has_chart(run, chart, rank_number)]
    if not runs:
        return PlainTextResponse("there is no such chart, or its page is no longer open", 404)
    patience = time.monotonic() + _READING_SECONDS
    while any(run.view.is_loading for run in runs):
        if time.monotonic() >= patience:
            return PlainTextResponse("the history of the run is still being read: try again", 503)
        await asyncio.sleep(_LOOK_SECONDS)
    disposition = f'attachment; filename="{file_name(labels_of(runs), chart)}.csv"'
    headers = {"content-disposition": disposition, "cache-control": "no-store"}
    lines = csv_lines(runs, chart, rank_number)
    return StreamingResponse(lines, media_type="text/csv; charset=utf-8", headers=headers)


def has_chart(run: MonitoredRun, chart: str, rank: int = 0) -> bool:
    """Whether a run has values in that chart."""
    return chart in run.view.names() or (chart == PHASES_PREFIX and rank in run.view.phase_ranks)


def file_name(labels: Sequence[str], chart: str) -> str:
    """A file name of the run, or of the number of runs, and the chart."""
    runs = labels[0] if len(labels) == 1 else f"{len(labels)}-runs"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{runs}-{chart}").strip("-.")[:_LONGEST_NAME] or "chart"


def csv_lines(runs: Sequence[MonitoredRun], chart: str, rank: int = 0) -> Iterator[bytes]:
    """The lines of the file, many at a time: a metric in :data:`COLUMNS`, with times in seconds since the run's start;
    phases of the first run in seconds with a column each."""
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


def _phase_lines(run: MonitoredRun, rank: int) -> Iterator[bytes]:
    (label,) = map(one_line, labels_of([run]))
    yield _lines([("run", "batch", *PHASES)])
    for view, low, high in _parts(run, PHASES_PREFIX, rank):
        phases = view.phases(rank)
        rows = zip(phases.batches.tolist(), *(column.tolist() for column in phases.seconds.values()), strict=True)
        kept = (row for row in rows if low <= row[0] < high)
        while part := list(itertools.islice(kept, _ROWS_AT_ONCE)):
            yield _lines((label, *map(_number, row)) for row in part)


def _parts(run: MonitoredRun, chart: str, rank: int) -> Iterable[Part]:
    """All of the run, of which the recording has more than the view, part by part."""
    if run.history is None or not (chart == PHASES_PREFIX or run.history.has(chart)):
        return [Part(run.view, -math.inf, math.inf)]
    return run.history.parts(rank)


def _number(value: float) -> str:
    return str(int(value)) if value == value // 1 and abs(value) < 1 << 53 else repr(value)


def _lines(rows: "Iterator[Sequence[str]] | Sequence[Sequence[str]]") -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
