"""Values as strict JSON, which every program can read, and maps without maps in them, for tables."""

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

_EXACT = json.JSONEncoder(allow_nan=False, ensure_ascii=False, check_circular=False)


def plain(value: Any) -> Any:
    """The same in nothing but what JSON has: NaN and infinities are the strings ``NaN``, ``Infinity`` and
    ``-Infinity``, bytes are base64, anything else is its text. Text that is not Unicode, such as some paths, is
    escaped."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {plain(str(name)): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if value is None or isinstance(value, int | float) else plain(str(value))


def flatten(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without maps: what is in them has the names that lead to it, joined by ``/``. Two values of one such name
    get names of their own."""
    flat: dict[str, Any] = {}
    _flatten_into(row, "", flat)
    return flat


def _flatten_into(values: Mapping[Any, Any], prefix: str, flat: dict[str, Any]) -> None:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            _flatten_into(value, f"{name}/", flat)
            continue
        while name in flat:
            name += "'"
        flat[name] = value


def json_text(value: Any) -> str:
    """A value as strict JSON: NaN and infinities are the strings ``NaN``, ``Infinity`` and ``-Infinity``, bytes are
    base64."""
    try:
        return _EXACT.encode(value)
    except (TypeError, ValueError):
        return _EXACT.encode(plain(value))
