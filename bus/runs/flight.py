"""What the flight recorder of a run has written, in the run's directory."""

import contextlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from offloop.bus.files import open_directory, read_file, replace_file
from offloop.bus.strict_json import plain

FLIGHT_FILE = "flight.json"
"""The newest dump of its broker, from when it is decided on: what bridges look at to let other hosts know."""
MOST_DUMPS = 20
"""Files that are written of an attempt."""

_FILE = re.compile(r"flight-([1-9][0-9]{0,8})-([1-9][0-9]{0,2})\.mcap")
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class AnnouncedDump:
    """A dump that a broker has decided on."""

    id: str
    """The same on all hosts that make one for the same reason."""
    attempt: int
    reason: str
    detail: str
    time: float
    """In seconds since 1970."""


def dump_path(run: Path, attempt: int, number: int) -> Path:
    """The file of an attempt's dump with that number, counted from 1."""
    return run / f"flight-{attempt}-{number}.mcap"


def list_dumps(run: Path) -> list[Path]:
    """The dumps in a run's directory, in the order of attempts and numbers."""
    try:
        found = [match for name in os.listdir(run) if (match := _FILE.fullmatch(name))]
    except OSError:
        return []
    return [run / match[0] for match in sorted(found, key=lambda one: (int(one[1]), int(one[2])))]


def announce_dump(run: Path, dump: AnnouncedDump) -> None:
    """Writes down that a dump is decided on.

    Raises:
        OSError: the directory does not take it.
    """
    directory = open_directory(run)
    try:
        replace_file(directory, FLIGHT_FILE, json.dumps(plain(asdict(dump))))
    finally:
        os.close(directory)


def read_announced(run: Path) -> AnnouncedDump | None:
    """The newest dump of a run's broker on this host; ``None`` without one."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return msgspec.json.decode(read_file(run / FLIGHT_FILE, _MOST_BYTES), type=AnnouncedDump)
    return None
