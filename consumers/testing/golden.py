"""Comparison of logged values with files that a person has checked."""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from offloop.bus.errors import ConfigurationError
from offloop.bus.strict_json import plain
from offloop.consumers.api.logger import Images
from offloop.consumers.testing.harness import Logged

_SHOWN = 5
_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode


class Golden:
    """Files of known good output, in one folder.

    A file is JSON Lines: the hyperparameters, a line for each row of metrics, and a line for each text, table, group of
    images (their shapes and a hash), uploaded file (its name) and command. Floats are written with all their digits;
    NaN and infinities are the strings ``NaN``, ``Infinity`` and ``-Infinity``, so NaN equals NaN.

    Args:
        folder: the folder of the files, created with the first one.
        update: write the files, and compare nothing.
        how_to_update: the command that writes them, for messages.
    """

    def __init__(
        self, folder: str | os.PathLike[str], update: bool = False, how_to_update: str = "Golden(folder, update=True)"
    ) -> None:
        self._folder = Path(folder)
        self._update = update
        self._how_to_update = how_to_update

    def check(self, logged: Logged, name: str, tolerance: float = 0.0) -> None:
        """Compare logged values with the file ``NAME.jsonl``.

        Args:
            logged: such as the result of :func:`~offloop.consumers.testing.replay`.
            name: of the file, without its ending; with slashes for folders.
            tolerance: largest difference of metrics, relative to the larger value, and absolute near zero: ``1e-6``
                allows for other last digits on another machine. Steps, times and all else are compared exactly.

        Raises:
            AssertionError: something differs, with the first lines that do; or the file is missing.
            ConfigurationError: ``name`` leads out of the folder, or ``tolerance`` is negative.
        """
        __tracebackhide__ = True
        path = self._path(name)
        if not tolerance >= 0:
            raise ConfigurationError(f"tolerance is {tolerance}: use 0 for none, or a small number such as 1e-6")
        lines = [_encode(plain(line)) for line in _lines(logged)]
        if self._update:
            self._write(path, lines)
            return
        try:
            # str.splitlines() would also split at characters such as U+2028, which JSON leaves as they are.
            with path.open(encoding="utf-8") as file:
                expected = [line.removesuffix("\n") for line in file]
        except FileNotFoundError:
            raise AssertionError(
                f"there is no golden file {path} to compare {len(lines)} lines with: "
                f"look at what was logged, then write it with {self._how_to_update}"
            ) from None
        differences = list(_differences(expected, lines, tolerance))
        if differences:
            headline = f"what was logged differs from {path} in {len(differences)} of {len(expected)} lines:"
            more = [f"  and {len(differences) - _SHOWN} more"] if len(differences) > _SHOWN else []
            advice = f"if that is meant to be: {self._how_to_update}"
            raise AssertionError("\n".join([headline, *differences[:_SHOWN], *more, advice]))

    def _path(self, name: str) -> Path:
        parts = Path(name).parts
        if not parts or ".." in parts or Path(name).is_absolute():
            raise ConfigurationError(f"{name!r} cannot be the name of a golden file: use a name such as 'digits/speed'")
        return self._folder / f"{name}.jsonl"

    def _write(self, path: Path, lines: list[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _lines(logged: Logged) -> Iterator[dict[str, Any]]:
    if logged.hyperparameters:
        yield {"hyperparameters": logged.hyperparameters}
    for row in logged.rows:
        yield {"step": row.step, "time": row.time, "metrics": row.metrics}
    for text in logged.texts:
        yield {"text": text.name, "step": text.step, "time": text.time, "content": text.text}
    for table in logged.tables:
        content = {"columns": table.columns, "rows": table.rows}
        yield {"table": table.name, "step": table.step, "time": table.time, **content}
    for images in logged.images:
        shapes = [list(image.shape) for image in images.images]
        yield {
            "images": images.name,
            "step": images.step,
            "time": images.time,
            "shapes": shapes,
            "sha256": _hash(images),
        }
    for upload in logged.uploads:
        yield {"upload": upload.remote_file_name, "overwrite": upload.overwrite}
    for command in logged.commands:
        yield {"command": command.name, "arguments": list(command.arguments), "decided_at": command.decided_at}


def _hash(images: Images) -> str:
    digest = hashlib.sha256()
    for arrays in (images.images, *(images.masks[name] for name in sorted(images.masks))):
        for array in arrays:
            digest.update(f"{array.shape} {array.dtype}".encode() + array.tobytes())
    return digest.hexdigest()


def _differences(expected: list[str], found: list[str], tolerance: float) -> Iterator[str]:
    for number, (before, now) in enumerate(zip_longest(expected, found), 1):
        if now is None:
            yield f"  line {number} is missing: {_short(before)}"
        elif before is None:
            yield f"  line {number} is new: {_short(now)}"
        elif before != now and (difference := _difference(before, now, tolerance)):
            yield f"  line {number}, {difference}"


def _difference(before: str, now: str, tolerance: float) -> str | None:
    """Describe the difference of two lines, if it exceeds the tolerance."""
    try:
        old, new = _values(before), _values(now)
    except (ValueError, TypeError):
        return f"{_short(now)}, expected {_short(before)}"
    parts = [
        f"{name} is {_shown(new, name)}, expected {_shown(old, name)}"
        for name in dict.fromkeys((*old, *new))
        if not _is_same(old, new, name, tolerance)
    ]
    if not parts and list(old) != list(new):
        parts = [f"{', '.join(new)} in this order, expected {', '.join(old)}"]
    return f"step {old.get('step')}: {'; '.join(parts)}" if parts else None


def _values(line: str) -> dict[str, Any]:
    values: dict[str, Any] = dict(json.loads(line))
    metrics: dict[str, Any] = values.pop("metrics", {})
    return values | metrics


def _is_same(old: dict[str, Any], new: dict[str, Any], name: str, tolerance: float) -> bool:
    # 1, 1.0 and true are equal in Python, and differ here.
    if _shown(old, name) == _shown(new, name):
        return True
    numbers = [values.get(name) for values in (old, new)]
    is_metric = name not in ("step", "time") and all(isinstance(number, float | int) for number in numbers)
    return is_metric and tolerance > 0 and math.isclose(*numbers, rel_tol=tolerance, abs_tol=tolerance)  # type: ignore[arg-type]


def _shown(values: dict[str, Any], name: str) -> str:
    return _short(_encode(values[name])) if name in values else "missing"


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."
