"""Values that are still on a device, and values that cannot be published."""

import logging
from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

_log = logging.getLogger("offloop")
_NAMED = 20
_PLAIN = frozenset({float, int, bool, str, bytes, list, dict, type(None)})


@runtime_checkable
class Deferred(Protocol):
    """A value that is still on a device. Its event is sent once the value has arrived."""

    def ready(self) -> bool:
        """Return at once whether :meth:`value` needs no wait."""

    def value(self) -> Any:
        """Return the value. May wait; it is called only once ready, or when the stream is drained."""


def is_deferred(value: Any) -> TypeGuard[Deferred]:
    # isinstance() with a protocol is slow, and most values are plain.
    return type(value) not in _PLAIN and isinstance(value, Deferred)


def deferred_values(fields: Mapping[str, Any]) -> dict[str, Deferred]:
    return {name: value for name, value in fields.items() if is_deferred(value)}


class LeftOut:
    """The values that cannot be published: logs the first of each name, and counts all."""

    def __init__(self, run_name: str) -> None:
        self.count: int = 0  # number of values left out
        self._run_name = run_name
        self._names: dict[str, None] = {}

    def add(self, name: object, reason: object) -> None:
        self.count += 1
        shown = as_text(name)[:100]
        if shown not in self._names and len(self._names) < _NAMED:
            self._names[shown] = None
            _log.warning(
                "run %s: %s is left out, all else is published: %s", self._run_name, shown, as_text(reason)[:500]
            )

    def report(self) -> None:
        """Log the number of values left out, unless each was logged by name."""
        if self.count > len(self._names):
            names = ", ".join(self._names)
            _log.warning("run %s: %d values were left out, among them of %s", self._run_name, self.count, names)


def as_text(value: object) -> str:
    """Return the text of a user's value, also of one that has none."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001  its methods may raise anything
        return f"a {type(value).__name__} that cannot be shown"
