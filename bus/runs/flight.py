"""What the flight recorder of a run has written, in the run's directory."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from offloop.bus.run_files import JsonFile

MOST_DUMPS = 20
"""Files that are written of an attempt."""

_FILE = re.compile(r"flight-([1-9][0-9]{0,8})-([1-9][0-9]{0,2})\.mcap")


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


ANNOUNCED_DUMPS = JsonFile("flight.json", list[AnnouncedDump])
"""The newest dumps of its broker, from when they are decided on: what bridges look at to let other hosts know."""


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
