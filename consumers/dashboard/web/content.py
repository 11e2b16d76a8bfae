"""Addresses of the server for what is too much to be sent with a page: images, and files of a run.

The gate in front of the server admits those who may see the page; a run is named by a key that only its pages have.
"""

import os
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import quote

from offloop.consumers.api.images import as_png
from offloop.consumers.dashboard.view.tap import MonitoredRun
from offloop.consumers.dashboard.web.run_folder import open_in

if TYPE_CHECKING:
    from fastapi import FastAPI, Response

PATH = "/run-content"
"""Where addresses of this module begin."""

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".gif", ".webp")
"""Of files that are shown as images."""
TEXT_ENDINGS = (".csv", ".json", ".jsonl", ".log", ".md", ".txt", ".yaml", ".yml", ".tsv", ".toml")
"""Of files that are shown as plain texts."""

_IMAGES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}
_ANYTHING = "application/octet-stream"
_BYTES_AT_ONCE = 1 << 18
_AN_HOUR = {"cache-control": "private, max-age=3600"}
_served: "weakref.WeakValueDictionary[str, MonitoredRun]" = weakref.WeakValueDictionary()


def key_of(run: MonitoredRun) -> str:
    """The name of a run in addresses."""
    _served[run.key] = run
    return run.key


def served(key: str) -> MonitoredRun | None:
    """The run of that key, as long as a page shows it."""
    return _served.get(key)


def address_of(run: MonitoredRun, what: str) -> str:
    """Where a browser finds something of a run: ``image`` or ``file``."""
    return f"{PATH}/{quote(key_of(run))}/{what}"


def add_routes(app: "FastAPI") -> None:
    """Has a server answer at those addresses."""
    from fastapi import Response

    # Not as coroutines: each is answered in a thread, and the pages of others go on.
    @app.get(f"{PATH}/{{key}}/image")
    def image(key: str, name: str, step: int, place: int = 0) -> Response:
        return _image(key, name, step, place)

    @app.get(f"{PATH}/{{key}}/file")
    def file(key: str, path: str, show: bool = False) -> Response:
        return _file(key, path, show)


def _image(key: str, name: str, step: int, place: int) -> "Response":
    from fastapi import Response

    run = _served.get(key)
    found = None if run is None else run.view.images.at(name, step)
    # Another step than the one that was asked for would be kept by the browser under its name.
    if found is None or found.step != step or not 0 <= place < len(found.pixels):
        return Response(status_code=404)
    return Response(as_png(found.pixels[place]), media_type="image/png", headers=_AN_HOUR)


def _file(key: str, path: str, show: bool) -> "Response":
    from fastapi import Response
    from fastapi.responses import StreamingResponse

    run = _served.get(key)
    try:
        if run is None or run.run_dir is None:
            return Response(status_code=404)
        opened = os.fdopen(open_in(run.run_dir, path), "rb")
    except (OSError, ValueError):
        return Response(status_code=404)
    size, name = os.fstat(opened.fileno()).st_size, path.lower()
    kind = _image_kind(opened) if name.endswith(IMAGE_ENDINGS) else _ANYTHING
    if show and name.endswith(TEXT_ENDINGS):
        kind = "text/plain; charset=utf-8"
    # Never as a page: whatever a run has written is a download, an image, or plain text.
    placing = "inline" if show and kind != _ANYTHING else "attachment"
    headers = {
        "content-disposition": f"{placing}; filename*=UTF-8''{quote(path.rpartition('/')[2], safe='')}",
        "content-length": str(size),
        "cache-control": "no-store",
    }
    return StreamingResponse(_parts(opened, size), media_type=kind, headers=headers)


def _image_kind(file: BinaryIO) -> str:
    begin = os.pread(file.fileno(), 16, 0)
    return next((kind for magic, kind in _IMAGES.items() if begin.startswith(magic)), _ANYTHING)


def _parts(file: BinaryIO, left: int) -> Iterator[bytes]:
    with file:
        while left and (part := file.read(min(left, _BYTES_AT_ONCE))):
            left -= len(part)
            yield part
