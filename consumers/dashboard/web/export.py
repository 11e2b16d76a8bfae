"""The values of a chart as a file: everything that is known of them, at full resolution."""

import asyncio
import csv
import io
import itertools
import math
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from offloop.bus.printing import one_line
from offloop.consumers.dashboard.view.history import History, Part
from offloop.consumers.dashboard.view.phases import PHASES
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.web.charts import PHASES_PREFIX

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

PATH = "/export"
"""Where files are fetched: with the key of a page behind it, and the chart's name as ``chart``, of phases with the rank
behind it."""

COLUMNS = ("run", "batch", "sample", "epoch", "time", "value")

_KEY_BYTES = 16
_ROWS_AT_ONCE = 4096
_READING_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_LONGEST_NAME = 100
_DECIMALS = 6
"""Of places: they are counted, or computed from the time of an event."""


class ChartedRun(NamedTuple):
    """A run that a chart shows."""

    number: int
    label: str
    view: RunView
    history: History | None = None

    def parts(self, chart: str) -> Iterable[Part]:
        """All of the run, of which the recording has more than the view, part by part."""
        if self.history is None or not (chart.startswith(PHASES_PREFIX) or self.history.has(chart)):
            return [Part(self.view, -math.inf, math.inf)]
        return self.history.parts(_phases_rank(self, chart) or 0)


Offer: TypeAlias = Callable[[], Sequence[ChartedRun]]
"""The runs that a page shows at the moment."""


class Exports:
    """What the pages that are open offer, each by a key that only it knows."""

    def __init__(self) -> None:
        self._offers: dict[str, Offer] = {}

    def add(self, offer: Offer) -> str:
        """Takes a page in; returns its key."""
        key = secrets.token_urlsafe(_KEY_BYTES)
        self._offers[key] = offer
        return key

    def remove(self, key: str) -> None:
        """Forgets a page that was closed."""
        self._offers.pop(key, None)

    def serve(self, app: "FastAPI") -> None:
        """Has the application answer at :data:`PATH`."""
        from starlette.requests import Request

        async def export(request: Request) -> "Response":
            return await self._answer(request)

        app.add_route(f"{PATH}/{{key}}", export, methods=["GET"])

    async def _answer(self, request: "Request") -> "Response":
        from starlette.responses import PlainTextResponse, StreamingResponse

        offer = self._offers.get(request.path_params["key"])
        if offer is None:
            return PlainTextResponse("this page is no longer open: load it again", 404)
        chart = request.query_params.get("chart", "")
        runs = [run for run in offer() if has_chart(run, chart)]
        if not runs:
            return PlainTextResponse(f"there is no chart {one_line(chart[:_LONGEST_NAME])!r}", 404)
        patience = time.monotonic() + _READING_SECONDS
        while any(run.view.is_loading for run in runs):
            if time.monotonic() >= patience:
                return PlainTextResponse("the history of the run is still being read: try again", 503)
            await asyncio.sleep(_LOOK_SECONDS)
        disposition = f'attachment; filename="{file_name([run.label for run in runs], chart)}.csv"'
        headers = {"content-disposition": disposition, "cache-control": "no-store"}
        return StreamingResponse(csv_lines(runs, chart), media_type="text/csv; charset=utf-8", headers=headers)


def has_chart(run: ChartedRun, chart: str) -> bool:
    """Whether a run has something in that chart."""
    return chart in run.view.names() or _phases_rank(run, chart) is not None


def file_name(labels: Sequence[str], chart: str) -> str:
    """Names a file by the run, or by how many there are, and the chart."""
    runs = labels[0] if len(labels) == 1 else f"{len(labels)}-runs"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{runs}-{chart}").strip("-.")[:_LONGEST_NAME] or "chart"


def csv_lines(runs: Sequence[ChartedRun], chart: str) -> Iterator[bytes]:
    """The lines of the file, many at a time: a metric in :data:`COLUMNS`, with times in seconds since the run's start;
    phases in seconds with a column each."""
    if (rank := _phases_rank(runs[0], chart)) is not None:
        yield from _phase_lines(runs[0], chart, rank)
        return
    yield _lines([COLUMNS])
    for run in runs:
        label = one_line(run.label)
        for view, low, high in run.parts(chart):
            for rows in view.series(chart).chunks(_ROWS_AT_ONCE) if chart in view.names() else ():
                kept = rows[(rows[:, 0] >= low) & (rows[:, 0] < high)]
                kept[:, :-1] = kept[:, :-1].round(_DECIMALS)
                yield _lines((label, *map(_number, row)) for row in kept.tolist())


def _phases_rank(run: ChartedRun, chart: str) -> int | None:
    ranks = run.view.phase_ranks
    return next((rank for rank in ranks if chart == f"{PHASES_PREFIX}/{run.number}/{rank}"), None)


def _phase_lines(run: ChartedRun, chart: str, rank: int) -> Iterator[bytes]:
    label = one_line(run.label)
    yield _lines([("run", "batch", *PHASES)])
    for view, low, high in run.parts(chart):
        phases = view.phases(rank)
        rows = zip(phases.batches.tolist(), *(column.tolist() for column in phases.seconds.values()), strict=True)
        kept = (row for row in rows if low <= row[0] < high)
        while part := list(itertools.islice(kept, _ROWS_AT_ONCE)):
            yield _lines((label, *map(_number, row)) for row in part)


def _number(value: float) -> str:
    return str(int(value)) if value == value // 1 and abs(value) < 1 << 53 else repr(value)


def _lines(rows: "Iterator[Sequence[str]] | Sequence[Sequence[str]]") -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
