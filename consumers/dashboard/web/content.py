"""Addresses of the server for what is too much to be sent with a page: images, and files of a run.

The gate in front of the server admits those who may see the page; a run is named by a key that only its pages have.
"""

import weakref
from typing import TYPE_CHECKING
from urllib.parse import quote

from consumers.api.images import as_png
from consumers.dashboard.view.tap import MonitoredRun

if TYPE_CHECKING:
    from fastapi import FastAPI, Response

_PATH = "/run-content"
_AN_HOUR = {"cache-control": "private, max-age=3600"}
_served: "weakref.WeakValueDictionary[str, MonitoredRun]" = weakref.WeakValueDictionary()


def address_of(run: MonitoredRun, what: str) -> str:
    """Where a browser finds something of a run: ``image`` or ``file``."""
    _served[run.key] = run
    return f"{_PATH}/{quote(run.key)}/{what}"


def add_routes(app: "FastAPI") -> None:
    """Has a server answer at those addresses."""
    from fastapi import Response

    # Not as coroutines: each is answered in a thread, and the pages of others go on.
    @app.get(f"{_PATH}/{{key}}/image")
    def image(key: str, name: str, step: int, place: int = 0) -> Response:
        return _image(key, name, step, place)


def _image(key: str, name: str, step: int, place: int) -> "Response":
    from fastapi import Response

    run = _served.get(key)
    found = None if run is None else run.view.images.at(name, step)
    # Another step than the one that was asked for would be kept by the browser under its name.
    if found is None or found.step != step or not 0 <= place < len(found.pixels):
        return Response(status_code=404)
    return Response(as_png(found.pixels[place]), media_type="image/png", headers=_AN_HOUR)
