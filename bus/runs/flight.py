"""The dumps of a run's flight recorder."""

import os
import re
from pathlib import Path

MOST_DUMPS = 20  # maximum number of files for an attempt

_FILE = re.compile(r"flight-([1-9][0-9]{0,8})-([1-9][0-9]{0,2})\.mcap")


def dump_path(run: Path, attempt: int, number: int) -> Path:
    return run / f"flight-{attempt}-{number}.mcap"


def list_dumps(run: Path) -> list[Path]:
    try:
        found = [match for name in os.listdir(run) if (match := _FILE.fullmatch(name))]
    except OSError:
        return []
    return [run / match[0] for match in sorted(found, key=lambda one: (int(one[1]), int(one[2])))]
