"""A value that is on its way from a device."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

_PLAIN = frozenset({float, int, bool, str, bytes, list, dict, type(None)})


@runtime_checkable
class Deferred(Protocol):
    """A value that is on its way."""

    def ready(self) -> bool:
        """Whether :meth:`value` can be had without waiting. Must not wait itself."""

    def value(self) -> Any:
        """The value; may wait, and is asked only once ready, or when the stream is drained."""


def deferred_values(fields: Mapping[str, Any]) -> dict[str, Deferred]:
    """Those of the values that are on their way."""
    # Asking whether something is a Deferred is slow, and most values obviously are not.
    return {name: value for name, value in fields.items() if type(value) not in _PLAIN and isinstance(value, Deferred)}
