"""The example of a web application, with a server and a client that speak HTTP."""

import asyncio
import importlib.util
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import uvicorn
from paths import ROOT

from offloop.bus import Event, Publisher


@pytest.fixture
def publisher(runs_dir: object) -> Any:
    with Publisher("r") as publisher:
        yield publisher


@pytest.fixture
async def client(publisher: Publisher) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application for the run ``r``, which is served as the example does."""
    spec = importlib.util.spec_from_file_location("web_metrics", ROOT / "examples" / "web_metrics.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    server = uvicorn.Server(
        uvicorn.Config(example.application("r"), port=0, log_level="warning", timeout_graceful_shutdown=1)
    )
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(100):
        while not server.started:
            await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=100) as made:
        yield made
    server.should_exit = True
    await asyncio.wait_for(serving, 100)


async def events_of(response: httpx.Response) -> AsyncIterator[dict[str, str]]:
    """The server-sent events of a response."""
    event: dict[str, str] = {}
    async for line in response.aiter_lines():
        if line:
            name, _, value = line.partition(": ")
            event[name] = value
        else:
            yield event
            event = {}


async def test_a_client_gets_the_newest_values_follows_the_run_and_continues_where_it_was(
    publisher: Publisher, client: httpx.AsyncClient
) -> None:
    for batch, loss in enumerate((0.5, math.nan), 1):
        publisher.publish(Event.BATCH_END, batch=batch, loss=loss)
    publisher.poll()
    async with asyncio.timeout(100):
        while (newest := (await client.get("/")).json()).get("batch") != 2:
            await asyncio.sleep(0.01)
    assert newest == {"epoch": 0, "batch": 2, "loss": "nan"}
    async with client.stream("GET", "/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = events_of(response)
        seen = [await anext(events), await anext(events)]
        publisher.publish(Event.BATCH_END, batch=3, loss=0.125)
        publisher.poll()
        seen.append(await anext(events))
    assert [json.loads(event["data"])["loss"] for event in seen] == [0.5, "nan", 0.125]
    await asyncio.to_thread(publisher.close)
    async with client.stream("GET", "/stream", headers={"Last-Event-ID": seen[1]["id"]}) as response:
        rest = [event async for event in events_of(response)]
    assert json.loads(rest[0]["data"]) == {"epoch": 0, "batch": 3, "loss": 0.125}
    assert rest[1:] == [{"event": "ending", "data": '"finished"'}]
