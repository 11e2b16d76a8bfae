"""Places whose runs pages show together, and all of their runs as one table."""

import os
import threading
from collections.abc import Sequence

import msgspec

from offloop.bus.errors import RunNotFoundError
from offloop.bus.index.entry import RunEntry
from offloop.bus.index.table import RunTable
from offloop.consumers.dashboard.view.library import RunLibrary
from offloop.consumers.runner.places import FolderRuns, FoundRun, NatsRuns, Place

KEEP_SECONDS = 30.0  # seconds to keep following a run after its last browser left: pages are reloaded


def places_of(folders: Sequence[str], stream: str | None) -> list[Place]:
    by_path = dict(zip(map(os.path.realpath, folders), folders, strict=True))
    places: list[Place] = [FolderRuns(folder) for folder in by_path.values()]
    if stream is not None:
        places.append(NatsRuns(stream))
    return places or [FolderRuns()]


class Places:
    """Several places together. A run is known by its name in one place, by ``PLACE/NAME`` in several."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._by_label = dict(zip(_labels(places), places, strict=True)) if len(places) > 1 else {"": places[0]}

    def items(self) -> Sequence[tuple[str, Place]]:
        """Return each place with the prefix of its runs; empty for one place."""
        return tuple(self._by_label.items())

    def split(self, key: str) -> tuple[str, str]:
        label, _, name = ("", "", key) if "" in self._by_label else key.rpartition("/")
        return label, name

    def is_elsewhere(self, key: str) -> bool:
        place = self._by_label.get(self.split(key)[0])
        return place is not None and place.is_elsewhere

    def has(self, key: str) -> bool:
        """Return True if the run may exist; NATS servers are not asked."""
        label, name = self.split(key)
        place = self._by_label.get(label)
        return place is not None and place.has(name)

    def find(self, key: str) -> FoundRun:
        """Find a run, in no other folder. Raises RunNotFoundError, RunDirectoryError or BrokerError."""
        label, name = self.split(key)
        if label not in self._by_label or not self._by_label[label].has(name):
            raise RunNotFoundError(f"there is no run {key!r}", run=key)
        return self._by_label[label].find(name)


def _labels(places: Sequence[Place]) -> list[str]:
    parts = [[place.label] if place.is_elsewhere else place.label.split("/") for place in places]
    return ["/".join(_unique_end(own, parts)) for own in parts]


def _unique_end(own: list[str], parts: Sequence[list[str]]) -> list[str]:
    ends = (own[-count:] for count in range(1, len(own) + 1))
    return next((end for end in ends if sum(one[-len(end) :] == end for one in parts) == 1), own)


class AllRuns:
    """Every run of some places as one table, read while a page shows it, and for some seconds more."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._viewers = 0
        self._leaving: threading.Timer | None = None
        self._libraries: dict[str, RunLibrary] = {}
        self._keyed: dict[str, tuple[RunTable, dict[str, tuple[RunEntry, RunEntry]]]] = {}
        """Place to the table merged last, and its entries with their renamed copies."""
        self._merged = RunTable({})

    @property
    def name(self) -> str:
        return ", ".join(place.in_words for _, place in self._places.items())

    @property
    def has_several(self) -> bool:
        return len(self._places.items()) > 1

    @property
    def table(self) -> RunTable:
        with self._lock:
            libraries = self._libraries
            if not self.has_several:
                return next((library.table for library in libraries.values()), self._merged)
            tables = {label: library.table for label, library in libraries.items()}
            if any(label not in self._keyed or self._keyed[label][0] is not table for label, table in tables.items()):
                entries: dict[str, RunEntry] = {}
                for label, table in tables.items():
                    known = self._keyed[label][1] if label in self._keyed else {}
                    keyed = {name: _keyed(label, entry, known.get(name)) for name, entry in table.entries.items()}
                    self._keyed[label] = table, keyed
                    entries.update((named.run, named) for _, named in keyed.values())
                self._merged = RunTable(entries, self._merged)
            return self._merged

    @property
    def waiting(self) -> int | None:
        known = [library.waiting for library in self._libraries.values() if library.waiting is not None]
        return sum(known) if known else None

    @property
    def problems(self) -> list[str]:
        return [library.problem for library in self._libraries.values() if library.problem]

    def is_elsewhere(self, run: str) -> bool:
        return self._places.is_elsewhere(run)

    def open(self) -> None:
        with self._lock:
            self._viewers += 1
            if self._leaving is not None:
                self._leaving.cancel()
                self._leaving = None
            if not self._libraries:
                for label, place in self._places.items():
                    library = RunLibrary(place)
                    library.start()
                    self._libraries[label] = library

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

    def library_of(self, run: str) -> tuple[RunLibrary, str]:
        label, name = self._places.split(run)
        with self._lock:
            library = self._libraries.get(label)
        if library is None:
            raise RunNotFoundError(f"run {run!r} no longer exists", run=run)
        return library, name

    def _leave(self) -> None:
        with self._lock:
            if self._viewers:
                return
            libraries = list(self._libraries.values())
            self._libraries, self._keyed, self._merged = {}, {}, RunTable({})
        for library in libraries:
            library.stop()


def _keyed(label: str, entry: RunEntry, known: tuple[RunEntry, RunEntry] | None) -> tuple[RunEntry, RunEntry]:
    if known is not None and known[0] is entry:
        return known
    return entry, msgspec.structs.replace(entry, run=f"{label}/{entry.run}")
