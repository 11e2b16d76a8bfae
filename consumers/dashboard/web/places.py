"""Places whose runs pages show together."""

import os
from collections.abc import Sequence

from offloop.bus.errors import RunNotFoundError
from offloop.consumers.runner.places import FolderRuns, FoundRun, NatsRuns, Place


def places_of(folders: Sequence[str], stream: str | None) -> list[Place]:
    """The places that a command names, each folder once; without any the usual folder."""
    by_path = dict(zip(map(os.path.realpath, folders), folders, strict=True))
    places: list[Place] = [FolderRuns(folder) for folder in by_path.values()]
    if stream is not None:
        places.append(NatsRuns(stream))
    return places or [FolderRuns()]


class Places:
    """Places whose runs are looked at together. A run is known by its name where there is one place, and
    by ``PLACE/NAME`` where there are several."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._by_label = dict(zip(_labels(places), places, strict=True)) if len(places) > 1 else {"": places[0]}

    def items(self) -> Sequence[tuple[str, Place]]:
        """Each place with what stands before the names of its runs; that is empty where there is one place."""
        return tuple(self._by_label.items())

    def split(self, key: str) -> tuple[str, str]:
        """What stands before the name of a run, and its name."""
        label, _, name = ("", "", key) if "" in self._by_label else key.rpartition("/")
        return label, name

    def is_elsewhere(self, key: str) -> bool:
        """Whether a run can be read alone, and not be changed."""
        place = self._by_label.get(self.split(key)[0])
        return place is not None and place.is_elsewhere

    def has(self, key: str) -> bool:
        """Whether there is such a run; one in NATS may be: servers are not asked."""
        label, name = self.split(key)
        place = self._by_label.get(label)
        return place is not None and place.has(name)

    def find(self, key: str) -> FoundRun:
        """The run that is known by ``key``; an address of a page opens no folder elsewhere on this machine.

        Raises:
            RunNotFoundError: there is none.
            RunDirectoryError: it cannot be read.
            BrokerError: the NATS servers do not answer.
        """
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
