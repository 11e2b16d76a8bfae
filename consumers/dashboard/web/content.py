"""Addresses for images and files, which are too large for a page.

The gate of the server admits only those who may see the page; a run is named by a key that only its pages have."""

import weakref
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec

from offloop.bus.runs.flight import open_shown
from offloop.consumers.api.images import as_png
from offloop.consumers.api.optional import fastapi
from offloop.consumers.dashboard.view.run_view import RunView

PATH = "/run-content"  # prefix of the addresses of this module

AN_HOUR = {"cache-control": "private, max-age=3600"}
_served: "weakref.WeakValueDictionary[str, RunView]" = weakref.WeakValueDictionary()


def key_of(run: RunView) -> str:
    """Register a run, and return its key for addresses."""
    _served[run.key] = run
    return run.key


def run_of(key: str) -> RunView | None:
    return _served.get(key)


def address_of(run: RunView, what: str) -> str:
    return f"{PATH}/{quote(key_of(run))}/{what}"


def as_json(value: Any) -> "fastapi.Response":
    """Return a response that browsers do not keep."""
    headers = {"cache-control": "no-store"}
    return fastapi.Response(msgspec.json.encode(value), media_type="application/json", headers=headers)


def add_routes(app: "fastapi.FastAPI") -> None:
    # Not coroutines: each is answered in a thread, so that pages continue.
    @app.get(f"{PATH}/{{key}}/image")
    def image(key: str, name: str, step: int, place: int = 0) -> fastapi.Response:
        run = _served.get(key)
        found = None if run is None else run.images.at(name, step)
        # The browser would cache another step under the name of this one.
        if found is None or found.step != step or not 0 <= place < len(found.pixels):
            return fastapi.Response(status_code=404)
        return fastapi.Response(as_png(found.pixels[place]), media_type="image/png", headers=AN_HOUR)

    @app.get(f"{PATH}/{{key}}/file/{{name}}")
    def file(key: str, name: str) -> fastapi.Response:
        from fastapi.responses import StreamingResponse

        run = _served.get(key)
        opened = None if run is None or run.run_dir is None else open_shown(run.run_dir, name)
        if opened is None:
            return fastapi.Response(status_code=404)
        # Not the browser's guess: a file has names of the user's in it.
        kind = "text/plain" if name.endswith(".txt") else "application/gzip"
        headers = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
        return StreamingResponse(iter(partial(opened.read, 1 << 16), b""), media_type=kind, headers=headers)
