"""Names of a training's checkpoints: the latest, the best, and which are kept. Needs no torch."""

import contextlib
import errno
import glob
import itertools
import logging
import os
import re
import secrets
import shutil
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from offloop.bus.checkpoints.image import VERSION, main_file, read_contents
from offloop.bus.errors import CheckpointError, ConfigurationError
from offloop.bus.files import TEMPORARY_NAME, atomic_replace
from offloop.bus.types.timestamp import Timestamp

_log = logging.getLogger("offloop")

_ALONE: Mapping[str, str | int] = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1, "node_rank": 0}
_TOTALS = ("iteration", "epoch", "batch", "sample", "token")
_COUNTERS = (*_TOTALS, "batch_in_epoch", "sample_in_epoch", "token_in_epoch")
_DURATIONS = ("total_wct", "iteration_wct", "epoch_wct", "batch_wct")
_TIMES = _COUNTERS + _DURATIONS
_COUNT = r"\d+"
# With at least one digit, so that it never matches the name of a parent folder.
_NUMBER = r"[-+ .,_e\d]*\d[-+ .,_e\d]*"
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class CheckpointNames:
    """Names the checkpoints in a folder, keeps links to the latest and the best, and removes surplus ones.

    A checkpoint is a file or a folder. A file under the name of a new checkpoint that cannot be read is kept: it is
    renamed to ``NAME.unreadable``, ``NAME.unreadable-2`` and so on.

    Reference: ``composer/callbacks/checkpoint_saver.py`` and ``composer/utils/file_helpers.py``.

    Args:
        folder: Format string. All three format strings may have ``{run_name}``, ``{rank}``, ``{world_size}``,
            ``{local_rank}``, ``{local_world_size}`` and ``{node_rank}``, with the values in ``names``.
        filename: Format string of a file, possibly in subfolders. It may have the training time: ``{iteration}``,
            ``{epoch}``, ``{batch}``, ``{sample}``, ``{token}``, ``{batch_in_epoch}``, ``{sample_in_epoch}``,
            ``{token_in_epoch}``, and in seconds ``{total_wct}``, ``{iteration_wct}``, ``{epoch_wct}``,
            ``{batch_wct}``, such as ``{total_wct:.0f}``.
        latest_filename: Format string of a symbolic link to the last checkpoint, or of a copy on a file system without
            links. ``None`` for no link.
        keep: Number of last checkpoints of this object to keep. -1 keeps all, 0 none and no link.
        overwrite: Allow checkpoints of later times in the folder, and a ``filename`` that never changes.
        names: Values for the format strings.
        best_filename: Format string of a link to the best checkpoint, by :attr:`ranking`.
        keep_best: Number of best checkpoints to keep besides the last ``keep``, or besides the last one if ``keep`` is
            -1. ``None`` keeps one, or all if ``keep`` is -1.

    Raises:
        ConfigurationError: A name is not allowed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        filename: str = "ep{epoch}-ba{batch}-rank{rank}.safetensors",
        latest_filename: str | None = "latest-rank{rank}.safetensors",
        keep: int = -1,
        overwrite: bool = False,
        names: Mapping[str, str | int] | None = None,
        best_filename: str | None = None,
        keep_best: int | None = None,
    ) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < -1:
            raise ConfigurationError(f"keep={keep!r} is not allowed: use a number of checkpoints, or -1 for all")
        names = self._known = {**_ALONE, **(names or {})}
        if "://" in os.fspath(folder):
            raise ConfigurationError(f"folder {os.fspath(folder)!r} is not on a file system: use a local path")
        self.folder: Path = Path(CheckpointName(os.fspath(folder), names, "folder").at())
        self._filename = CheckpointName(filename, names, "filename", _TIMES)
        self._filename.check_relative()
        if not self._filename.changes and not overwrite:
            raise ConfigurationError(
                f"filename {filename!r} is the same for all checkpoints: put {{batch}} into it, or set overwrite=True"
            )
        self._latest = self._link("latest_filename", latest_filename)
        self._best = self._link("best_filename", best_filename)
        if self._best is not None and self._best == self._latest:
            raise ConfigurationError(f"best_filename and latest_filename are both {best_filename!r}: use another name")
        self.ranking: Callable[[], Iterable[str]] = tuple
        """Returns the names of checkpoints by a metric, the best first. Unknown and missing ones are ignored."""
        self._keep_best = keep_best
        self._keep = keep
        self._overwrite = overwrite
        self._saved: list[str] = []

    def place(self, timestamp: Timestamp, write: Callable[[Path], object]) -> Path:
        """Write a checkpoint to its path and link it as the latest. Call :meth:`remove_surplus` after it."""
        name = self._filename.at(timestamp)
        path = self.folder / name
        self._set_aside(path)
        write(path)
        self._count(name)
        if self._latest is not None:
            self._point(self._latest, path)
        return path

    def _link(self, argument: str, template: str | None) -> Path | None:
        if template is None:
            return None
        link = CheckpointName(template, self._known, argument)
        link.check_relative()
        if self._filename.matches(link.at()):
            raise ConfigurationError(
                f"{argument} {template!r} could be a checkpoint's filename {str(self._filename)!r}: use another name"
            )
        return self.folder / link.at()

    def point_to_best(self) -> None:
        """Link the best existing checkpoint. Raise CheckpointError if that fails."""
        if self._best is None:
            return
        best = next(self._best_first(), None)
        if best is None:
            self._unlink(self._best)
        elif best != self._target(self._best):
            self._point(self._best, best)

    def _best_first(self) -> Iterator[Path]:
        return (path for name in self.ranking() if (path := self.folder / name).is_file())

    def name_at(self, timestamp: Timestamp) -> str:
        return self._filename.at(timestamp)

    def path_at(self, timestamp: Timestamp) -> Path:
        return self.folder / self.name_at(timestamp)

    def other_name(self, template: str, argument: str) -> "CheckpointName":
        return CheckpointName(template, self._known, argument, _TIMES)

    def adopt(self, path: Path) -> None:
        """Count a checkpoint in the folder, from which a training resumes, as the last one saved."""
        with contextlib.suppress(ValueError):
            name = path.relative_to(self.folder).as_posix()
            if self._filename.matches(name):
                self._count(name)

    def check_conflicts(self, timestamp: Timestamp) -> None:
        """Raise ConfigurationError if a training at ``timestamp`` would overwrite another one's checkpoints.

        These are checkpoints of later times in the folder, by name or contents. ``overwrite`` allows them."""
        if self._overwrite:
            return
        for path in self._files():
            if self._is_in_the_way(path) and self._is_later(path, timestamp):
                raise ConfigurationError(
                    f"{path} is of a later time than this training and would be in the way of its checkpoints: "
                    "delete it, use another folder, set save_overwrite=True (--save-overwrite; a callback's "
                    "overwrite=True), or resume from it"
                )

    def clean(self) -> None:
        """Remove remains of killed writes. Nothing may be writing to this folder's checkpoints."""
        names = [self._filename.glob]
        links = [link for link in (self._latest, self._best) if link is not None]
        names += [glob.escape(self._name_of(link)) for link in links]
        for parent in {PurePosixPath(name).parent for name in names}:
            for path in self.folder.glob(str(parent / ".*.tmp")):
                found = TEMPORARY_NAME.fullmatch(path.name)
                target = path.with_name(found["name"].removesuffix(".shards")) if found else None
                if target and (target in links or self._filename.matches(self._name_of(target))):
                    shutil.rmtree(path, ignore_errors=True)

    def state_dict(self) -> dict[str, Any]:
        return {"saved": list(self._saved)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`, without names that do not match this folder's."""
        self._saved = [name for name in state.get("saved", ()) if self._filename.matches(name)]

    def _count(self, name: str) -> None:
        self._saved = [other for other in self._saved if other != name] + [name]

    def _set_aside(self, path: Path) -> None:
        if not self._is_unreadable(path):
            return
        numbered = (f".unreadable-{number}" for number in itertools.count(2))
        others = (path.with_name(path.name + suffix) for suffix in itertools.chain([".unreadable"], numbered))
        other = next(one for one in others if not os.path.lexists(one))
        try:
            path.rename(other)
        except OSError as error:
            raise CheckpointError(
                f"cannot write {path}: the existing file cannot be read, nor renamed to {other.name} "
                f"({error.strerror or error}); move it away, or use another folder",
                path=path,
            ) from None
        _log.warning("%s cannot be read and is kept as %s", path, other.name)

    def _unlink(self, link: Path) -> None:
        if not self._is_unreadable(link):
            _remove(link)

    def _point(self, link: Path, path: Path) -> None:
        if main_file(link).is_file():
            # It is a copy, or a file of the user's.
            self._set_aside(link)
        with atomic_replace(link) as draft:
            try:
                draft.symlink_to(os.path.relpath(path, link.parent))
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                copy = shutil.copytree if path.is_dir() else shutil.copyfile
                copy(path, draft)

    def surplus(self) -> list[str]:
        if self._keep < 0 and self._keep_best is None:
            return []
        newest = 1 if self._keep < 0 else self._keep
        best = {self._name_of(path) for path in itertools.islice(self._best_first(), self._keep_best or 1)}
        return [name for name in self._saved[: max(0, len(self._saved) - newest)] if name not in best]

    def remove_surplus(self) -> None:
        """Remove surplus checkpoints. A failure is logged, and repeated the next time."""
        if self._keep == 0 and self._latest is not None:
            self._unlink(self._latest)
        for name in self.surplus():
            path = self.folder / name
            try:
                _remove(path)
            except OSError as error:
                _log.warning("cannot remove checkpoint %s: %s", path, error.strerror)
            else:
                self._saved.remove(name)

    def _files(self) -> Iterator[Path]:
        for path in sorted(self.folder.glob(self._filename.glob)):
            if self._filename.matches(self._name_of(path)) and main_file(path).is_file():
                yield path

    def _name_of(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _linked(self) -> Path | None:
        if self._latest is None or not main_file(self._latest).is_file():
            return None
        return self._target(self._latest)

    def _target(self, link: Path) -> Path:
        return Path(os.path.normpath(link.parent / os.readlink(link))) if link.is_symlink() else link

    def _is_later(self, path: Path, timestamp: Timestamp) -> bool:
        counted = self._filename.counters(self._name_of(path))
        now = dict(zip(_TOTALS, timestamp.values, strict=False))
        if any(counted[name] > now[name] for name in counted.keys() & now.keys()):
            return True
        # Counters only: elapsed time is not a position.
        saved_at = self._time_of(path)
        return saved_at is not None and saved_at[:10] > timestamp.values[:10]

    def _is_in_the_way(self, path: Path) -> bool:
        return True

    def _is_unreadable(self, path: Path) -> bool:
        return path.exists() and not path.is_symlink() and self._time_of(path) is None

    def _time_of(self, path: Path) -> tuple[int, ...] | None:
        contents = read_contents(path) or {}
        tree = contents.get("tree") if contents.get("version") == VERSION else None
        values = tree.get("timestamp") if isinstance(tree, dict) else None
        return tuple(values) if isinstance(values, list) and all(type(one) is int for one in values) else None


def _remove(path: Path) -> None:
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    # Renamed first, so that a kill leaves no incomplete checkpoint under its name.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    path.rename(draft)
    shutil.rmtree(draft, ignore_errors=True)


class CheckpointName:
    """Format string for a file or folder, and the recognition of names made by it."""

    def __init__(
        self, template: str, names: Mapping[str, str | int], argument: str, changing: tuple[str, ...] = ()
    ) -> None:
        self._template = template
        self._names = names
        self._argument = argument
        pattern, wildcard, seen = "", "", set()
        for literal, name, spec in self._parse():
            pattern += re.escape(literal)
            wildcard += glob.escape(literal)
            if name is None:
                continue
            if name in changing:
                text = self._look_of(name, spec)
                pattern += f"(?P<{name}>{text})" if text == _COUNT and name not in seen else f"(?:{text})"
                wildcard += "*"
                seen.add(name)
            elif name in names:
                text = self._formatted(names[name], spec)
                pattern += re.escape(text)
                wildcard += glob.escape(text)
            else:
                allowed = ", ".join(f"{{{known}}}" for known in (*names, *changing))
                raise ConfigurationError(f"{argument} {template!r} has an unknown {{{name}}}: use {allowed}")
        self.changes: bool = bool(seen)  # the name depends on the training time
        self.glob: str = re.sub(r"\*+", "*", wildcard)  # matches all its names, and some others
        self._pattern = re.compile(pattern, re.DOTALL)

    def at(self, timestamp: Timestamp | None = None) -> str:
        """Return the name at a time; a name that does not change needs none."""
        values: dict[str, str | int | float] = dict(self._names)
        if timestamp is not None:
            values |= {name: int(getattr(timestamp, name)) for name in _COUNTERS}
            values |= {name: getattr(timestamp, name).total_seconds() for name in _DURATIONS}
        return self._template.format_map(values)

    def __str__(self) -> str:
        return self._template

    def matches(self, name: str) -> bool:
        return self._pattern.fullmatch(name) is not None

    def counters(self, name: str) -> dict[str, int]:
        """Return the counters of the training time in a name."""
        found = self._pattern.fullmatch(name)
        return {counter: int(text) for counter, text in found.groupdict().items()} if found else {}

    def check_relative(self) -> None:
        """Raise ConfigurationError unless the name is that of a file in the folder."""
        path = PurePosixPath(self._template)
        if path.is_absolute() or ".." in path.parts or str(path) != self._template:
            raise ConfigurationError(
                f"{self._argument} {self._template!r} is not the name of a file in the folder: "
                "use a name such as 'ba{batch}.safetensors', and put the folder into the folder argument"
            )

    def _parse(self) -> list[tuple[str, str | None, str]]:
        try:
            parts = list(string.Formatter().parse(self._template))
        except ValueError as error:
            raise self._malformed(error) from None
        if any(conversion for *_, conversion in parts):
            raise self._malformed("it has a conversion such as !r")
        return [(literal, name, spec or "") for literal, name, spec, _ in parts]

    def _look_of(self, name: str, spec: str) -> str:
        numbers = (0, 1234567) if name in _COUNTERS else (0.0, 1.5)
        texts = [self._formatted(number, spec) for number in numbers]
        if all(text.isdecimal() and int(text) == number for text, number in zip(texts, numbers, strict=True)):
            return _COUNT
        if not all(re.fullmatch(_NUMBER, text) for text in texts):
            raise self._malformed(f"{{{name}:{spec}}} gives {texts[1]!r}, which is not a number")
        return _NUMBER

    def _formatted(self, value: str | int | float, spec: str) -> str:
        try:
            return format(value, spec)
        except ValueError as error:
            raise self._malformed(error) from None

    def _malformed(self, reason: object) -> ConfigurationError:
        return ConfigurationError(
            f"{self._argument} {self._template!r} is not a format string: {reason}; "
            "write {epoch} for a value and {{ for a brace"
        )
