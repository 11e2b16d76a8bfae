"""The folders of a run's checkpoints, in a file in its directory."""

import os
from pathlib import Path

from offloop.bus.checkpoints.run_list import RunList

FOLDERS_FILE = "checkpoint_folders.json"
_folders = RunList(FOLDERS_FILE, list[str], most=20)


def note_folder(run: Path, folder: Path) -> None:
    """Records that checkpoints of a run are in a folder. The file's time changes also for a known folder, so that those
    who look at it notice that there is something new."""
    path = str(folder.absolute())
    _folders.add(run, path, lambda other: other != path)


def read_folders(run: Path) -> list[Path]:
    """The folders that were recorded, the newest last."""
    return [Path(one) for one in _folders.read(run) if os.path.isabs(one) and "\0" not in one]
