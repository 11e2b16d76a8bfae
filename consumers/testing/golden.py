"""What callbacks logged, compared with what they logged when a person checked it and found it good."""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from offloop.bus.errors import ConfigurationError
from offloop.consumers.api.logger import Images
from offloop.consumers.testing.logged import Logged

_SHOWN = 5
_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False, default=repr).encode


class Golden:
    """Files of known good output, in one folder.

    A file is JSON Lines: the hyperparameters, a line for each row of metrics, and a line for each text, table, group of
    images (their shapes and a hash), uploaded file (its name) and command. Floats are written with all their digits;
    NaN and infinities are the strings ``NaN``, ``Infinity`` and ``-Infinity``, so NaN equals NaN.

    Args:
        folder: where the files are, made with the first one.
        update: writes the files, and compares nothing.
        how_to_update: the command that writes them, for messages.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        update: bool = False,
        how_to_update: str = "Golden(folder, update=True)",
    ) -> None:
        self._folder = Path(folder)
        self._update = update
        self._how_to_update = how_to_update
        self.written: list[Path] = []
        """The files that were written, and are other than they were."""

    def check(self, logged: Logged, name: str, tolerance: float = 0.0) -> None:
        """Compares what was logged with the file ``NAME.jsonl``.

        Args:
            logged: what :func:`~offloop.consumers.testing.replay` returned, for one.
            name: of the file, without its ending; with slashes for folders.
            tolerance: how far metrics may be from the file's, in parts of the larger one, and near zero as such:
                ``1e-6`` where another machine's last digits may be others. Steps, times and all else are compared
                exactly.

        Raises:
            AssertionError: something differs, the first lines of that are shown; or there is no such file.
            ConfigurationError: ``name`` leads out of the folder, or ``tolerance`` is negative.
        """
        __tracebackhide__ = True
        path = self._path(name)
        if not tolerance >= 0:
            raise ConfigurationError(f"tolerance is {tolerance}: use 0 for none, or a small number such as 1e-6")
        lines = [_encode(_strict(line)) for line in _lines(logged)]
        if self._update:
            self._write(path, lines)
            return
        try:
            # str.splitlines() would also split where JSON leaves a character such as U+2028 as it is.
            with path.open(encoding="utf-8") as file:
                expected = [line.removesuffix("\n") for line in file]
        except FileNotFoundError:
            raise AssertionError(
                f"there is no golden file {path} to compare {len(lines)} lines with: "
                f"look at what was logged, then write it with {self._how_to_update}"
            ) from None
        differences = list(_differences(expected, lines, tolerance))
        if differences:
            more = [f"  and {len(differences) - _SHOWN} more"] if len(differences) > _SHOWN else []
            raise AssertionError(
                "\n".join(
                    [
                        f"what was logged differs from {path} in {len(differences)} of {len(expected)} lines:",
                        *differences[:_SHOWN],
                        *more,
                        f"if that is meant to be: {self._how_to_update}",
                    ]
                )
            )

    def _path(self, name: str) -> Path:
        parts = Path(name).parts
        if not parts or ".." in parts or Path(name).is_absolute():
            raise ConfigurationError(f"{name!r} cannot be the name of a golden file: use a name such as 'digits/speed'")
        return self._folder / f"{name}.jsonl"

    def _write(self, path: Path, lines: list[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        self.written.append(path)


def _lines(logged: Logged) -> Iterator[dict[str, Any]]:
    """What was logged, as it stands in a file."""
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


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(name): _strict(one) for name, one in value.items()}
    return [_strict(one) for one in value] if isinstance(value, list | tuple) else value


def _differences(expected: list[str], found: list[str], tolerance: float) -> Iterator[str]:
    for number, (before, now) in enumerate(zip_longest(expected, found), 1):
        if before == now:
            continue
        if now is None:
            yield f"  line {number} is missing: {_short(before)}"
        elif before is None:
            yield f"  line {number} is new: {_short(now)}"
        elif what := _difference(_read(before), json.loads(now), tolerance):
            yield f"  line {number}, {what}"


def _difference(before: Any, now: Any, tolerance: float) -> str | None:
    if not isinstance(before, dict) or list(before) != list(now):
        return f"{_short(_encode(now))}, expected {_short(before if isinstance(before, str) else _encode(before))}"
    where = f"step {before['step']}: " if "step" in before else ""
    parts: list[str] = []
    for part, value in now.items():
        if part == "metrics" and isinstance(before[part], dict):
            parts += _metric_differences(before[part], value, tolerance)
        elif not _is_same(before[part], value):
            parts.append(f"{part} is {_short(_encode(value))}, expected {_short(_encode(before[part]))}")
    return where + "; ".join(parts) if parts else None


def _metric_differences(before: dict[str, Any], now: dict[str, Any], tolerance: float) -> Iterator[str]:
    for name in [*before, *(name for name in now if name not in before)]:
        if name not in now:
            yield f"{name} is missing, expected {_short(_encode(before[name]))}"
        elif name not in before:
            yield f"{name} is new: {_short(_encode(now[name]))}"
        elif not _is_same(before[name], now[name]) and not _is_close(before[name], now[name], tolerance):
            yield f"{name} is {_short(_encode(now[name]))}, expected {_short(_encode(before[name]))}"
    if [name for name in before if name in now] != [name for name in now if name in before]:
        yield f"the metrics come in another order: {', '.join(now)}, expected {', '.join(before)}"


def _is_same(before: Any, now: Any) -> bool:
    # Of 1, 1.0 and true each is equal to the others, and is not what was logged.
    return bool(_encode(before) == _encode(now))


def _is_close(before: Any, now: Any, tolerance: float) -> bool:
    if not isinstance(before, float | int) or not isinstance(now, float | int):
        return False
    return tolerance > 0 and math.isclose(before, now, rel_tol=tolerance, abs_tol=tolerance)


def _read(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return line


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."
