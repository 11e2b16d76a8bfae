"""All runs of a place, polled in a thread, for tables."""

import threading
import time
from pathlib import Path
from typing import Any

from offloop.bus.errors import ConfigurationError, OffloopError, RunNotFoundError
from offloop.bus.index.annotations import annotate
from offloop.bus.index.entry import RunEntry, listed_entry
from offloop.bus.index.index import RunIndex
from offloop.bus.index.manage import remove_run
from offloop.bus.index.table import RunTable
from offloop.bus.runs.directory import runs_dir
from offloop.consumers.runner.places import FolderRuns, Place

_LOOK_SECONDS = 1.0
_READ_SECONDS = 0.3
_RESTS = 10  # looking takes at most one part in this number of a processor, unless there are runs to read
_LEAVE_SECONDS = 5.0


class RunLibrary:
    """Every run of a place, updated about once a second by a thread. For any thread; runs in NATS are read-only."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._index = RunIndex(place.directory) if isinstance(place, FolderRuns) else StreamIndex(place.address)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._leaves = False
        self._thread = threading.Thread(target=self._follow, name="offloop-library", daemon=True)
        self.table: RunTable = RunTable({})  # the current runs; a new table after a change
        self.waiting: int | None = None  # number of unread runs; None before the first look at the place
        self.problem: str | None = None  # why the place cannot be read, or the index not be stored

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._leaves = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(_LEAVE_SECONDS)

    def look(self) -> bool:
        with self._lock:
            try:
                waiting = self._index.refresh(_READ_SECONDS)
                problem = self._index.problem
            except OffloopError as error:
                waiting, problem = 0, str(error)
            entries = self._index.entries
            if entries != self.table.entries:
                self.table = RunTable(entries, self.table)
            self.waiting, self.problem = waiting, problem
        return waiting > 0

    def annotate(self, run: str, **changes: Any) -> None:
        path = self._path(run)
        with self._lock:
            entry = self._known(run)
            said = annotate(path, **changes)
            self.table = RunTable({**self.table.entries, run: entry.annotated(said)}, self.table)
        self._wake.set()

    def remove(self, run: str) -> None:
        """Remove an ended run with its folder.

        Raises RunNotFoundError, RunIsLiveError, RunDirectoryError or ConfigurationError."""
        path = self._path(run)
        with self._lock:
            remove_run(path, self._known(run).id)
            others = {name: entry for name, entry in self.table.entries.items() if name != run}
            self.table = RunTable(others, self.table)
        self._wake.set()

    def _path(self, run: str) -> Path:
        if isinstance(self._place, FolderRuns):
            return runs_dir(self._place.directory) / run
        raise ConfigurationError(
            f"run {run!r} is {self._place}, which is read-only: tag and delete it on its own machine, "
            "with 'offloop ui' there"
        )

    def _known(self, run: str) -> RunEntry:
        entry = self.table.entries.get(run)
        if entry is None:
            raise RunNotFoundError(f"run {run!r} no longer exists", run=run)
        return entry

    def _follow(self) -> None:
        while not self._leaves:
            began = time.monotonic()
            self._wake.clear()
            is_behind = self.look()
            took = time.monotonic() - began
            if not is_behind:
                self._wake.wait(max(_LOOK_SECONDS, _RESTS * took))
        with self._lock:
            self._index.close()


class StreamIndex:
    problem: str | None = None

    def __init__(self, address: str) -> None:
        self._address = address
        self.entries: dict[str, RunEntry] = {}

    def refresh(self, seconds: float) -> int:
        """List the runs. Returns the number of unread runs: 0."""
        from offloop.bus.jetstream.nats_connection import NatsConnection

        try:
            listed = {said.run: listed_entry(said) for said in NatsConnection.at(self._address).runs()}
        except OffloopError as error:
            self.problem = str(error)
        else:
            # RunTable recognises identical entries.
            self.entries = {
                run: before if (before := self.entries.get(run)) == entry else entry for run, entry in listed.items()
            }
            self.problem = None
        return 0

    def close(self) -> None:
        """Do nothing: the connection is the command's."""
