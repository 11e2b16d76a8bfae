"""Where runs are found: in folders of this machine, and at brokers elsewhere."""

import os
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from offloop.bus.errors import RunNotFoundError
from offloop.bus.net.curve import ClientSecurity, client_security
from offloop.bus.net.nats_addresses import is_nats
from offloop.bus.runs.directory import RUN_FILE, RunInfo, find_run, in_words, list_runs, read_run, runs_dir
from offloop.consumers.runner.streams import RemoteRunInfo, find_remote, list_remote


class RunsHere(NamedTuple):
    """The runs in a directory, by default the usual one."""

    directory: str | os.PathLike[str] | None = None

    def __str__(self) -> str:
        return f"in {runs_dir(self.directory)}"

    @property
    def in_words(self) -> str:
        """The folder as pages name it."""
        return in_words(runs_dir(self.directory))

    def list(self) -> Sequence[RunInfo]:
        """All of them, the newest first."""
        return list_runs(self.directory)

    def find(self, name: str) -> tuple[str, RunInfo]:
        """The run of that name, or in that directory, and what it is known by."""
        run = find_run(name, self.directory)
        return str(run.path), run

    def find_inside(self, name: str) -> RunInfo:
        """The run of that name in this folder: an address is not to open whatever else lies on this machine.

        Raises:
            RunNotFoundError: there is none.
            RunDirectoryError: it cannot be read.
        """
        if not self.has(name):
            raise RunNotFoundError(f"there is no run {name!r} {self}", run=name)
        return read_run(runs_dir(self.directory) / name)

    def has(self, name: str) -> bool:
        """Whether this folder has a run of that name."""
        is_name = name not in ("", ".", "..") and "/" not in name and "\0" not in name
        return is_name and os.path.isfile(runs_dir(self.directory) / name / RUN_FILE)


class RunsElsewhere(NamedTuple):
    """The runs of a broker, read through it alone."""

    address: str
    security: ClientSecurity | None = None

    def __str__(self) -> str:
        return f"at {self.address}"

    @property
    def in_words(self) -> str:
        """The broker as pages name it."""
        return f"NATS at {self.address}" if is_nats(self.address) else f"the broker {self.address}"

    def list(self) -> Sequence[RemoteRunInfo]:
        """All of them, the newest first."""
        return list_remote(self.address, self.security)

    def find(self, name: str) -> tuple[str, RemoteRunInfo]:
        """The run of that name, and what it is known by."""
        return name, self.find_inside(name)

    def has(self, name: str) -> bool:
        """Whether there may be one of that name: the broker is not asked."""
        return bool(name)

    def find_inside(self, name: str) -> RemoteRunInfo:
        """The run of that name.

        Raises:
            RunNotFoundError: there is none.
            BrokerError: no broker answers.
        """
        return find_remote(self.address, name, self.security, wait=False, say=lambda text: None)


Place: TypeAlias = RunsHere | RunsElsewhere


def places_of(
    runs_dirs: Sequence[str], brokers: Sequence[str], key: str | None = None, broker_keys: Sequence[str] = ()
) -> list[Place]:
    """The places that a command names, each once; without any the usual folder. ``broker_keys`` has one file for all
    brokers, or one for each.

    Raises:
        ConfigurationError: a key cannot be used.
    """
    folders = dict(zip(map(os.path.realpath, runs_dirs), runs_dirs, strict=True))
    own_keys = broker_keys if len(broker_keys) == len(brokers) else [*broker_keys, None][:1] * len(brokers)
    at = dict(zip(brokers, own_keys, strict=True))
    return [
        *(RunsHere(folder) for folder in ([None] if not runs_dirs and not brokers else folders.values())),
        *(RunsElsewhere(address, client_security(key, own_key)) for address, own_key in at.items()),
    ]


class Places:
    """Folders and brokers whose runs are looked at together. A run is known by its name where there is one place, and
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
        """Whether a run is a broker's."""
        return isinstance(self._by_label.get(self.split(key)[0]), RunsElsewhere)

    def has(self, key: str) -> bool:
        """Whether there is such a run; one of a broker's may be, which is not asked."""
        label, name = self.split(key)
        place = self._by_label.get(label)
        return place is not None and place.has(name)

    def find(self, key: str) -> tuple[str, RunInfo | RemoteRunInfo]:
        """The run that is known by ``key``, which comes with it.

        Raises:
            RunNotFoundError: there is none.
            RunDirectoryError: it cannot be read.
            BrokerError: no broker answers.
        """
        label, name = self.split(key)
        if label not in self._by_label:
            raise RunNotFoundError(f"there is no run {key!r}", run=key)
        return key, self._by_label[label].find_inside(name)


def _labels(places: Sequence[Place]) -> list[str]:
    """The last parts of each folder's path, as many as tell it from the others."""
    parts = [_parts(place) for place in places]
    return ["/".join(_unique_end(own, parts)) for own in parts]


def _parts(place: Place) -> list[str]:
    if isinstance(place, RunsElsewhere):
        return [place.address.removeprefix("tcp://").removeprefix("nats://")]
    return os.path.abspath(runs_dir(place.directory)).split("/")


def _unique_end(own: list[str], parts: Sequence[list[str]]) -> list[str]:
    ends = (own[-count:] for count in range(1, len(own) + 1))
    return next((end for end in ends if sum(one[-len(end) :] == end for one in parts) == 1), own)
