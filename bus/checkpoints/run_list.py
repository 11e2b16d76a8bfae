"""A list in a JSON file of a run's directory, which several processes may add to."""

import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from offloop.bus.files import check_owner, open_directory, read_file, replace_file

_log = logging.getLogger("offloop")
_MAX_BYTES = 8 << 20
_ERRORS = (OSError, ValueError, RecursionError)
Entry = TypeVar("Entry")


class RunList(Generic[Entry]):
    """The newest ``most`` entries, the newest last, in the file ``name`` of each run."""

    def __init__(self, name: str, kind: type[list[Entry]], most: int) -> None:
        self._name = name
        self._most = most
        self._decode = msgspec.json.Decoder(kind).decode

    def read(self, run: Path) -> list[Entry]:
        """The entries; none where the file is missing or cannot be read."""
        try:
            return self._read(run)
        except _ERRORS as error:
            _log.warning("%s is left out: %s", run / self._name, error)
            return []

    def add(self, run: Path, entry: Entry, keep: Callable[[Entry], bool]) -> None:
        """Adds an entry to those that are kept. A failure is logged; a file that cannot be read stays as it is."""
        try:
            directory = open_directory(run)
            try:
                check_owner(directory)
                fcntl.flock(directory, fcntl.LOCK_EX)
                content = msgspec.json.encode([*filter(keep, self._read(run)), entry][-self._most :])
                replace_file(directory, self._name, msgspec.json.format(content).decode())
            finally:
                os.close(directory)
        except _ERRORS as error:
            _log.warning("%s cannot be changed: %s", run / self._name, error)

    def _read(self, run: Path) -> list[Entry]:
        try:
            return self._decode(read_file(run / self._name, _MAX_BYTES))[-self._most :]
        except FileNotFoundError:
            return []
