"""A web server on this machine that keeps what is posted to it, as Apprise's ``json://`` sends it."""

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """Answers with the given status codes, then with 200; keeps each accepted message."""

    def __init__(self, codes: Sequence[int] = ()) -> None:
        self.got: list[dict[str, Any]] = []
        self.refused = 0
        left = list(codes)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:
                message = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
                code = left.pop(0) if left else 200
                if code == 200:
                    self.got.append(message)
                else:
                    self.refused += 1
                handler.send_response(code)
                handler.end_headers()

            def log_message(handler, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.port = self._server.server_port

    @property
    def url(self) -> str:
        return f"json://127.0.0.1:{self.port}"

    @property
    def titles(self) -> list[str]:
        return sorted(message["title"] for message in self.got)

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
