"""Values as strict JSON, and nested maps as flat ones, for tables."""

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

_EXACT = json.JSONEncoder(allow_nan=False, ensure_ascii=False, check_circular=False)


def plain(value: Any) -> Any:
    """Convert a value to what JSON has.

    NaN and infinities become the strings ``NaN``, ``Infinity`` and ``-Infinity``, bytes base64, other objects text.
    Characters that are not Unicode, as in some paths, are escaped."""
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
    """Return a map without nested ones; their keys are joined by ``/``. Repeated names get a ``'``."""
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
    try:
        return _EXACT.encode(value)
    except (TypeError, ValueError):
        return _EXACT.encode(plain(value))
