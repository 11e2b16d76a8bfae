"""Stored entries: a file in the directory of each ended run."""

import contextlib
from pathlib import Path
from typing import NamedTuple

import msgspec

from offloop.bus.files import check_owner, lock_directory, read_file, replace_file
from offloop.bus.index.entry import STORED, RunEntry, encode
from offloop.bus.run_files import opened_to_write

_MAGIC = b"OFLIDX8\n"
_MAX_BYTES = 64 << 20


class StoredEntry(NamedTuple):
    stamp: str  # stamp of the files that it was read from
    entry: RunEntry


_decode = msgspec.msgpack.Decoder(StoredEntry).decode


def read_stored(runs_dir: Path, run: str) -> StoredEntry | None:
    """Return the stored entry of a run; ``None`` if it is missing, damaged, of another run or version."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = read_file(f"{runs_dir}/{run}/{STORED}", _MAX_BYTES)
        stored = _decode(content[len(_MAGIC) :]) if content.startswith(_MAGIC) else None
        return stored if stored is not None and stored.entry.run == run else None
    return None


def store_entry(run: Path, stamp: str, entry: RunEntry) -> None:
    """Store the entry of a run. Safe for several processes. Raises RunDirectoryError if that is impossible."""
    content = _MAGIC + encode(StoredEntry(stamp, entry))
    if len(content) > _MAX_BYTES:
        return
    with opened_to_write(run, STORED) as directory:
        check_owner(directory)
        lock_directory(directory)
        replace_file(directory, STORED, content)
