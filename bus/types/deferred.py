"""Values that are on their way from a device, and those that cannot be published."""

import logging
from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

_log = logging.getLogger("offloop")
_NAMED = 20
_PLAIN = frozenset({float, int, bool, str, bytes, list, dict, type(None)})


@runtime_checkable
class Deferred(Protocol):
    """A value that is on its way."""

    def ready(self) -> bool:
        """Returns at once whether :meth:`value` can be had without waiting."""

    def value(self) -> Any:
        """The value; may wait, and is asked only once ready, or when the stream is drained."""


def is_deferred(value: Any) -> TypeGuard[Deferred]:
    """The value is on its way."""
    # Asking whether something is a Deferred is slow, and most values obviously are not.
    return type(value) not in _PLAIN and isinstance(value, Deferred)


def deferred_values(fields: Mapping[str, Any]) -> dict[str, Deferred]:
    """Those of the values that are on their way."""
    return {name: value for name, value in fields.items() if is_deferred(value)}


class LeftOut:
    """The user's values that cannot be published, and end nothing: the first of each name is logged, and
    :meth:`report` counts them."""

    def __init__(self, run_name: str) -> None:
        self.count = 0
        """Values that were left out."""
        self._run_name = run_name
        self._names: dict[str, None] = {}

    def add(self, name: object, reason: object) -> None:
        """Counts a value that is left out."""
        self.count += 1
        shown = _as_text(name)[:100]
        if shown not in self._names and len(self._names) < _NAMED:
            self._names[shown] = None
            _log.warning(
                "run %s: %s is left out, all else is published: %s", self._run_name, shown, _as_text(reason)[:500]
            )

    def report(self) -> None:
        """Logs the number of values left out, unless each of them has been named."""
        if self.count > len(self._names):
            names = ", ".join(self._names)
            _log.warning("run %s: %d values were left out, among them of %s", self._run_name, self.count, names)


def _as_text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001  its methods may raise anything
        return f"a {type(value).__name__} that cannot be shown"
