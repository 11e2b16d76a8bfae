"""Storage of the index: a folder beside the runs, with a file for each run."""

import contextlib
import hashlib
import os
import secrets
import struct
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from offloop.bus.files import check_owner, make_private, open_directory, open_file, read_file
from offloop.bus.index.entry import RunEntry
from offloop.bus.recording.summary import Point

INDEX_FOLDER = ".index"

_MAGIC = b"OFLIDX4\n"
_LENGTH = struct.Struct(">I")
_HEAD = len(_MAGIC) + _LENGTH.size
_FIRST_BYTES = 1 << 14
_MAX_BYTES = 64 << 20
_ABANDONED_SECONDS = 60.0


class StoredEntry(NamedTuple):
    run: str
    stamp: str  # stamp of the files that it was read from
    entry: RunEntry


_encode = msgspec.msgpack.encode
_decode_entry = msgspec.msgpack.Decoder(StoredEntry).decode
_decode_series = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
_decode_points = msgspec.msgpack.Decoder(list[Point]).decode


class IndexStore:
    """Entries of ended runs in a folder that only its owner can open.

    Files are replaced as a whole, so that processes need no locks and may be killed. Damaged files, and those of
    another version, count as missing."""

    def __init__(self, runs_dir: Path) -> None:
        self._path = runs_dir / INDEX_FOLDER
        self._directory = -1
        self._identity: tuple[int, int] | None = None
        self.problem: str | None = None  # reason for storing nothing

    def open(self) -> bool:
        """Open, or make, the folder and return whether it is the same as before."""
        with contextlib.ExitStack() as left:
            # The old folder stays open until the new one is open, so that the new one has another inode.
            if self._directory >= 0:
                left.callback(os.close, self._directory)
            before, self._identity, self._directory = self._identity, None, -1
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._path, 0o700)
                self._directory = open_directory(self._path)
                check_owner(self._directory)
                make_private(self._directory)
                about = os.fstat(self._directory)
                self._identity = about.st_dev, about.st_ino
                self.problem = None
            except OSError as error:
                self.close()
                self._note(error)
            return self._identity == before

    def read(self, run: str) -> StoredEntry | None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            descriptor = open_file(_name(run), dir_fd=self._directory)
            try:
                content = os.read(descriptor, _FIRST_BYTES)
                end = _end_of_entry(content)
                if end > len(content):
                    content += os.read(descriptor, end - len(content))
            finally:
                os.close(descriptor)
            return _entry_in(content, run)
        return None

    def series(self, run: str, stamp: str, metric: str) -> list[Point] | None:
        """Return a series of a run, empty without the metric; ``None`` unless stored with that stamp."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            content = self._content(run)
            if _entry_in(content, run).stamp == stamp:
                found = _decode_series(content[_end_of_entry(content) :]).get(metric)
                return [] if found is None else _decode_points(found)
        return None

    def store(self, run: str, stamp: str, entry: RunEntry, series: Iterable[tuple[str, list[Point]]] | None) -> None:
        """Store a run; ``None`` keeps its stored series."""
        if self._directory < 0:
            return
        if series is not None:
            packed = _encode(dict(series))
        else:
            try:
                content = self._content(run)
                packed = content[_end_of_entry(content) :]
            except (OSError, ValueError):
                return  # The next process reads the run anew.
        head = _encode(StoredEntry(run, stamp, entry))
        if len(head) + len(packed) + _HEAD <= _MAX_BYTES:
            self._replace(_name(run), _MAGIC + _LENGTH.pack(len(head)) + head + packed)

    def remove(self, run: str) -> None:
        if self._directory >= 0:
            with contextlib.suppress(OSError):
                os.unlink(_name(run), dir_fd=self._directory)

    def prune(self, runs: Collection[str]) -> None:
        """Remove all other runs, and files of killed processes."""
        if self._directory < 0:
            return
        kept = {_name(run) for run in runs}
        until = time.time() - _ABANDONED_SECONDS
        with contextlib.suppress(OSError):
            for name in set(os.listdir(self._directory)) - kept:
                if os.stat(name, dir_fd=self._directory, follow_symlinks=False).st_mtime < until:
                    os.unlink(name, dir_fd=self._directory)

    def close(self) -> None:
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    def _content(self, run: str) -> bytes:
        content = read_file(_name(run), _MAX_BYTES, dir_fd=self._directory)
        _end_of_entry(content)
        return content

    def _replace(self, name: str, content: bytes) -> None:
        # Each writer has its own name, so that no other process puts an incomplete file in place.
        temporary = f".{secrets.token_hex(8)}.new"
        try:
            with open(open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=self._directory), "wb") as file:
                file.write(content)
            os.replace(temporary, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._directory)
            self._note(error)
        else:
            self.problem = None

    def _note(self, error: OSError) -> None:
        self.problem = f"the index {self._path} cannot be used: {error.strerror or error}"


def _name(run: str) -> str:
    # Names of runs may be as long as file names.
    return hashlib.blake2b(os.fsencode(run), digest_size=16).hexdigest()


def _end_of_entry(content: bytes) -> int:
    if len(content) < _HEAD or not content.startswith(_MAGIC):
        raise ValueError("it is not a file of this version")
    end = _HEAD + int(_LENGTH.unpack_from(content, len(_MAGIC))[0])
    if end > _MAX_BYTES:
        raise ValueError("the entry is too long")
    return end


def _entry_in(content: bytes, run: str) -> StoredEntry:
    stored = _decode_entry(content[_HEAD : _end_of_entry(content)])
    if stored.run != run:
        raise ValueError("it is the file of another run")
    return stored
