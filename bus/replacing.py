"""Files and folders that appear under their names whole or not at all."""

import contextlib
import glob
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from bus.errors import CheckpointError

__all__ = ["TEMPORARY_NAME", "replacing"]

TEMPORARY_NAME = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.tmp")
"""What a write leaves behind when it is killed: a folder of such a name beside the file ``name``."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path to make a file, a symbolic link or a folder at, which takes the place of ``path`` when the block
    ends.

    It does so in one step, and a file not before it is on the disk; the files in a folder have to be there already.
    Whatever goes wrong, ``path`` stays as it was and nothing else stays behind; after a kill the next write to the same
    path cleans up. A folder that is there already is moved away first, so a kill just then leaves none.

    Raises :class:`bus.errors.CheckpointError` for errors of the file system, in the block too."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for stray in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
            shutil.rmtree(stray, ignore_errors=True)
        # A folder and not a file: what writes the draft may make files of its own naming beside it.
        workplace = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        workplace.mkdir()
        try:
            draft = workplace / path.name
            yield draft
            if draft.is_dir() and not draft.is_symlink():
                for folder, _, _ in os.walk(draft):
                    _sync(Path(folder))
                if os.path.lexists(path):
                    os.replace(path, workplace / "replaced")
            elif not draft.is_symlink():
                # Some writers let the owner alone read what they write; the umask decides, as with any other file.
                draft.chmod(workplace.stat().st_mode & 0o666)
                _sync(draft)
            os.replace(draft, path)
            _sync(path.parent)
        finally:
            shutil.rmtree(workplace, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
