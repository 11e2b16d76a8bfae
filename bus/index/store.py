"""Stored entries: a file in the directory of each ended run with its entry, and with a part of each metric."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from offloop.bus.errors import RunDirectoryError
from offloop.bus.files import check_owner, lock_directory, open_directory, open_file, replace_file
from offloop.bus.index.entry import STORED, RunEntry
from offloop.bus.recording.summary import Point

_MAGIC = b"OFLIDX5\n"
_LENGTH_BYTES = 4
_MAX_BYTES = 64 << 20


class Stamp(NamedTuple):
    """Times and sizes of a run's files; greater for later runs."""

    recorded: str
    annotated: str


class StoredEntry(NamedTuple):
    stamp: Stamp  # stamp of the files that it was read from
    entry: RunEntry


_encode = msgspec.msgpack.encode
_decode_entry = msgspec.msgpack.Decoder(StoredEntry).decode
_decode_series = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
_decode_points = msgspec.msgpack.Decoder(list[Point]).decode


def read_stored(run: Path) -> StoredEntry | None:
    """Return the stored entry of a run; ``None`` if it is missing, damaged, of another run or version."""
    with contextlib.suppress(OSError, ValueError, RecursionError), _opened(run) as file:
        return _entry_in(file, run.name)
    return None


def read_series(run: Path, stamp: Stamp | None, metric: str) -> list[Point] | None:
    """Return a stored metric of a run, empty without it; ``None`` unless stored with that stamp."""
    with contextlib.suppress(OSError, ValueError, RecursionError), _opened(run) as file:
        if stamp is not None and _entry_in(file, run.name).stamp.recorded == stamp.recorded:
            found = _decode_series(file.read(_MAX_BYTES)).get(metric)
            return [] if found is None else _decode_points(found)
    return None


def store_entry(run: Path, stamp: Stamp, entry: RunEntry, series: Iterable[tuple[str, list[Point]]]) -> None:
    """Store the entry of a run. Safe for several processes. Raises RunDirectoryError if that is impossible."""
    head, packed = _encode(StoredEntry(stamp, entry)), _encode(dict(series))
    if len(head) + len(packed) > _MAX_BYTES:
        return
    try:
        directory = open_directory(run)
        try:
            check_owner(directory)
            lock_directory(directory)
            replace_file(directory, STORED, _MAGIC + len(head).to_bytes(_LENGTH_BYTES) + head + packed)
        finally:
            os.close(directory)
    except OSError as error:
        path = run / STORED
        raise RunDirectoryError(f"{path} cannot be written: {error.strerror or error}", path=path) from None


def _opened(run: Path) -> BinaryIO:
    return open(open_file(run / STORED), "rb")


def _entry_in(file: BinaryIO, run: str) -> StoredEntry:
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError("it is not a file of this version")
    length = int.from_bytes(file.read(_LENGTH_BYTES))
    if length > _MAX_BYTES:
        raise ValueError("the entry is too long")
    stored = _decode_entry(file.read(length))
    if stored.entry.run != run:
        raise ValueError("it is the file of another run")
    return stored
