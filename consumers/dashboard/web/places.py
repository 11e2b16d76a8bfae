"""All runs of a place as one table."""

import threading

from offloop.consumers.dashboard.view.library import RunLibrary
from offloop.consumers.runner.places import Place

KEEP_SECONDS = 30.0  # seconds to keep following a run after its last browser left: pages are reloaded


class AllRuns:
    """Every run of a place, read while a page shows it, and for some seconds more."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._lock = threading.Lock()
        self._viewers = 0
        self._leaving: threading.Timer | None = None
        self.library: RunLibrary = RunLibrary(place)
        self._is_read = False

    def open(self) -> None:
        with self._lock:
            self._viewers += 1
            if self._leaving is not None:
                self._leaving.cancel()
                self._leaving = None
            if not self._is_read:
                self._is_read = True
                self.library.start()

    def close(self) -> None:
        with self._lock:
            self._viewers -= 1
            if not self._viewers:
                self._leaving = threading.Timer(KEEP_SECONDS, self._leave)
                self._leaving.daemon = True
                self._leaving.start()

    def stop(self) -> None:
        with self._lock:
            if self._leaving is not None:
                self._leaving.cancel()
            self._viewers = 0
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            if self._viewers:
                return
            library, self.library, self._is_read = self.library, RunLibrary(self.place), False
        library.stop()
