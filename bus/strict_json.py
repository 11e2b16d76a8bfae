"""Values as strict JSON, which every program can read."""

import base64
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["plain"]


def plain(value: Any) -> Any:
    """The same in nothing but what JSON has: NaN and infinities are the strings ``NaN``, ``Infinity`` and
    ``-Infinity``, bytes are base64, anything else is its text."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if value is None or isinstance(value, str | int | float) else str(value)
