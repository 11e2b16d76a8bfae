"""The folder of a training's checkpoints."""

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offloop.bus.checkpoints.image import main_file
from offloop.bus.checkpoints.names import CheckpointNames
from offloop.bus.errors import CheckpointError
from offloop.bus.types.timestamp import Timestamp, TrainingTime
from offloop.trainer.checkpoints.file import read_checkpoint, read_part, write_checkpoint
from offloop.trainer.checkpoints.sharded import check_sharded


class CheckpointFolder(CheckpointNames):
    """Saves checkpoints in a folder, and finds the newest intact one."""

    _last: Timestamp | None = None

    @functools.cached_property
    def unreadable(self) -> dict[Path, CheckpointError]:
        """Errors of the checkpoints that :meth:`latest` could not read, by path without links."""
        return {}

    @property
    def last_path(self) -> Path | None:
        return None if self._last is None else self.path_at(self._last)

    def save(self, timestamp: Timestamp, tree: Mapping[str, Any], shards: Path | None = None) -> Path:
        """Write a checkpoint, make it the latest one, and remove surplus ones."""
        return self._save(timestamp, {**tree, "timestamp": list(timestamp.values)}, shards)

    def replace_last(self, tree: Mapping[str, Any], shards: Path | None = None) -> Path | None:
        """Replace the last saved checkpoint, with the tree's own ``timestamp``; do nothing if none was saved."""
        if self._last is None:
            return None
        return self._save(self._last, {"timestamp": list(self._last.values), **tree}, shards)

    def _save(self, named: Timestamp, tree: Mapping[str, Any], shards: Path | None) -> Path:
        def write(path: Path) -> None:
            write_checkpoint(path, tree, shards)
            self._last = named

        path = self.place(named, write)
        self.remove_surplus()
        return path

    def latest(self) -> Path | None:
        """Return the newest intact checkpoint, with each byte checked; damaged ones are in :attr:`unreadable`.

        With ``overwrite`` the target of the link comes first: files of a later time may be older. Without it a later
        file was written just before the process was killed."""
        self.unreadable.clear()
        try:
            # A search in a folder without permission finds nothing.
            with os.scandir(self.folder):
                pass
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(
                f"cannot read the folder of checkpoints {self.folder}: {error.strerror}; change its mode, or use "
                "another one",
                path=self.folder,
            ) from None
        linked = self._linked()
        times = {}
        for path in {*self._files(), *([linked] if linked else [])}:
            try:
                times[path] = _time_of(path)
            except CheckpointError as error:
                self.unreadable[_real(path)] = error
        is_first = linked if self._overwrite else None
        for path in sorted(times, key=lambda path: (path == is_first, times[path], path), reverse=True):
            try:
                if path.is_dir():
                    check_sharded(path)
                else:
                    read_checkpoint(path, device="meta")
            except CheckpointError as error:
                self.unreadable[_real(path)] = error
            else:
                return path
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._saved = [name for name in self._saved if _real(self.folder / name) not in self.unreadable]

    def newest_unreadable(self) -> CheckpointError:
        folder = self.folder.resolve()

        def time_in_name(path: Path) -> tuple[list[int], Path]:
            name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else ""
            return list(self._filename.counters(name).values()), path

        return self.unreadable[max(self.unreadable, key=time_in_name)]

    def _is_in_the_way(self, path: Path) -> bool:
        # An unreadable file is renamed when its name is needed.
        return _real(path) not in self.unreadable

    def _is_unreadable(self, path: Path) -> bool:
        return (_real(path) in self.unreadable and path.exists()) or super()._is_unreadable(path)

    def _set_aside(self, path: Path) -> None:
        super()._set_aside(path)
        self.unreadable.pop(_real(path), None)

    def _time_of(self, path: Path) -> tuple[int, ...] | None:
        try:
            return _time_of(path)
        except CheckpointError:
            return None


def _time_of(path: Path) -> tuple[int, ...]:
    values = read_part(main_file(path), "timestamp")
    is_time = isinstance(values, list) and len(values) >= len(TrainingTime._fields)
    if not (is_time and all(type(value) is int for value in values)):
        raise CheckpointError(f"checkpoint {path} has no valid training time", path=path)
    return tuple(values)


def _real(path: Path) -> Path:
    # Only links among its folders are resolved.
    return path.parent.resolve() / path.name
