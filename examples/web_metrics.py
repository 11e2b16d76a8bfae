"""A small web application that serves a run's metrics, from its first batch on and live.

    pip install 'offloop[dashboard]'        # brings Starlette and uvicorn
    python examples/web_metrics.py RUN
    curl http://127.0.0.1:8000/             # the newest values
    curl -N http://127.0.0.1:8000/stream    # one server-sent event for each batch

In a browser, `new EventSource("/stream")` reconnects by itself and continues after the last event that it has received.
"""

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from offloop import Event, Subscriber
from offloop.bus import Snapshot


def application(run: str) -> Starlette:
    """Make the web application of a run, by its name or directory."""
    newest: dict[str, object] = {}

    async def show_newest(request: Request) -> Response:
        return JSONResponse(newest)

    async def stream(request: Request) -> Response:
        after = position_of(request.headers.get("last-event-id", ""))
        return StreamingResponse(server_sent_events(run, after), media_type="text/event-stream")

    async def follow(snapshots: Subscriber) -> None:
        async for snapshot in snapshots:
            newest.update(metrics_of(snapshot))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with Subscriber(run, events=[Event.BATCH_END]) as snapshots:
            following = asyncio.create_task(follow(snapshots))
            yield
            following.cancel()

    return Starlette(routes=[Route("/", show_newest), Route("/stream", stream)], lifespan=lifespan)


async def server_sent_events(run: str, after: dict[int, tuple[int, int]]) -> AsyncIterator[str]:
    """Yield each batch's metrics, then the ending of the run. A client that leaves cancels it."""
    async with Subscriber(run, events=[Event.BATCH_END], after=after) as snapshots:
        async for snapshot in snapshots:
            if snapshot.rank == 0:
                yield f"id: {snapshot.seq}-{snapshot.base_seq}\ndata: {json.dumps(metrics_of(snapshot))}\n\n"
        yield f"event: ending\ndata: {json.dumps(str(snapshots.ending))}\n\n"


def position_of(event_id: str) -> dict[int, tuple[int, int]]:
    """Return the position after the last event that a client has received."""
    seq, _, base_seq = event_id.partition("-")
    return {0: (int(seq), int(base_seq))} if seq.isdecimal() and base_seq.isdecimal() else {}


def metrics_of(snapshot: Snapshot) -> dict[str, object]:
    """Return the loss and the counters. JSON has no number for infinity and NaN."""
    loss, timestamp = snapshot.loss, snapshot.timestamp
    is_number = loss is None or math.isfinite(loss)
    return {"epoch": int(timestamp.epoch), "batch": int(timestamp.batch), "loss": loss if is_number else str(loss)}


if __name__ == "__main__":
    uvicorn.run(application(sys.argv[1]), host="127.0.0.1", port=8000, timeout_graceful_shutdown=1)
