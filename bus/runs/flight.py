"""Files in a live run's directory that are written on request: dumps of the flight recorder, stacks, profiles."""

import os
import re
from collections.abc import Container
from pathlib import Path
from typing import IO

from offloop.bus.files import open_file

MOST_DUMPS = 20  # maximum number of files of a kind for an attempt
DUMPS, STACKS, PROFILES = "flight-{}-{}.mcap", "stacks-{}-{}.txt", "profile-{}-{}-{}.json.gz"
"""Names: attempt and number, of a profile attempt, rank, and batch before it."""

_VERDICT_BYTES = 2000


def free_path(run: Path, kind: str, attempt: int, taken: Container[Path] = ()) -> Path | None:
    """Return the path of the next file of a kind, or ``None`` if the attempt has the maximum."""
    paths = (run / kind.format(attempt, number) for number in range(1, MOST_DUMPS + 1))
    return next((path for path in paths if path not in taken and not os.path.lexists(path)), None)


def list_dumps(run: Path, kind: str = DUMPS) -> list[Path]:
    file = re.compile(re.escape(kind).replace(r"\{\}", "([0-9]{1,9})"))
    try:
        found = [match for name in os.listdir(run) if (match := file.fullmatch(name))]
    except OSError:
        return []
    return [run / match[0] for match in sorted(found, key=lambda one: tuple(map(int, one.groups())))]


def read_verdict(stacks: Path) -> str:
    """Return the first line of a file of stacks, which says which ranks are where; empty if it cannot be read."""
    try:
        with open(open_file(stacks), "rb") as file:
            return file.readline(_VERDICT_BYTES).decode(errors="backslashreplace").strip()
    except OSError:
        return ""


def open_shown(run: Path, name: str) -> IO[bytes] | None:
    """Open a file of stacks or a profile by its name; ``None`` if a run has none of that name."""
    if not any(path.name == name for kind in (STACKS, PROFILES) for path in list_dumps(run, kind)):
        return None
    try:
        return open(open_file(run / name), "rb")
    except OSError:
        return None
